// Attention of a few query rows over pages of cached keys and values of one kv head, written once
// over a policy of simd/. Layouts: kernels.h.
//
// A page is two products (line_sums.inl): scores = keys · query over the head size, and mixed =
// values · probabilities over the places. kPagesAtOnce pages share one softmax; they are counted
// from the first page of the call, so that a row's bits do not depend on the rows beside it.

#include "kernels/kv_block.inl"
#include "kernels/line_sums.inl"
#include "kernels/softmax.inl"

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
// Pages

// kPagesAtOnce pages at most.
struct Unit {
  const std::uint8_t* const* blocks;
  int pages;
  int left;  // blocks from the first of these on that are to be fetched in time
  // Whether there is no other unit in the call. What comes next is likely to be as long then, and
  // each page fetches as much of the same page there as it is read itself.
  bool alone;
  // From a block to the one in the next unit: pages may lie anywhere, so that the processor cannot
  // guess. Twice as fast as without, and as one page ahead, where the cache lies in memory.
  std::ptrdiff_t ahead(int page) const {
    const int next = page + (alone ? pages : kPagesAtOnce);
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
  int tiles() const { return whole_tiles(most) / kTileRows; }
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
  const std::uint8_t* const at = unit.blocks[page];
  const std::ptrdiff_t ahead = fetches ? unit.ahead(page) : 0;
  // Each line fetches another one, so that whoever fetches a whole page goes through a whole one.
  const int tiles = ahead != 0 && !unit.alone ? kPlaceTiles : group.tiles() - page * kPlaceTiles;
  const Lines lines{{at},
                    {ahead},
                    {block.key_steps},
                    1,
                    tiles < kPlaceTiles ? tiles : kPlaceTiles,
                    64,
                    kKeyStepBytes,
                    Kv::whole ? scales_of<Kv>(at, head_size) : nullptr};
  sum_rows<typename Kv::Key, rows>(lines, factors, group.scores + page * kPage, kPlacesAtOnce);
}

// The maximum of what each row sees; scores of what it does not see become -inf, up to an even
// tile.
template <int rows>
void find_maxima(RowGroup<rows>& group, Partial* part) {
  for (int r = 0; r < rows; ++r) {
    float* const s = group.scores + r * kPlacesAtOnce;
    V greatest = broadcast(-0x1.fffffep127f);  // finite, so that -inf - maximum is not NaN
    int tile = 0;
    for (; tile < group.seen[r] / kTileRows; ++tile) {
      greatest = max(greatest, load(s + tile * kTileRows));
    }
    for (; tile < group.tiles(); ++tile) {
      const V seen = keep_seen(load(s + tile * kTileRows), tile, group.seen[r], -INFINITY);
      store(s + tile * kTileRows, seen);
      greatest = max(greatest, seen);
    }
    if (tile % 2 != 0) store(s + tile * kTileRows, broadcast(-INFINITY));
    part[r].maximum = max(greatest);
  }
}

// What becomes of the products of one row's probabilities with the scales of their values, 32 of
// which are rounded to 8 bits together: the greatest of each 32 as V, and the sum of probabilities.
struct Weights {
  V greatest, total;
};

// Makes a row's scores such products, those of the first `parts` times 32 places.
template <typename Kv>
Weights multiply_probabilities(const Unit& unit, int head_size, float* scores, V maximum, int seen,
                               int parts) {
  constexpr int tiles = Kv::part / kTileRows;
  static_assert(tiles == 2);
  V total = zero(), greatest[kMostParts];
  for (V& x : greatest) x = zero();
  for (int i = 0; i < parts; ++i) {
    const float* scales = scales_of<Kv>(unit.blocks[i / 2], head_size) + kPage + i % 2 * Kv::part;
    V product[tiles];
    for (int t = 0; t < tiles; ++t) {
      float* const s = scores + i * Kv::part + t * kTileRows;
      const V p = power_not_positive(sub(load(s), maximum));
      total = add(total, p);
      // Scales of places that nobody has written yet may be anything.
      product[t] = keep_seen(mul(p, load(scales + t * kTileRows)), i * tiles + t, seen, 0.0f);
      store(s, product[t]);
    }
    greatest[i] = greater_bits(product[0], product[1]);
  }
  return {maxima(greatest), total};
}

// Rounds them, `inverse` [parts] times each.
template <typename Kv>
void round_products(const float* products, const float* inverse, int parts, std::uint32_t* words) {
  constexpr int tiles = Kv::part / kTileRows;
  for (int i = 0; i < parts; ++i) {
    I whole[tiles];
    for (int t = 0; t < tiles; ++t) {
      const V product = load(products + i * Kv::part + t * kTileRows);
      whole[t] = to_int(mul(product, broadcast(inverse[i])));
    }
    Kv::Value::prepare(whole, Kv::part, words + i * (Kv::part / Kv::Value::word));
  }
}

// Probabilities of a group as factors, in `words` [rows][kPlacesAtOnce], and factors of the sums
// over each part in `factors` [rows][kLanes]. Row by row in each step, so that one row's slow steps
// pass while the others are under way.
template <typename Kv, int rows>
void weigh_whole(const Unit& unit, int head_size, RowGroup<rows>& group, Partial* part,
                 std::uint32_t* words, float* factors) {
  float inverse[rows * kLanes];
  int parts[rows];
  V total[rows];
  for (int r = 0; r < rows; ++r) {
    // Factors of what this row does not see, but another one does, are zeros.
    std::memset(words + r * kPlacesAtOnce, 0,
                static_cast<std::size_t>(group.pages() * (kPage / Kv::Value::word)) * 4);
    parts[r] = (group.seen[r] + Kv::part - 1) / Kv::part;
    const Weights weights =
        multiply_probabilities<Kv>(unit, head_size, group.scores + r * kPlacesAtOnce,
                                   broadcast(part[r].maximum), group.seen[r], parts[r]);
    const V most = weights.greatest;
    total[r] = weights.total;
    store(factors + r * kLanes, mul(most, broadcast(1.0f / 255.0f)));
    // 0 where a reciprocal may be infinite; NaN stays.
    store(inverse + r * kLanes,
          if_greater(broadcast(0x1p-118f), most, zero(), div(broadcast(255.0f), most)));
  }
  for (int r = 0; r < rows; ++r) {
    round_products<Kv>(group.scores + r * kPlacesAtOnce, inverse + r * kLanes, parts[r],
                       words + r * kPlacesAtOnce);
    part[r].sum = group.seen[r] == 0 ? 0.0f : sum(total[r]);
  }
}

template <typename Kv, int rows>
void weigh_floats(RowGroup<rows>& group, Partial* part, std::uint32_t* words) {
  for (int r = 0; r < rows; ++r) {
    const V maximum = broadcast(part[r].maximum);
    V total = zero();
    for (int i = 0; i < group.tiles() * kTileRows; i += kLanes) {
      const V p = power_not_positive(sub(load(group.scores + r * kPlacesAtOnce + i), maximum));
      total = add(total, p);
      Kv::Value::prepare(&p, kLanes, words + r * kPlacesAtOnce + i);
    }
    part[r].sum = group.seen[r] == 0 ? 0.0f : sum(total);
  }
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
    const int page = i / in_page,
              left = (most - i * Kv::part + Kv::value_width - 1) / Kv::value_width;
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
  float scales[rows * kLanes];
  const int columns = whole_tiles(call.head_size);
  Partial part[rows];
  for (int r = 0; r < rows; ++r) part[r].mixed = mixed + r * columns;
  find_maxima(group, part);
  if constexpr (Kv::whole) {
    weigh_whole<Kv>(unit, call.head_size, group, part, words, scales);
  } else {
    weigh_floats<Kv>(group, part, words);
  }
  const Factors factors{words,
                        kPlacesAtOnce,
                        Kv::part / Kv::Value::word,
                        Kv::part / Kv::value_width,
                        nullptr,
                        Kv::whole ? scales : nullptr};
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
    const Unit unit{blocks + page, count, pages + more - page, pages <= kPagesAtOnce};
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
