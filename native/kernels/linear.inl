// Products of rows of activations with packed weights, written once over the policy.
//
// A block of code holds the sums of `rows` rows and `tiles` tiles in registers over all k, so the
// order of additions in one output is that of k alone, however the work is cut.

// ---- formats: how 64 k of a tile are read

inline const std::uint8_t* line_at(const std::uint8_t* block, int line) {
  return block + static_cast<std::size_t>(line) * 64;
}

inline V load_scales(const std::uint8_t* block, int line, int half) {
  return load_half(reinterpret_cast<const std::uint16_t*>(line_at(block, line)) + half * kTileRows);
}

struct FormatQ8 {
  using Dot = Dot8;
  using Line = Dot8::Line;
  static constexpr Kind kind = Kind::q8;
  static constexpr int scales = 16;
  static constexpr int minimums = -1;
  // Lines 2 pair and 2 pair + 1 of a block.
  static void pair(const std::uint8_t* block, int pair, Line& even, Line& odd) {
    even = Dot::line(load_bytes(line_at(block, 2 * pair)));
    odd = Dot::line(load_bytes(line_at(block, 2 * pair + 1)));
  }
};

template <Kind kind_, int zero_point>
struct FormatNibbles {
  using Dot = Dot4<zero_point>;
  using Line = B;
  static constexpr Kind kind = kind_;
  static constexpr int scales = 8;
  static constexpr int minimums = kind_ == Kind::q4m ? 9 : -1;
  static void pair(const std::uint8_t* block, int pair, Line& even, Line& odd) {
    const B bytes = load_bytes(line_at(block, pair));
    even = low_nibbles(bytes);
    odd = high_nibbles(bytes);
  }
};

using FormatQ4 = FormatNibbles<Kind::q4, 8>;
using FormatQ4m = FormatNibbles<Kind::q4m, 0>;

// ---- integer products

// Activations from one row and group on.
struct GroupOfRows {
  const std::int8_t* q;
  const float* scale;
  const std::int32_t* sum;
  std::ptrdiff_t groups;  // of a row: what lies between two rows

  GroupOfRows(const QuantizedRows& x, int row)
      : q(x.q + static_cast<std::ptrdiff_t>(row) * x.padded),
        scale(x.scale + static_cast<std::ptrdiff_t>(row) * (x.padded / kGroup)),
        sum(x.sum + static_cast<std::ptrdiff_t>(row) * (x.padded / kGroup)),
        groups(x.padded / kGroup) {}

  void next() {
    q += kGroup;
    ++scale;
    ++sum;
  }
};

// Adds one group of 32 k to the sums. Of one row and tile, in this order of roundings:
//   q8, q4  total = total + dot * (scale of weights * scale of activations)
//   q4m     total = total + (scale of weights * dot + minimum * sum) * scale of activations
template <typename Format, int rows, int tiles>
inline void add_group(const std::uint8_t* block, std::size_t tile_stride, int half,
                      const GroupOfRows& x, V (&total)[rows][tiles]) {
  using Dot = typename Format::Dot;
  typename Dot::Acc acc[rows][tiles];
  for (int r = 0; r < rows; ++r) {
    const auto start = Dot::begin(x.sum[r * x.groups]);
    for (int t = 0; t < tiles; ++t) acc[r][t] = start;
  }
  for (int pair = 0; pair < 4; ++pair) {
    typename Format::Line even[tiles], odd[tiles];
    for (int t = 0; t < tiles; ++t) {
      Format::pair(block + static_cast<std::size_t>(t) * tile_stride, half * 4 + pair, even[t],
                   odd[t]);
    }
    for (int r = 0; r < rows; ++r) {
      const std::int8_t* q = x.q + r * x.groups * kGroup + pair * 8;
      const B first = broadcast_bytes(q), second = broadcast_bytes(q + 4);
      for (int t = 0; t < tiles; ++t) acc[r][t] = Dot::step(acc[r][t], even[t], first);
      for (int t = 0; t < tiles; ++t) acc[r][t] = Dot::step(acc[r][t], odd[t], second);
    }
  }
  for (int t = 0; t < tiles; ++t) {
    const std::uint8_t* tile = block + static_cast<std::size_t>(t) * tile_stride;
    const V scale = load_scales(tile, Format::scales, half);
    for (int r = 0; r < rows; ++r) {
      const std::int32_t sum = x.sum[r * x.groups];
      const V x_scale = broadcast(x.scale[r * x.groups]);
      const V dot = to_float(Dot::end(acc[r][t], sum));
      if constexpr (Format::minimums >= 0) {
        const V minimum = load_scales(tile, Format::minimums, half);
        const V value = fma(minimum, to_float(broadcast_int(sum)), mul(scale, dot));
        total[r][t] = fma(value, x_scale, total[r][t]);
      } else {
        total[r][t] = fma(dot, mul(scale, x_scale), total[r][t]);
      }
    }
  }
}

// What a call works on; `row` is the first row of x, which goes to row 0 of out.
struct IntegerWork {
  const Matrix& w;
  const QuantizedRows& x;
  int row;
  float* out;
  int out_stride;
};

struct FloatWork {
  const Matrix& w;
  const float* x;
  int x_stride;
  float* out;
  int out_stride;
};

// The columns of a tile that the matrix has.
inline void store_tile(V a, const Matrix& w, int tile, float* out_row) {
  const int left = w.rows - tile * kTileRows;
  if (left >= kTileRows) {
    store(out_row + tile * kTileRows, a);
  } else {
    store_part(out_row + tile * kTileRows, a, left);
  }
}

template <int rows, int tiles, typename Work>
inline void store_sums(const V (&total)[rows][tiles], const Work& work, int row, int tile) {
  for (int r = 0; r < rows; ++r) {
    float* out = work.out + static_cast<std::ptrdiff_t>(row + r) * work.out_stride;
    for (int t = 0; t < tiles; ++t) store_tile(total[r][t], work.w, tile + t, out);
  }
}

template <typename Format>
struct IntegerBlock {
  using Sums = IntegerSums;

  template <int rows, int tiles>
  static void run(const IntegerWork& work, int row, int tile) {
    const std::size_t stride = tile_bytes(Format::kind, work.w.cols);
    const std::uint8_t* block = work.w.data + static_cast<std::size_t>(tile) * stride;
    GroupOfRows x(work.x, work.row + row);
    V total[rows][tiles];
    for (auto& of_row : total) {
      for (V& sum_of_tile : of_row) sum_of_tile = zero();
    }
    const int blocks = padded(work.w.cols) / kBlock;
    for (int b = 0; b < blocks; ++b, block += block_bytes(Format::kind)) {
      for (int half = 0; half < 2; ++half, x.next()) {
        add_group<Format, rows, tiles>(block, stride, half, x, total);
      }
    }
    store_sums(total, work, row, tile);
  }
};

// ---- float products

// The sums of one block of 64 k: total[r][t] += w * x in the order of k.
template <int rows, int tiles>
inline void add_block_f32(const std::uint8_t* block, std::size_t tile_stride, const float* x,
                          std::ptrdiff_t x_stride, V (&total)[rows][tiles]) {
  for (int k = 0; k < kBlock; ++k) {
    V w[tiles];
    for (int t = 0; t < tiles; ++t) {
      w[t] = load(reinterpret_cast<const float*>(
          line_at(block + static_cast<std::size_t>(t) * tile_stride, k)));
    }
    for (int r = 0; r < rows; ++r) {
      const V a = broadcast(x[r * x_stride + k]);
      for (int t = 0; t < tiles; ++t) total[r][t] = fma(w[t], a, total[r][t]);
    }
  }
}

template <int rows, int tiles>
inline void add_block_bf16(const std::uint8_t* block, std::size_t tile_stride, const float* x,
                           std::ptrdiff_t x_stride, V (&total)[rows][tiles]) {
  for (int k = 0; k < kBlock; k += 2) {
    B pairs[tiles];
    for (int t = 0; t < tiles; ++t) {
      pairs[t] = load_bytes(line_at(block + static_cast<std::size_t>(t) * tile_stride, k / 2));
    }
    for (int r = 0; r < rows; ++r) {
      const V a = broadcast(x[r * x_stride + k]);
      for (int t = 0; t < tiles; ++t) total[r][t] = fma(even_bf16(pairs[t]), a, total[r][t]);
    }
    for (int r = 0; r < rows; ++r) {
      const V a = broadcast(x[r * x_stride + k + 1]);
      for (int t = 0; t < tiles; ++t) total[r][t] = fma(odd_bf16(pairs[t]), a, total[r][t]);
    }
  }
}

// A group's sum of q * x, times its scale.
template <int rows, int tiles>
inline void add_block_q16(const std::uint8_t* block, std::size_t tile_stride, const float* x,
                          std::ptrdiff_t x_stride, V (&total)[rows][tiles]) {
  for (int half = 0; half < 2; ++half) {
    V of_group[rows][tiles];
    for (auto& of_row : of_group) {
      for (V& sum_of_tile : of_row) sum_of_tile = zero();
    }
    for (int k = half * kGroup; k < (half + 1) * kGroup; ++k) {
      V w[tiles];
      for (int t = 0; t < tiles; ++t) {
        const std::uint8_t* tile = block + static_cast<std::size_t>(t) * tile_stride;
        w[t] = load_int16(reinterpret_cast<const std::int16_t*>(tile) + k * kTileRows);
      }
      for (int r = 0; r < rows; ++r) {
        const V a = broadcast(x[r * x_stride + k]);
        for (int t = 0; t < tiles; ++t) of_group[r][t] = fma(w[t], a, of_group[r][t]);
      }
    }
    for (int t = 0; t < tiles; ++t) {
      const V scale = load_scales(block + static_cast<std::size_t>(t) * tile_stride, 32, half);
      for (int r = 0; r < rows; ++r) total[r][t] = fma(of_group[r][t], scale, total[r][t]);
    }
  }
}

template <Kind kind>
struct FloatBlock {
  using Sums = FloatSums;

  template <int rows, int tiles>
  static void run(const FloatWork& work, int row, int tile) {
    const std::size_t stride = tile_bytes(kind, work.w.cols);
    const std::uint8_t* block = work.w.data + static_cast<std::size_t>(tile) * stride;
    const float* x = work.x + static_cast<std::ptrdiff_t>(row) * work.x_stride;
    V total[rows][tiles];
    for (auto& of_row : total) {
      for (V& sum_of_tile : of_row) sum_of_tile = zero();
    }
    const int blocks = padded(work.w.cols) / kBlock;
    for (int b = 0; b < blocks; ++b, block += block_bytes(kind), x += kBlock) {
      if constexpr (kind == Kind::f32) {
        add_block_f32(block, stride, x, work.x_stride, total);
      } else if constexpr (kind == Kind::bf16) {
        add_block_bf16(block, stride, x, work.x_stride, total);
      } else {
        add_block_q16(block, stride, x, work.x_stride, total);
      }
    }
    store_sums(total, work, row, tile);
  }
};

// ---- cutting the work into blocks

// The last `left` <= rows rows.
template <typename Block, int rows, int tiles, typename Work>
inline void run_rest(const Work& work, int left, int row, int tile) {
  if constexpr (rows > 0) {
    if (left == rows) {
      Block::template run<rows, tiles>(work, row, tile);
    } else {
      run_rest<Block, rows - 1, tiles>(work, left, row, tile);
    }
  }
}

template <typename Block, int rows, int tiles, typename Work>
inline void run_tiles(const Work& work, int m, int tile) {
  int row = 0;
  for (; row + rows <= m; row += rows) Block::template run<rows, tiles>(work, row, tile);
  run_rest<Block, rows - 1, tiles>(work, m - row, row, tile);
}

// Few rows: tile after tile, so that memory is read in order. Many: tiles outside and rows inside,
// so that the tiles stay in the nearest cache for all rows.
template <typename Block, typename Work>
void run_all(const Work& work, int m, int first, int last) {
  using Sums = typename Block::Sums;
  int tile = first;
  if (m > Sums::few_rows) {
    for (; tile + Sums::tiles <= last; tile += Sums::tiles) {
      run_tiles<Block, Sums::rows, Sums::tiles>(work, m, tile);
    }
  }
  for (; tile < last; ++tile) run_tiles<Block, Sums::few_rows, 1>(work, m, tile);
}

void linear_float(const Matrix& w, const float* x, int x_stride, int m, int first, int last,
                  float* out, int out_stride) {
  const FloatWork work{w, x, x_stride, out, out_stride};
  if (w.kind == Kind::f32) return run_all<FloatBlock<Kind::f32>>(work, m, first, last);
  if (w.kind == Kind::bf16) return run_all<FloatBlock<Kind::bf16>>(work, m, first, last);
  run_all<FloatBlock<Kind::q16>>(work, m, first, last);
}

void linear_integer(const Matrix& w, const QuantizedRows& x, int first_row, int m, int first,
                    int last, float* out, int out_stride) {
  const IntegerWork work{w, x, first_row, out, out_stride};
  if (w.kind == Kind::q8) return run_all<IntegerBlock<FormatQ8>>(work, m, first, last);
  if (w.kind == Kind::q4) return run_all<IntegerBlock<FormatQ4>>(work, m, first, last);
  run_all<IntegerBlock<FormatQ4m>>(work, m, first, last);
}

#include "kernels/unpack.inl"
