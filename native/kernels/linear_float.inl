// Products with packed floats and 16-bit integers: activations are floats.

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
  static void run(const FloatWork& work, int row, int tile, Ahead& ahead) {
    const std::size_t stride = tile_bytes(kind, work.w.cols);
    const std::uint8_t* block = work.w.data + static_cast<std::size_t>(tile) * stride;
    const float* x = work.x + static_cast<std::ptrdiff_t>(row) * work.x_stride;
    V total[rows][tiles];
    for (auto& of_row : total) {
      for (V& sum_of_tile : of_row) sum_of_tile = zero();
    }
    Ahead fetching = ahead;  // in registers
    const int blocks = padded(work.w.cols) / kBlock;
    for (int b = 0; b < blocks; ++b, block += block_bytes(kind), x += kBlock) {
      fetching.fetch();
      if constexpr (kind == Kind::f32) {
        add_block_f32(block, stride, x, work.x_stride, total);
      } else if constexpr (kind == Kind::bf16) {
        add_block_bf16(block, stride, x, work.x_stride, total);
      } else {
        add_block_q16(block, stride, x, work.x_stride, total);
      }
    }
    ahead = fetching;
    store_sums(total, work, row, tile);
  }
};
