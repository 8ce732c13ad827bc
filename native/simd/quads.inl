// Dot products of quads of bytes: for policies whose dot4 is one instruction, and for the plain
// one. The policy that includes this has store_terms.

namespace smollm2 {
namespace {

// Lines are [16 lanes][4] uint8, factors 256 * high + low in two int8 terms. Where dot4 takes
// signed bytes alone, lines are less 128 again, so that there is nothing to begin with. Exact as
// long as the whole sum fits 32 bits.
struct QuadDot {
  static constexpr int tiles = kQuadTiles;  // whose sums lie in registers together
  static constexpr bool scaled = false;
  struct Acc {
    I high, low;
  };
  using Line = B;
  struct Factor {
    B high, low;
  };
  static void prepare(const I* x, int count, std::uint32_t* factors) {
    auto* high = reinterpret_cast<std::uint8_t*>(factors);
    // A signed low byte counts 256 less where its top bit is set: one more in the high byte.
    const I carry = broadcast_int(128);
    for (int i = 0; i < count; i += kLanes) {
      store_terms(high + i, high + count + i, x[i / kLanes], carry);
    }
  }
  static Acc begin(std::int32_t start) {
    return {broadcast_int(0), broadcast_int(kSignedDots ? 0 : start)};
  }
  static Line line(const std::uint8_t* p) {
    return kSignedDots ? flip_sign(hold_line(p)) : hold_line(p);
  }
  static Factor factor(const std::uint32_t* factors, int step, int steps) {
    return {broadcast_bytes(factors + step), broadcast_bytes(factors + steps + step)};
  }
  static Acc step(Acc acc, Line a, Factor x) {
    return {dot4(acc.high, a, x.high), dot4(acc.low, a, x.low)};
  }
  static V end(Acc acc) { return to_float(join_terms(acc.high, acc.low)); }
};

}  // namespace
}  // namespace smollm2
