// Sums of lines of keys or values times factors, 16 side by side. A sum has one accumulator and a
// fixed order, so that its bits do not depend on the rows and tiles that are computed beside it.

constexpr int kPlacesAtOnce = kPagesAtOnce * kPage;
constexpr int kMostParts = 2 * kPagesAtOnce;

// Lines that a sum goes through part by part; a part lies in one block.
struct Lines {
  const std::uint8_t* first[kMostParts];
  std::ptrdiff_t ahead[kMostParts];  // to lines that are wanted soon; 0: there are none
  int steps[kMostParts];
  int parts, tiles;
  std::size_t tile_bytes, step_bytes;
  const float* scales;  // of the lanes [tiles][16], nullptr: none
};

struct Factors {
  const std::uint32_t* words;  // [rows][stride]
  int stride;
  int part;                   // words from a part to the next
  int steps;                  // that a part was prepared for
  const std::int32_t* start;  // [rows], where the integer sums begin; nullptr: at 0
  const float*
      scales;  // [rows][kLanes], of the parts of Dot::scaled, [rows] where the lanes have scales
};

// Adds the lines of one part to acc[r][t].
template <typename Dot, int rows, int tiles>
SMOLLM2_INLINE inline void add_part(const Lines& lines, int part, int first, const Factors& factors,
                                    typename Dot::Acc (&acc)[rows][tiles]) {
  const std::uint8_t* at = lines.first[part] + static_cast<std::size_t>(first) * lines.tile_bytes;
  const std::uint32_t* const words = factors.words + part * factors.part;
  const std::ptrdiff_t ahead = lines.ahead[part];
  const int steps = lines.steps[part];
  for (int step = 0; step < steps; ++step, at += lines.step_bytes) {
    typename Dot::Line line[tiles];
    each<tiles>([&](auto t) SMOLLM2_INLINE {
      const std::uint8_t* const p = at + static_cast<std::size_t>(t) * lines.tile_bytes;
      prefetch(p + ahead);  // to the second level: the first is full of what is in use
      line[t] = Dot::line(p);
    });
    each<rows>([&](auto r) SMOLLM2_INLINE {
      const auto x = Dot::factor(words + r * factors.stride, step, factors.steps);
      each<tiles>([&](auto t) SMOLLM2_INLINE { acc[r][t] = Dot::step(acc[r][t], line[t], x); });
    });
  }
}

template <typename Dot, int rows, int tiles>
SMOLLM2_INLINE inline void begin_sums(const std::int32_t* start,
                                      typename Dot::Acc (&acc)[rows][tiles]) {
  each_sum<rows, tiles>([&](auto r, auto t) SMOLLM2_INLINE {
    acc[r][t] = Dot::begin(start != nullptr ? start[r] : 0);
  });
}

// out[r][t]: the 16 sums of tile `first + t` with row r.
template <typename Dot, int rows, int tiles>
void sum_tiles(const Lines& lines, int first, const Factors& factors, float* out, int stride) {
  typename Dot::Acc acc[rows][tiles];
  float* const to = out + static_cast<std::ptrdiff_t>(first) * kTileRows;
  const auto put = [&](int r, int t, V x)
                       SMOLLM2_INLINE { store(to + r * stride + t * kTileRows, x); };
  if constexpr (Dot::scaled) {
    V total[rows][tiles];
    each_sum<rows, tiles>([&](auto r, auto t) SMOLLM2_INLINE { total[r][t] = zero(); });
    for (int part = 0; part < lines.parts; ++part) {
      begin_sums<Dot>(nullptr, acc);
      add_part<Dot>(lines, part, first, factors, acc);
      each_sum<rows, tiles>([&](auto r, auto t) SMOLLM2_INLINE {
        const V scale = broadcast(factors.scales[r * kLanes + part]);
        total[r][t] = fma(Dot::end(acc[r][t]), scale, total[r][t]);
      });
    }
    each_sum<rows, tiles>([&](auto r, auto t) SMOLLM2_INLINE { put(r, t, total[r][t]); });
  } else {
    begin_sums<Dot>(factors.start, acc);
    for (int part = 0; part < lines.parts; ++part) {
      add_part<Dot>(lines, part, first, factors, acc);
    }
    if (lines.scales == nullptr) {
      each_sum<rows, tiles>([&](auto r, auto t) SMOLLM2_INLINE { put(r, t, Dot::end(acc[r][t])); });
      return;
    }
    each_sum<rows, tiles>([&](auto r, auto t) SMOLLM2_INLINE {
      const V scale = load(lines.scales + (first + t) * kTileRows);
      put(r, t, mul(Dot::end(acc[r][t]), mul(scale, broadcast(factors.scales[r]))));
    });
  }
}

template <typename Dot, int rows>
void sum_rows(const Lines& lines, const Factors& factors, float* out, int stride) {
  constexpr int tiles = rows == 1 ? kPlaceTiles : Dot::tiles;
  int tile = 0;
  for (; tile + tiles <= lines.tiles; tile += tiles) {
    sum_tiles<Dot, rows, tiles>(lines, tile, factors, out, stride);
  }
  if constexpr (tiles > 2) {
    for (; tile + 2 <= lines.tiles; tile += 2) {
      sum_tiles<Dot, rows, 2>(lines, tile, factors, out, stride);
    }
  }
  for (; tile < lines.tiles; ++tile) sum_tiles<Dot, rows, 1>(lines, tile, factors, out, stride);
}
