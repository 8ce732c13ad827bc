// Dot products with pairs of bf16 by FMA: for policies without a bf16 product of their own.

namespace smollm2 {
namespace {

// Lines are [16 lanes][2] bf16. Factors stay float, so that more terms would add nothing.
template <int terms>
struct PairDot {
  static constexpr int tiles = 1;  // whose sums lie in registers together
  using Acc = V;
  struct Line {
    V even, odd;
  };
  struct Factor {
    V even, odd;
  };
  static void prepare(const V* x, int count, std::uint32_t* factors) {
    auto* to = reinterpret_cast<float*>(factors);
    for (int i = 0; i < count; i += kLanes) store(to + i, x[i / kLanes]);
  }
  static Acc begin(std::int32_t) { return zero(); }
  static Line line(const std::uint8_t* p) {
    const B pairs = load_bytes(p);
    return {even_bf16(pairs), odd_bf16(pairs)};
  }
  static Factor factor(const std::uint32_t* factors, int step, int) {
    float x[2];
    std::memcpy(x, factors + 2 * step, sizeof x);
    return {broadcast(x[0]), broadcast(x[1])};
  }
  static Acc step(Acc acc, Line a, Factor x) { return fma(a.odd, x.odd, fma(a.even, x.even, acc)); }
  static V end(Acc acc) { return acc; }
};

}  // namespace
}  // namespace smollm2
