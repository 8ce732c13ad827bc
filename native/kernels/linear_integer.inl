// Products with packed integers: activations are quantized.

// ---- formats: how 64 k of a tile are read

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

// ---- sums of products

// Activations from one row and group on, in so many terms.
template <int terms>
struct GroupOfRows {
  const std::int8_t* q;
  const float* scale;
  const std::int32_t* sum;
  std::ptrdiff_t groups;  // of a row: what lies between two terms

  GroupOfRows(const QuantizedRows& x, int row) : groups(x.padded / kGroup) {
    const std::ptrdiff_t before = static_cast<std::ptrdiff_t>(row) * terms * groups;
    q = x.q + before * kGroup;
    scale = x.scale + before;
    sum = x.sum + before;
  }

  std::ptrdiff_t at(int row, int term) const { return (row * terms + term) * groups; }

  void next() {
    q += kGroup;
    ++scale;
    ++sum;
  }
};

// The exact sums of a group's products, of one term.
template <typename Format, int terms, int rows, int tiles>
inline void dots_of_group(const std::uint8_t* block, std::size_t tile_stride, int half,
                          const GroupOfRows<terms>& x, int term, I (&dots)[rows][tiles]) {
  using Dot = typename Format::Dot;
  typename Dot::Acc acc[rows][tiles];
  for (int r = 0; r < rows; ++r) {
    const auto start = Dot::begin(x.sum[x.at(r, term)]);
    for (int t = 0; t < tiles; ++t) acc[r][t] = start;
  }
  for (int pair = 0; pair < 4; ++pair) {
    typename Format::Line even[tiles], odd[tiles];
    for (int t = 0; t < tiles; ++t) {
      Format::pair(block + static_cast<std::size_t>(t) * tile_stride, half * 4 + pair, even[t],
                   odd[t]);
    }
    for (int r = 0; r < rows; ++r) {
      const std::int8_t* q = x.q + x.at(r, term) * kGroup + pair * 8;
      const B first = broadcast_bytes(q), second = broadcast_bytes(q + 4);
      for (int t = 0; t < tiles; ++t) acc[r][t] = Dot::step(acc[r][t], even[t], first);
      for (int t = 0; t < tiles; ++t) acc[r][t] = Dot::step(acc[r][t], odd[t], second);
    }
  }
  for (int r = 0; r < rows; ++r) {
    const std::int32_t sum = x.sum[x.at(r, term)];
    for (int t = 0; t < tiles; ++t) dots[r][t] = Dot::end(acc[r][t], sum);
  }
}

// Adds one group of 32 k to the sums. Of one row and tile, in this order of roundings, where dot
// and sum are whole numbers (of two terms: kTermRatio times the first's and the second's) and the
// scale of activations is that of the last term:
//   q8, q4  total = total + dot * (scale of weights * scale of activations)
//   q4m     total = total + (scale of weights * dot + minimum * sum) * scale of activations
template <typename Format, int terms, int rows, int tiles>
inline void add_group(const std::uint8_t* block, std::size_t tile_stride, int half,
                      const GroupOfRows<terms>& x, V (&total)[rows][tiles]) {
  I dots[rows][tiles];
  dots_of_group<Format>(block, tile_stride, half, x, 0, dots);
  if constexpr (terms == 2) {
    I rest[rows][tiles];
    dots_of_group<Format>(block, tile_stride, half, x, 1, rest);
    for (int r = 0; r < rows; ++r) {
      for (int t = 0; t < tiles; ++t) {
        dots[r][t] = add(mul(dots[r][t], broadcast_int(kTermRatio)), rest[r][t]);
      }
    }
  }
  for (int t = 0; t < tiles; ++t) {
    const std::uint8_t* tile = block + static_cast<std::size_t>(t) * tile_stride;
    const V scale = load_scales(tile, Format::scales, half);
    for (int r = 0; r < rows; ++r) {
      const V x_scale = broadcast(x.scale[x.at(r, terms - 1)]);
      const V dot = to_float(dots[r][t]);
      if constexpr (Format::minimums >= 0) {
        std::int32_t sum = x.sum[x.at(r, 0)];
        if constexpr (terms == 2) sum = sum * kTermRatio + x.sum[x.at(r, 1)];
        const V minimum = load_scales(tile, Format::minimums, half);
        const V value = fma(minimum, to_float(broadcast_int(sum)), mul(scale, dot));
        total[r][t] = fma(value, x_scale, total[r][t]);
      } else {
        total[r][t] = fma(dot, mul(scale, x_scale), total[r][t]);
      }
    }
  }
}

template <typename Format, int terms>
struct IntegerBlock {
  using Sums = IntegerSums;

  template <int rows, int tiles>
  static void run(const IntegerWork& work, int row, int tile, Ahead& ahead) {
    const std::size_t stride = tile_bytes(Format::kind, work.w.cols);
    const std::uint8_t* block = work.w.data + static_cast<std::size_t>(tile) * stride;
    GroupOfRows<terms> x(work.x, work.row + row);
    V total[rows][tiles];
    each_sum<rows, tiles>([&](auto r, auto t) SMOLLM2_INLINE { total[r][t] = zero(); });
    Ahead fetching = ahead;  // in registers
    const int blocks = padded(work.w.cols) / kBlock;
    for (int b = 0; b < blocks; ++b, block += block_bytes(Format::kind)) {
      fetching.fetch();
      for (int half = 0; half < 2; ++half, x.next()) {
        add_group<Format>(block, stride, half, x, total);
      }
    }
    ahead = fetching;
    store_sums(total, work, row, tile);
  }
};
