// Sums of lines of keys or values times factors, 16 side by side. A sum has one accumulator and a
// fixed order, so that its bits do not depend on the rows and tiles that are computed beside it.

constexpr int kPagesAtOnce = kBlocksAhead;  // pages with one softmax: its slow steps are that much rarer
constexpr int kPlacesAtOnce = kPagesAtOnce * kPage;

// To the second level: what comes next would push out of the first what is in use.
inline void prefetch([[maybe_unused]] const void* p) {
#if defined(__GNUC__)
  __builtin_prefetch(p, 0, 2);
#endif
}

// Lines of a page; a sum goes on through several pages.
struct Lines {
  const std::uint8_t* first[kPagesAtOnce];
  std::ptrdiff_t ahead[kPagesAtOnce];  // to lines that are wanted soon; 0: to none
  int steps[kPagesAtOnce];
  int pages, tiles;
  std::size_t tile_bytes, step_bytes;
};

struct Factors {
  const std::uint32_t* words;  // [rows][stride], a page's kPage further than the one before
  int stride;
  int steps;                  // that a page was prepared for
  const std::int32_t* start;  // [rows], where the integer sums begin; nullptr: at 0
};

// Adds the lines of one page to acc[r][t].
template <bool fetches, typename Dot, int rows, int tiles>
inline void add_page(const Lines& lines, int page, int first, const Factors& factors,
                     typename Dot::Acc (&acc)[rows][tiles]) {
  const std::uint8_t* at = lines.first[page] + static_cast<std::size_t>(first) * lines.tile_bytes;
  const std::uint32_t* const words = factors.words + page * kPage;
  const std::ptrdiff_t ahead = lines.ahead[page];
  const int steps = lines.steps[page];
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

// out[r][t]: the 16 sums of tile `first + t` with row r.
template <typename Dot, int rows, int tiles>
void sum_tiles(const Lines& lines, int first, const Factors& factors, float* out, int stride) {
  typename Dot::Acc acc[rows][tiles];
  for (int r = 0; r < rows; ++r) {
    for (int t = 0; t < tiles; ++t) acc[r][t] = Dot::begin(factors.start ? factors.start[r] : 0);
  }
  for (int page = 0; page < lines.pages; ++page) {
    if (lines.ahead[page] != 0) {
      add_page<true, Dot>(lines, page, first, factors, acc);
    } else {
      add_page<false, Dot>(lines, page, first, factors, acc);
    }
  }
  float* const to = out + static_cast<std::ptrdiff_t>(first) * kTileRows;
  for (int r = 0; r < rows; ++r) {
    for (int t = 0; t < tiles; ++t) {
      store(to + r * stride + t * kTileRows, Dot::end(acc[r][t]));
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
