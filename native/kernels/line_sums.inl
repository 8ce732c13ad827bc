// Sums of lines of keys or values times factors, 16 side by side. A sum has one accumulator and a
// fixed order, so that its bits do not depend on the rows and tiles that are computed beside it.

constexpr int kPlacesAtOnce = kPagesAtOnce * kPage;
constexpr int kMostParts = 2 * kPagesAtOnce;

// To the second level: what comes next would push out of the first what is in use.
inline void prefetch([[maybe_unused]] const void* p) {
#if defined(__GNUC__)
  __builtin_prefetch(p, 0, 2);
#endif
}

// Lines that a sum goes through part by part; a part lies in one block.
struct Lines {
  const std::uint8_t* first[kMostParts];
  std::ptrdiff_t ahead[kMostParts];  // to lines that are wanted soon; 0: to none
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
template <bool fetches, typename Dot, int rows, int tiles>
inline void add_part(const Lines& lines, int part, int first, const Factors& factors,
                     typename Dot::Acc (&acc)[rows][tiles]) {
  const std::uint8_t* at = lines.first[part] + static_cast<std::size_t>(first) * lines.tile_bytes;
  const std::uint32_t* const words = factors.words + part * factors.part;
  const std::ptrdiff_t ahead = lines.ahead[part];
  const int steps = lines.steps[part];
  for (int step = 0; step < steps; ++step, at += lines.step_bytes) {
    typename Dot::Line line[tiles];
    for (int t = 0; t < tiles; ++t) {
      const std::uint8_t* const p = at + static_cast<std::size_t>(t) * lines.tile_bytes;
      if (fetches) prefetch(p + ahead);
      line[t] = Dot::line(p);
    }
    for (int r = 0; r < rows; ++r) {
      const auto x = Dot::factor(words + r * factors.stride, step, factors.steps);
      for (int t = 0; t < tiles; ++t) acc[r][t] = Dot::step(acc[r][t], line[t], x);
    }
  }
}

template <typename Dot, int rows, int tiles>
inline void begin_sums(const Factors& factors, typename Dot::Acc (&acc)[rows][tiles]) {
  for (int r = 0; r < rows; ++r) {
    for (int t = 0; t < tiles; ++t) acc[r][t] = Dot::begin(factors.start ? factors.start[r] : 0);
  }
}

// out[r][t]: the 16 sums of tile `first + t` with row r.
template <typename Dot, int rows, int tiles>
void sum_tiles(const Lines& lines, int first, const Factors& factors, float* out, int stride) {
  typename Dot::Acc acc[rows][tiles];
  V total[rows][tiles];
  begin_sums<Dot>(factors, acc);
  if constexpr (Dot::scaled) {
    for (auto& row : total) {
      for (V& x : row) x = zero();
    }
  }
  for (int part = 0; part < lines.parts; ++part) {
    if (lines.ahead[part] != 0) {
      add_part<true, Dot>(lines, part, first, factors, acc);
    } else {
      add_part<false, Dot>(lines, part, first, factors, acc);
    }
    if constexpr (Dot::scaled) {
      for (int r = 0; r < rows; ++r) {
        const V scale = broadcast(factors.scales[r * kLanes + part]);
        for (int t = 0; t < tiles; ++t) {
          total[r][t] = fma(Dot::end(acc[r][t]), scale, total[r][t]);
        }
      }
      begin_sums<Dot>(factors, acc);
    }
  }
  float* const to = out + static_cast<std::ptrdiff_t>(first) * kTileRows;
  for (int r = 0; r < rows; ++r) {
    for (int t = 0; t < tiles; ++t) {
      V x;
      if constexpr (Dot::scaled) {
        x = total[r][t];
      } else {
        x = Dot::end(acc[r][t]);
      }
      if (lines.scales != nullptr) {
        const V scale = load(lines.scales + (first + t) * kTileRows);
        x = mul(x, mul(scale, broadcast(factors.scales[r])));
      }
      store(to + r * stride + t * kTileRows, x);
    }
  }
}

template <typename Dot, int rows>
void sum_rows(const Lines& lines, const Factors& factors, float* out, int stride) {
  constexpr int tiles = rows == 1 ? kPlaceTiles : Dot::tiles;
  int tile = 0;
  for (; tile + tiles <= lines.tiles; tile += tiles) {
    sum_tiles<Dot, rows, tiles>(lines, tile, factors, out, stride);
  }
  for (; tile < lines.tiles; ++tile) sum_tiles<Dot, rows, 1>(lines, tile, factors, out, stride);
}
