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

// Weights that come after those which are being multiplied: each block of 64 k fetches some lines.
struct Ahead {
  const std::uint8_t* at = nullptr;
  int lines = 0;  // still to fetch
  int each = 0;   // of a block

  void fetch() {
    const int now = each < lines ? each : lines;
    for (int i = 0; i < now; ++i) prefetch(line_at(at, i));
    at += static_cast<std::size_t>(now) * 64;
    lines -= now;
  }
};

// One row's sums of a tile; the last tile may stick out of the matrix by all but `left` columns.
inline void store_tile(V a, int left, bool to_be_added, float* to) {
  if (left >= kTileRows) {
    store(to, to_be_added ? add(load(to), a) : a);
  } else {
    store_part(to, to_be_added ? add(load_part(to, left), a) : a, left);
  }
}

template <int rows, int tiles, typename Work>
SMOLLM2_INLINE inline void store_sums(const V (&total)[rows][tiles], const Work& work, int row,
                                      int tile) {
  float* const out = work.out.data + static_cast<std::ptrdiff_t>(row) * work.out.stride +
                     static_cast<std::ptrdiff_t>(tile) * kTileRows;
  const int left = work.w.rows - tile * kTileRows;
  each_sum<rows, tiles>([&](auto r, auto t) SMOLLM2_INLINE {
    store_tile(total[r][t], left - t * kTileRows, work.out.add,
               out + r * work.out.stride + t * kTileRows);
  });
}

#include "kernels/linear_float.inl"
#include "kernels/linear_integer.inl"

// ---- cutting the work into blocks

// The last `left` <= rows rows.
template <typename Block, int rows, int tiles, typename Work>
inline void run_rest(const Work& work, int left, int row, int tile, Ahead& ahead) {
  if constexpr (rows > 0) {
    if (left == rows) {
      Block::template run<rows, tiles>(work, row, tile, ahead);
    } else {
      run_rest<Block, rows - 1, tiles>(work, left, row, tile, ahead);
    }
  }
}

// All rows of `tiles` tiles, which fetch as many tiles from `next` on, where that is not null.
template <typename Block, int rows, int tiles, typename Work>
inline void run_tiles(const Work& work, int m, int tile, const std::uint8_t* next) {
  const int lines = static_cast<int>(tile_bytes(work.w.kind, work.w.cols) / 64) * tiles;
  const int blocks = padded(work.w.cols) / kBlock * ((m + rows - 1) / rows);
  Ahead ahead;
  if (next != nullptr) ahead = {next, lines, (lines + blocks - 1) / blocks};
  int row = 0;
  for (; row + rows <= m; row += rows) Block::template run<rows, tiles>(work, row, tile, ahead);
  run_rest<Block, rows - 1, tiles>(work, m - row, row, tile, ahead);
}

// Up to so many rows memory is slower than the core, and the processor's own fetching, which sees
// the addresses in order, is better than ours. It sees no end of a matrix, though.
constexpr int kStreamedRows = 4;

// Few rows: tile after tile, so that memory is read in order. Many: tiles outside and rows inside,
// so that the tiles stay in the nearest cache for all rows.
template <typename Block, typename Work>
void run_all(const Work& work, int m, int first, int last, const std::uint8_t* next) {
  using Sums = typename Block::Sums;
  const auto after = [&](int tile) -> const std::uint8_t* {
    if (tile >= last) return next;
    if (m <= kStreamedRows) return nullptr;
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
