// Dot products with pairs of 16-bit whole numbers, over dot2.

namespace smollm2 {
namespace {

// Lines are [16 lanes][2] int16, factors int16. Exact as long as the whole sum fits 32 bits.
struct PairDot {
  static constexpr int tiles = kLineTiles;  // whose sums lie in registers together
  static constexpr bool scaled = false;
  using Acc = I;
  using Line = B;
  using Factor = B;
  static void prepare(const I* x, int count, std::uint32_t* factors) {
    auto* to = reinterpret_cast<std::int16_t*>(factors);
    for (int i = 0; i < count; i += kLanes) store_int16(to + i, x[i / kLanes]);
  }
  static Acc begin(std::int32_t start) { return broadcast_int(start); }
  static Line line(const std::uint8_t* p) { return hold_line(p); }
  static Factor factor(const std::uint32_t* factors, int step, int) {
    return broadcast_bytes(factors + step);
  }
  static Acc step(Acc acc, Line a, Factor x) { return dot2(acc, a, x); }
  static V end(Acc acc) { return to_float(acc); }
};

}  // namespace
}  // namespace smollm2
