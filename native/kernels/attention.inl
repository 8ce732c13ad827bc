// Attention of a few query rows over pages of cached keys and values of one kv head, written once
// over a policy of simd/. Layouts: kernels.h.
//
// A page is two products (line_sums.inl): scores = keys · query over the head size, and mixed =
// values · probabilities over the places. kPagesAtOnce pages share one softmax; they are counted
// from the first page of the call, so that a row's bits do not depend on the rows beside it.

#include "kernels/kv_block.inl"
#include "kernels/line_sums.inl"

constexpr int kRowsAtOnce = 3;        // rows that share each line loaded; SmolLM2's heads a kv head
constexpr int kPreparedWords = 8192;  // prepared queries that lie on the stack: 32 KiB
constexpr int kMostPrepared = 192;    // rows of them, a multiple of kRowsAtOnce

// ---------------------------------------------------------------------------------------------
// Queries

// Queries as factors, made once for all pages.
struct Prepared {
  alignas(64) std::uint32_t words[kPreparedWords];
  float scale[kMostPrepared];         // int8: of the whole numbers
  std::int32_t start[kMostPrepared];  // int8: what the keys' + 128 has to be corrected by
};

template <typename Kv>
void prepare_query(const float* query, int head_size, int row, Prepared& out) {
  V x[kMaxHeadSize / kLanes];
  const int count = load_row(query, head_size, x);
  std::uint32_t* words = out.words + row * count;
  if constexpr (Kv::whole) {
    I whole[kMaxHeadSize / kLanes];
    const Scale scale = scale_to(Kv::top_query, x, count);
    round_row(x, count, scale, whole);
    std::int32_t total = 0;
    for (int i = 0; i < count / kLanes; ++i) total += sum(whole[i]);
    out.scale[row] = scale.inverse;
    out.start[row] = -128 * total;
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

// total[r] merged with part[r] where the part is not empty. What a part has mixed has still to be
// multiplied with factor[r].
template <int rows>
void merge_rows(Partial* total, const Partial* part, const float* factor, int head_size) {
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
    const V kept = broadcast(keep), taken = broadcast(take * factor[r]);
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
  const float one = 1.0f;
  merge_rows<1>(&total, &part, &one, head_size);
}

// ---------------------------------------------------------------------------------------------
// Pages

// Up to kRowsAtOnce rows and kPagesAtOnce pages; row r sees its first seen[r] places.
struct Unit {
  const std::uint8_t* const* blocks;
  int pages, first;
  int left;  // blocks from the first of these on that are to be fetched in time
  int seen[kRowsAtOnce];
  // From a block to the one in the next unit: pages may lie anywhere, so that the processor cannot
  // guess. Twice as fast as without, and as one page ahead, where the cache lies in memory.
  std::ptrdiff_t ahead(int page) const {
    const int next = page + kPagesAtOnce;
    return next < left ? blocks[next] - blocks[page] : 0;
  }
};

// Scales of one page: of keys, then of values.
template <typename Kv>
const float* scales_of(const std::uint8_t* block, int head_size) {
  return reinterpret_cast<const float*>(block + Block<Kv>(head_size).scales);
}

// scores [rows][kPlacesAtOnce]
template <typename Kv, int rows>
void score(const Prepared& queries, int head_size, const Unit& unit, float* scores) {
  const Block<Kv> block(head_size);
  const Factors factors{queries.words + unit.first * block.columns, block.columns,
                        block.columns / Kv::width,
                        Kv::whole ? queries.start + unit.first : nullptr};
  for (int page = 0; page < unit.pages; ++page) {
    const Lines lines{{unit.blocks[page]},
                      {unit.ahead(page)},
                      {block.key_steps},
                      1,
                      kPlaceTiles,
                      block.key_tile_bytes,
                      64};
    sum_rows<typename Kv::Key, rows>(lines, factors, scores + page * kPage, kPlacesAtOnce);
    if constexpr (Kv::whole) {
      const float* scales = scales_of<Kv>(unit.blocks[page], head_size);
      for (int r = 0; r < rows; ++r) {
        const V of_query = broadcast(queries.scale[unit.first + r]);
        float* s = scores + r * kPlacesAtOnce + page * kPage;
        for (int i = 0; i < kPage; i += kLanes) {
          store(s + i, mul(load(s + i), mul(load(scales + i), of_query)));
        }
      }
    }
  }
}

// Probabilities times the scales of their values times `factor`, as whole numbers.
inline void whole_products(const V (&p)[kPlaceTiles], const float* scales, float factor,
                           I (&out)[kPlaceTiles]) {
  for (int t = 0; t < kPlaceTiles; ++t) {
    // Scales of places that nobody has written yet may be anything.
    const V scale = mul(load(scales + t * kTileRows), broadcast(factor));
    out[t] = to_int(if_greater(p[t], zero(), mul(p[t], scale), zero()));
  }
}

// The greatest scale of the values that a row sees; NaN where one is not finite.
template <typename Kv>
float greatest_scale(const Unit& unit, int head_size, int seen) {
  float greatest = 0.0f;
  for (int page = 0; page < unit.pages; ++page) {
    const float* scales = scales_of<Kv>(unit.blocks[page], head_size) + kPage;
    V a[kPlaceTiles];
    for (int t = 0; t < kPlaceTiles; ++t) {
      a[t] = keep_seen(load(scales + t * kTileRows), page * kPlaceTiles + t, seen, 0.0f);
    }
    const float low = greatest_magnitude(a[0], a[1]), high = greatest_magnitude(a[2], a[3]);
    const float here = low <= high || high != high ? high : low;
    greatest = here <= greatest ? greatest : here;
  }
  return greatest;
}

// Softmax of each row over what it sees: maximum and sum to `part`, probabilities as factors to
// `words` [rows][kPlacesAtOnce], and to `factor` what sums over them are to be multiplied with.
template <typename Kv, int rows>
void softmax(const Unit& unit, int head_size, float* scores, std::uint32_t* words, Partial* part,
             float* factor) {
  constexpr float lowest = -0x1.fffffep127f;
  V greatest[rows], total[rows];
  for (V& x : greatest) x = broadcast(lowest);  // finite, so that -inf - maximum is not NaN
  for (V& x : total) x = zero();
  for (int tile = 0; tile < unit.pages * kPlaceTiles; ++tile) {
    for (int r = 0; r < rows; ++r) {
      float* const s = scores + r * kPlacesAtOnce + tile * kTileRows;
      const V seen = keep_seen(load(s), tile, unit.seen[r], -INFINITY);
      store(s, seen);
      greatest[r] = max(greatest[r], seen);
    }
  }
  for (int r = 0; r < rows; ++r) {
    part[r].maximum = max(greatest[r]);
    factor[r] = 1.0f;
    if constexpr (Kv::whole) {
      // A probability is at most 1, and with its value's scale at most the greatest scale.
      const bool same = r > 0 && unit.seen[r] == unit.seen[r - 1];
      factor[r] = same ? factor[r - 1]
                       : greatest_scale<Kv>(unit, head_size, unit.seen[r]) / Kv::top_probability;
    }
  }
  for (int page = 0; page < unit.pages; ++page) {
    for (int r = 0; r < rows; ++r) {
      const int at = r * kPlacesAtOnce + page * kPage;
      V p[kPlaceTiles];
      for (int t = 0; t < kPlaceTiles; ++t) {
        p[t] = exp_not_positive(sub(load(scores + at + t * kTileRows), broadcast(part[r].maximum)));
      }
      total[r] = add(total[r], add(add(p[0], p[1]), add(p[2], p[3])));
      if constexpr (Kv::whole) {
        const float* scales = scales_of<Kv>(unit.blocks[page], head_size) + kPage;
        I whole[kPlaceTiles];
        // A subnormal's reciprocal may be infinite.
        whole_products(p, scales, factor[r] >= 0x1p-126f ? 1.0f / factor[r] : 0.0f, whole);
        Kv::Value::prepare(whole, kPage, words + at);
      } else {
        Kv::Value::prepare(p, kPage, words + at);
      }
    }
  }
  for (int r = 0; r < rows; ++r) part[r].sum = unit.seen[r] == 0 ? 0.0f : sum(total[r]);
}

// What lies where in the values of a unit, up to the last place that a row sees.
template <typename Kv>
Lines value_lines(const Unit& unit, int head_size, int most) {
  const Block<Kv> block(head_size);
  Lines lines{{}, {}, {}, unit.pages, block.columns / kTileRows, 64, block.value_step_bytes};
  for (int page = 0; page < unit.pages; ++page) {
    const int places = most - page * kPage < kPage ? most - page * kPage : kPage;
    lines.first[page] = unit.blocks[page] + block.values;
    lines.ahead[page] = unit.ahead(page);
    lines.steps[page] = (places + Kv::width - 1) / Kv::width;
  }
  return lines;
}

struct Call {
  const Prepared& queries;
  const int* visible;  // [rows]
  int head_size;
  Partial* out;  // [rows]
};

template <typename Kv, int rows>
void attend_unit(const Call& call, Unit unit, int first_place) {
  int most = 0;
  for (int r = 0; r < rows; ++r) {
    const int places = call.visible[unit.first + r] - first_place;
    unit.seen[r] = places < 0 ? 0 : places > unit.pages * kPage ? unit.pages * kPage : places;
    most = unit.seen[r] > most ? unit.seen[r] : most;
  }
  if (most == 0) return;
  unit.pages = (most + kPage - 1) / kPage;

  alignas(64) float scores[rows * kPlacesAtOnce];
  alignas(64) std::uint32_t words[rows * kPlacesAtOnce];
  alignas(64) float mixed[rows * kMaxHeadSize];
  const int columns = whole_tiles(call.head_size);
  Partial part[rows];
  for (int r = 0; r < rows; ++r) part[r].mixed = mixed + r * columns;
  float factor[rows];
  score<Kv, rows>(call.queries, call.head_size, unit, scores);
  softmax<Kv, rows>(unit, call.head_size, scores, words, part, factor);
  const Factors factors{words, kPlacesAtOnce, kPage / Kv::width, nullptr};
  sum_rows<typename Kv::Value, rows>(value_lines<Kv>(unit, call.head_size, most), factors, mixed,
                                     columns);
  merge_rows<rows>(call.out + unit.first, part, factor, call.head_size);
}

template <typename Kv>
void attend_pages(const float* queries, int rows, const std::uint8_t* const* blocks, int pages,
                  int more, const int* visible, int head_size, Partial* out) {
  Prepared prepared;
  for (int r = 0; r < rows; ++r) prepare_query<Kv>(queries + r * head_size, head_size, r, prepared);
  const Call call{prepared, visible, head_size, out};
  for (int page = 0; page < pages; page += kPagesAtOnce) {
    const int count = pages - page < kPagesAtOnce ? pages - page : kPagesAtOnce;
    // What comes next is fetched once, by the last rows.
    Unit unit{blocks + page, count, 0, 0, {}};
    for (; unit.first + kRowsAtOnce <= rows; unit.first += kRowsAtOnce) {
      unit.left = unit.first + kRowsAtOnce == rows ? pages + more - page : 0;
      attend_unit<Kv, kRowsAtOnce>(call, unit, page * kPage);
    }
    for (; unit.first < rows; ++unit.first) {
      unit.left = unit.first + 1 == rows ? pages + more - page : 0;
      attend_unit<Kv, 1>(call, unit, page * kPage);
    }
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
  const auto pages_of = kind == KvKind::f32    ? attend_pages<FloatKv>
                        : kind == KvKind::bf16 ? attend_pages<PairKv>
                                               : attend_pages<QuadKv>;
  for (int first = 0; first < rows; first += most) {
    const int count = rows - first < most ? rows - first : most;
    pages_of(queries + first * head_size, count, blocks, pages, more, visible + first, head_size,
             out + first);
  }
}
