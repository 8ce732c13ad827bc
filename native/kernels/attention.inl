// Attention of a few query rows over pages of cached keys and values of one kv head, written once
// over a policy of simd/. Layouts: kernels.h.
//
// A page is two products (line_sums.inl): scores = keys · query over the head size, and mixed =
// values · probabilities over the places. kPagesAtOnce pages share one softmax; they are counted
// from the first page of the call, so that a row's bits do not depend on the rows beside it.

#include "kernels/kv_block.inl"
#include "kernels/line_sums.inl"

constexpr int kRowsAtOnce = 3;        // rows that share each line loaded; SmolLM2's heads a kv head
constexpr int kGroupsAtOnce = 4;      // of rows, that go through a page while it is near
constexpr int kPreparedWords = 8192;  // prepared queries that lie on the stack: 32 KiB
constexpr int kMostPrepared = 192;    // rows of them, a multiple of kRowsAtOnce

// ---------------------------------------------------------------------------------------------
// Queries

// Queries as factors, made once for all pages.
struct Prepared {
  alignas(64) std::uint32_t words[kPreparedWords];
  float scale[kMostPrepared];         // of whole numbers
  std::int32_t start[kMostPrepared];  // of their sums: what the keys' offset has to be corrected by
};

template <typename Kv>
void prepare_query(const float* query, int head_size, int row, Prepared& out) {
  V x[kMaxHeadSize / kLanes];
  const int count = load_row(query, head_size, x);
  std::uint32_t* words = out.words + row * count;
  if constexpr (Kv::whole) {
    I whole[kMaxHeadSize / kLanes];
    const Scale scale = scale_to(Kv::top_query(head_size), x, count);
    round_row(x, count, scale, whole);
    std::int32_t total = 0;
    for (int i = 0; i < count / kLanes; ++i) total += sum(whole[i]);
    out.scale[row] = scale.inverse;
    out.start[row] = -Kv::offset * total;
    Kv::Key::prepare(whole, count, words);
  } else {
    Kv::Key::prepare(x, count, words);
  }
}

// ---------------------------------------------------------------------------------------------
// Softmax

constexpr float kLaneNumbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// `a` at places of tile `tile` before `seen`, `rest` at the others.
inline V keep_seen(V a, int tile, int seen, float rest) {
  const int here = seen - tile * kTileRows;
  if (here >= kTileRows) return a;
  return if_greater(broadcast(static_cast<float>(here)), load(kLaneNumbers), a, broadcast(rest));
}

// e^x for x <= 0, off by less than 2e-7; 0 below -87.3, so that nothing is subnormal.
// 2^r - 1 = r q(r): q fitted for the least greatest relative error of 2^r over |r| <= 1/2.
inline V exp_not_positive(V x) {
  const V exponent = mul(x, broadcast(0x1.715476p+0f));
  const V n = round(exponent);
  const V r = sub(exponent, n);
  V q = broadcast(0x1.5bba14p-10f);
  q = fma(q, r, broadcast(0x1.3cea88p-7f));
  q = fma(q, r, broadcast(0x1.c6b752p-5f));
  q = fma(q, r, broadcast(0x1.ebf9bcp-3f));
  q = fma(q, r, broadcast(0x1.62e42ap-1f));
  return scale_unless_below(fma(q, r, broadcast(1.0f)), n, x, -87.3f);
}

// total[r] merged with part[r] where the part is not empty.
template <int rows>
void merge_rows(Partial* total, const Partial* part, int head_size) {
  float fall[kLanes] = {};
  for (int r = 0; r < rows; ++r) {
    const float rise = part[r].maximum - total[r].maximum;  // +inf where the total is empty
    fall[r] = rise > 0.0f ? -rise : rise;
  }
  store(fall, exp_not_positive(load(fall)));
  for (int r = 0; r < rows; ++r) {
    if (part[r].sum == 0.0f) continue;
    const bool rises = part[r].maximum > total[r].maximum;
    const float keep = rises ? fall[r] : 1.0f, take = rises ? 1.0f : fall[r];
    const V kept = broadcast(keep), taken = broadcast(take);
    float* const to = total[r].mixed;
    const float* const from = part[r].mixed;
    for_vectors(head_size, [&](int d, auto get, auto put) {
      put(to + d, fma(get(to + d), kept, mul(get(from + d), taken)));
    });
    total[r].sum = total[r].sum * keep + part[r].sum * take;
    total[r].maximum = rises ? part[r].maximum : total[r].maximum;
  }
}

void merge(Partial& total, const Partial& part, int head_size) {
  merge_rows<1>(&total, &part, head_size);
}

// ---------------------------------------------------------------------------------------------
// Pages

// kPagesAtOnce pages at most.
struct Unit {
  const std::uint8_t* const* blocks;
  int pages;
  int left;  // blocks from the first of these on that are to be fetched in time
  // From a block to the one in the next unit: pages may lie anywhere, so that the processor cannot
  // guess. Twice as fast as without, and as one page ahead, where the cache lies in memory.
  std::ptrdiff_t ahead(int page) const {
    const int next = page + kPagesAtOnce;
    return next < left ? blocks[next] - blocks[page] : 0;
  }
};

// Rows that see the first seen[r] places of a unit, and what becomes of them.
template <int rows>
struct RowGroup {
  int first;  // row
  int most;   // places that one of them sees
  int seen[rows];
  alignas(64) float scores[rows * kPlacesAtOnce];
  int pages() const { return (most + kPage - 1) / kPage; }
};

// Scales of one page: of keys, then of values.
template <typename Kv>
const float* scales_of(const std::uint8_t* block, int head_size) {
  return reinterpret_cast<const float*>(block + Block<Kv>(head_size).scales);
}

// Scores of a group with one page; `fetches` what comes in the next unit.
template <typename Kv, int rows>
void score(const Prepared& queries, int head_size, const Unit& unit, int page, bool fetches,
           RowGroup<rows>& group) {
  const Block<Kv> block(head_size);
  const Factors factors{queries.words + group.first * block.columns,
                        block.columns,
                        0,
                        block.columns / Kv::key_width,
                        Kv::whole ? queries.start + group.first : nullptr,
                        queries.scale + group.first};
  const Lines lines{{unit.blocks[page]},
                    {fetches ? unit.ahead(page) : 0},
                    {block.key_steps},
                    1,
                    kPlaceTiles,
                    block.key_tile_bytes,
                    64,
                    Kv::whole ? scales_of<Kv>(unit.blocks[page], head_size) : nullptr};
  sum_rows<typename Kv::Key, rows>(lines, factors, group.scores + page * kPage, kPlacesAtOnce);
}

// The maximum of what each row sees; scores of what it does not see become -inf.
template <int rows>
void find_maxima(RowGroup<rows>& group, Partial* part) {
  for (int r = 0; r < rows; ++r) {
    float* const s = group.scores + r * kPlacesAtOnce;
    V greatest = broadcast(-0x1.fffffep127f);  // finite, so that -inf - maximum is not NaN
    int tile = 0;
    for (; tile < group.seen[r] / kTileRows; ++tile) {
      greatest = max(greatest, load(s + tile * kTileRows));
    }
    for (; tile < group.pages() * kPlaceTiles; ++tile) {
      const V seen = keep_seen(load(s + tile * kTileRows), tile, group.seen[r], -INFINITY);
      store(s + tile * kTileRows, seen);
      greatest = max(greatest, seen);
    }
    part[r].maximum = max(greatest);
  }
}

// Probabilities of a part as factors, and what their sums are to be multiplied with.
template <typename Kv>
float prepare_part(const V* p, [[maybe_unused]] const float* scales, std::uint32_t* words) {
  constexpr int tiles = Kv::part / kTileRows;
  if constexpr (!Kv::whole) {
    Kv::Value::prepare(p, Kv::part, words);
    return 1.0f;
  } else {
    V product[tiles];
    I whole[tiles];
    float greatest = 0.0f;
    for (int t = 0; t < tiles; ++t) {
      // Scales of places that nobody has written yet may be anything.
      const V scale = load(scales + t * kTileRows);
      product[t] = if_greater(p[t], zero(), mul(p[t], scale), zero());
    }
    static_assert(tiles == 2);
    greatest = greatest_magnitude(product[0], product[1]);
    const float factor = greatest < 0x1p-118f ? 0.0f : 255.0f / greatest;  // NaN stays
    for (int t = 0; t < tiles; ++t) whole[t] = to_int(mul(product[t], broadcast(factor)));
    Kv::Value::prepare(whole, Kv::part, words);
    return greatest * (1.0f / 255.0f);
  }
}

// Probabilities of a group as factors, in `words` [rows][kPlacesAtOnce], and factors of the sums
// over each part in `factors` [rows][kMostParts].
template <typename Kv, int rows>
void weigh(const Unit& unit, int head_size, const RowGroup<rows>& group, Partial* part,
           std::uint32_t* words, float* factors) {
  constexpr int tiles = Kv::part / kTileRows, in_page = kPage / Kv::part;
  V total[rows];
  for (V& x : total) x = zero();
  for (int page = 0; page < group.pages(); ++page) {
    const float* scales =
        Kv::whole ? scales_of<Kv>(unit.blocks[page], head_size) + kPage : nullptr;
    for (int r = 0; r < rows; ++r) {
      const V maximum = broadcast(part[r].maximum);
      for (int i = page * in_page; i < (page + 1) * in_page; ++i) {
        const float* s = group.scores + r * kPlacesAtOnce + i * Kv::part;
        V p[tiles];
        for (int t = 0; t < tiles; ++t) {
          p[t] = exp_not_positive(sub(load(s + t * kTileRows), maximum));
          total[r] = add(total[r], p[t]);
        }
        std::uint32_t* to = words + r * kPlacesAtOnce + i * (Kv::part / Kv::Value::word);
        factors[r * kMostParts + i] =
            prepare_part<Kv>(p, Kv::whole ? scales + i % in_page * Kv::part : nullptr, to);
      }
    }
  }
  for (int r = 0; r < rows; ++r) part[r].sum = group.seen[r] == 0 ? 0.0f : sum(total[r]);
}

// What lies where in the values of a unit, up to the last place that a group sees.
template <typename Kv>
Lines value_lines(const Unit& unit, int head_size, int most, bool fetches) {
  constexpr int in_page = kPage / Kv::part, steps = Kv::part / Kv::value_width;
  const Block<Kv> block(head_size);
  Lines lines{};
  lines.parts = (most + Kv::part - 1) / Kv::part;
  lines.tiles = block.columns / kTileRows;
  lines.tile_bytes = 64;
  lines.step_bytes = block.value_step_bytes;
  for (int i = 0; i < lines.parts; ++i) {
    const int page = i / in_page, left = (most - i * Kv::part + Kv::value_width - 1) / Kv::value_width;
    lines.first[i] = unit.blocks[page] + block.values +
                     static_cast<std::size_t>(i % in_page * steps) * block.value_step_bytes;
    lines.ahead[i] = fetches ? unit.ahead(page) : 0;
    lines.steps[i] = left < steps ? left : steps;
  }
  return lines;
}

struct Call {
  const Prepared& queries;
  const int* visible;  // [rows]
  int head_size;
  Partial* out;  // [rows]
};

// Softmax and values of a group, merged with what came before.
template <typename Kv, int rows>
void mix(const Call& call, const Unit& unit, bool fetches, RowGroup<rows>& group) {
  alignas(64) std::uint32_t words[rows * kPlacesAtOnce];
  alignas(64) float mixed[rows * kMaxHeadSize];
  float scales[rows * kMostParts];
  const int columns = whole_tiles(call.head_size);
  Partial part[rows];
  for (int r = 0; r < rows; ++r) part[r].mixed = mixed + r * columns;
  find_maxima(group, part);
  weigh<Kv>(unit, call.head_size, group, part, words, scales);
  const Factors factors{words,   kPlacesAtOnce, Kv::part / Kv::Value::word, Kv::part / Kv::value_width,
                        nullptr, scales};
  sum_rows<typename Kv::Value, rows>(value_lines<Kv>(unit, call.head_size, group.most, fetches),
                                     factors, mixed, columns);
  merge_rows<rows>(call.out + group.first, part, call.head_size);
}

// `count` groups of rows from `first` on, with the pages of a unit; the last rows fetch.
template <typename Kv, int rows>
void attend_unit(const Call& call, const Unit& unit, int first, int count, int first_place,
                 bool fetches) {
  RowGroup<rows> groups[kGroupsAtOnce];
  for (int g = 0; g < count; ++g) {
    RowGroup<rows>& group = groups[g];
    group.first = first + g * rows;
    group.most = 0;
    for (int r = 0; r < rows; ++r) {
      const int places = call.visible[group.first + r] - first_place;
      group.seen[r] = places < 0 ? 0 : places > unit.pages * kPage ? unit.pages * kPage : places;
      group.most = group.seen[r] > group.most ? group.seen[r] : group.most;
    }
  }
  for (int page = 0; page < unit.pages; ++page) {
    for (int g = 0; g < count; ++g) {
      if (page >= groups[g].pages()) continue;
      score<Kv>(call.queries, call.head_size, unit, page, fetches && g + 1 == count, groups[g]);
    }
  }
  for (int g = 0; g < count; ++g) {
    if (groups[g].most > 0) mix<Kv>(call, unit, fetches && g + 1 == count, groups[g]);
  }
}

template <typename Kv>
void attend_pages(const float* queries, int rows, const std::uint8_t* const* blocks, int pages,
                  int more, const int* visible, int head_size, Partial* out) {
  Prepared prepared;
  for (int r = 0; r < rows; ++r) prepare_query<Kv>(queries + r * head_size, head_size, r, prepared);
  const Call call{prepared, visible, head_size, out};
  for (int page = 0; page < pages; page += kPagesAtOnce) {
    const int count = pages - page < kPagesAtOnce ? pages - page : kPagesAtOnce;
    const Unit unit{blocks + page, count, pages + more - page};
    int row = 0;
    while (row + kRowsAtOnce <= rows) {
      const int whole = (rows - row) / kRowsAtOnce;
      const int groups = whole < kGroupsAtOnce ? whole : kGroupsAtOnce;
      const int next = row + groups * kRowsAtOnce;
      attend_unit<Kv, kRowsAtOnce>(call, unit, row, groups, page * kPage, next == rows);
      row = next;
    }
    if (row < rows) attend_unit<Kv, 1>(call, unit, row, rows - row, page * kPage, true);
  }
}

void fetch(const std::uint8_t* memory, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += 64) prefetch(memory + at);
}

void attend(KvKind kind, const float* queries, int rows, const std::uint8_t* const* blocks,
            int pages, int more, const int* visible, int head_size, Partial* out) {
  for (int r = 0; r < rows; ++r) {
    out[r].maximum = -INFINITY;
    out[r].sum = 0.0f;
    std::memset(out[r].mixed, 0, sizeof(float) * static_cast<std::size_t>(head_size));
  }
  const int fit = kPreparedWords / whole_tiles(head_size);
  const int most = (fit < kMostPrepared ? fit : kMostPrepared) / kRowsAtOnce * kRowsAtOnce;
  const auto pages_of = kind == KvKind::f32     ? attend_pages<FloatKv>
                        : kind == KvKind::int16 ? attend_pages<PairKv>
                                                : attend_pages<QuadKv>;
  for (int first = 0; first < rows; first += most) {
    const int count = rows - first < most ? rows - first : most;
    pages_of(queries + first * head_size, count, blocks, pages, more, visible + first, head_size,
             out + first);
  }
}
