// Dot products of values with probabilities, over a dot4 of unsigned and signed bytes. The policy
// that includes this has store_bytes.

namespace smollm2 {
namespace {

// Lines are [16 lanes][4] int8, factors 0 ... 255 in a byte each; a part has its own scale.
struct MixDot {
  static constexpr int tiles = kLineTiles;
  static constexpr bool scaled = true;
  static constexpr int word = 4;  // factors in each
  using Acc = I;
  using Line = B;
  using Factor = B;
  static void prepare(const I* x, int count, std::uint32_t* factors) {
    auto* to = reinterpret_cast<std::uint8_t*>(factors);
    for (int i = 0; i < count; i += kLanes) store_bytes(to + i, x[i / kLanes]);
  }
  static Acc begin(std::int32_t) { return broadcast_int(0); }
  static Line line(const std::uint8_t* p) { return hold_line(p); }
  static Factor factor(const std::uint32_t* factors, int step, int) {
    return broadcast_bytes(factors + step);
  }
  static Acc step(Acc acc, Line a, Factor x) { return dot4(acc, x, a); }
  static V end(Acc acc) { return to_float(acc); }
};

}  // namespace
}  // namespace smollm2
