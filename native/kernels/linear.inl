// Products of rows of activations with packed weights, written once over the policy.
//
// A block of code holds the sums of `rows` rows and `tiles` tiles in registers over all k, so the
// order of additions in one output is that of k alone, however the work is cut.

inline const std::uint8_t* line_at(const std::uint8_t* block, int line) {
  return block + static_cast<std::size_t>(line) * 64;
}

inline V load_scales(const std::uint8_t* block, int line, int half) {
  return load_half(reinterpret_cast<const std::uint16_t*>(line_at(block, line)) + half * kTileRows);
}

// What a call works on. Row 0 of the output is that of row `row` of quantized activations.
struct IntegerWork {
  const Matrix& w;
  const QuantizedRows& x;
  int row;
  Output out;
};

struct FloatWork {
  const Matrix& w;
  const float* x;
  int x_stride;
  Output out;
};

// Bytes from one place in memory to another, whatever lies there.
inline std::intptr_t between(const std::uint8_t* from, const std::uint8_t* to) {
  return reinterpret_cast<std::intptr_t>(to) - reinterpret_cast<std::intptr_t>(from);
}

// Weights to fetch while others are multiplied: of each block of 64 k the lines first, first + step
// and so on, `distance` bytes after the block. The blocks of rows that use the same tiles share the
// lines of the next tiles among them.
struct Ahead {
  std::intptr_t distance;
  int first;
  int step;
};

// Half of that for one half of a block.
template <Kind kind, int tiles>
inline void fetch(const std::uint8_t* block, std::size_t tile_stride, int half, Ahead ahead) {
  constexpr int lines = static_cast<int>(block_bytes(kind) / 64);
  for (int line = ahead.first + half * ahead.step; line < lines; line += 2 * ahead.step) {
    for (int t = 0; t < tiles; ++t) {
      prefetch(line_at(block + static_cast<std::size_t>(t) * tile_stride, line), ahead.distance);
    }
  }
}

// The columns of a tile that the matrix has.
inline void store_tile(V a, const Matrix& w, int tile, bool to_be_added, float* out_row) {
  float* to = out_row + tile * kTileRows;
  const int left = w.rows - tile * kTileRows;
  if (left >= kTileRows) {
    store(to, to_be_added ? add(load(to), a) : a);
  } else {
    store_part(to, to_be_added ? add(load_part(to, left), a) : a, left);
  }
}

template <int rows, int tiles, typename Work>
inline void store_sums(const V (&total)[rows][tiles], const Work& work, int row, int tile) {
  for (int r = 0; r < rows; ++r) {
    float* out = work.out.data + static_cast<std::ptrdiff_t>(row + r) * work.out.stride;
    for (int t = 0; t < tiles; ++t) store_tile(total[r][t], work.w, tile + t, work.out.add, out);
  }
}

#include "kernels/linear_float.inl"
#include "kernels/linear_integer.inl"

// ---- cutting the work into blocks

// The last `left` <= rows rows.
template <typename Block, int rows, int tiles, typename Work>
inline void run_rest(const Work& work, int left, int row, int tile, Ahead ahead) {
  if constexpr (rows > 0) {
    if (left == rows) {
      Block::template run<rows, tiles>(work, row, tile, ahead);
    } else {
      run_rest<Block, rows - 1, tiles>(work, left, row, tile, ahead);
    }
  }
}

// All rows of `tiles` tiles; `next` are the weights that come after them, if that is known.
template <typename Block, int rows, int tiles, typename Work>
inline void run_tiles(const Work& work, int m, int tile, const std::uint8_t* next) {
  const std::uint8_t* here =
      work.w.data + static_cast<std::size_t>(tile) * tile_bytes(work.w.kind, work.w.cols);
  Ahead ahead{between(here, next), 0, (m + rows - 1) / rows};
  if (next == nullptr) ahead = {0, kBlock, 1};  // a block has no such line
  int row = 0;
  for (; row + rows <= m; row += rows, ++ahead.first) {
    Block::template run<rows, tiles>(work, row, tile, ahead);
  }
  run_rest<Block, rows - 1, tiles>(work, m - row, row, tile, ahead);
}

// Few rows: tile after tile, so that memory is read in order. Many: tiles outside and rows inside,
// so that the tiles stay in the nearest cache for all rows.
template <typename Block, typename Work>
void run_all(const Work& work, int m, int first, int last, const std::uint8_t* next) {
  using Sums = typename Block::Sums;
  const auto after = [&](int tile) {
    if (tile >= last) return next;
    return work.w.data + static_cast<std::size_t>(tile) * tile_bytes(work.w.kind, work.w.cols);
  };
  int tile = first;
  if (m > Sums::few_rows) {
    for (; tile + Sums::tiles <= last; tile += Sums::tiles) {
      run_tiles<Block, Sums::rows, Sums::tiles>(work, m, tile, after(tile + Sums::tiles));
    }
  }
  for (; tile < last; ++tile) {
    run_tiles<Block, Sums::few_rows, 1>(work, m, tile, after(tile + 1));
  }
}

void linear_float(const Matrix& w, const float* x, int x_stride, int m, int first, int last,
                  const Output& out, const std::uint8_t* next) {
  const FloatWork work{w, x, x_stride, out};
  if (w.kind == Kind::f32) return run_all<FloatBlock<Kind::f32>>(work, m, first, last, next);
  if (w.kind == Kind::bf16) return run_all<FloatBlock<Kind::bf16>>(work, m, first, last, next);
  run_all<FloatBlock<Kind::q16>>(work, m, first, last, next);
}

template <int terms>
void linear_terms(const IntegerWork& work, int m, int first, int last, const std::uint8_t* next) {
  if (work.w.kind == Kind::q8) {
    return run_all<IntegerBlock<FormatQ8, terms>>(work, m, first, last, next);
  }
  if (work.w.kind == Kind::q4) {
    return run_all<IntegerBlock<FormatQ4, terms>>(work, m, first, last, next);
  }
  run_all<IntegerBlock<FormatQ4m, terms>>(work, m, first, last, next);
}

void linear_integer(const Matrix& w, const QuantizedRows& x, int first_row, int m, int first,
                    int last, const Output& out, const std::uint8_t* next) {
  const IntegerWork work{w, x, first_row, out};
  if (x.terms == 2) return linear_terms<2>(work, m, first, last, next);
  linear_terms<1>(work, m, first, last, next);
}

#include "kernels/unpack.inl"
