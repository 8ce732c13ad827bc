// Dot products with pairs of 16-bit whole numbers, in plain C++.

namespace smollm2 {
namespace {

// Lines are [16 lanes][2] int16, factors int16. Exact as long as the whole sum fits 32 bits.
struct PairDot {
  static constexpr int tiles = 1;  // whose sums lie in registers together
  static constexpr bool scaled = false;
  using Acc = I;
  struct Line {
    I even, odd;
  };
  struct Factor {
    std::int32_t even, odd;
  };
  static void prepare(const I* x, int count, std::uint32_t* factors) {
    auto* to = reinterpret_cast<std::int16_t*>(factors);
    for (int i = 0; i < count; i += kLanes) store_int16(to + i, x[i / kLanes]);
  }
  static Acc begin(std::int32_t start) { return broadcast_int(start); }
  static Line line(const std::uint8_t* p) {
    std::int16_t x[2 * kLanes];
    std::memcpy(x, p, sizeof x);
    return {lanes<I>([&](int i) { return std::int32_t{x[2 * i]}; }),
            lanes<I>([&](int i) { return std::int32_t{x[2 * i + 1]}; })};
  }
  static Factor factor(const std::uint32_t* factors, int step, int) {
    std::int16_t x[2];
    std::memcpy(x, factors + step, sizeof x);
    return {x[0], x[1]};
  }
  static Acc step(Acc acc, Line a, Factor x) {
    return lanes<I>(
        [&](int i) { return acc.lane[i] + a.even.lane[i] * x.even + a.odd.lane[i] * x.odd; });
  }
  static V end(Acc acc) { return to_float(acc); }
};

}  // namespace
}  // namespace smollm2
