// Dot products of quads of bytes with 16-bit factors in two bytes: for policies whose dot4 is one
// instruction, and for the plain one. The policy that includes this has store_terms.

namespace smollm2 {
namespace {

// Lines are [16 lanes][4] bytes, factors 256 * high + low: uint8 lines with int8 terms (keys), or
// int8 lines with uint8 terms (values). Where dot4 takes signed bytes alone both are int8, and keys
// are less 128 again. Exact as long as the whole sum fits 32 bits.
template <bool signed_factors>
struct QuadDot {
  static constexpr int tiles = kQuadTiles;  // whose sums lie in registers together
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
    const I carry = broadcast_int(signed_factors || kSignedDots ? 128 : 0);
    for (int i = 0; i < count; i += kLanes) {
      store_terms(high + i, high + count + i, x[i / kLanes], carry);
    }
  }
  static Acc begin(std::int32_t start) {
    return {broadcast_int(0), broadcast_int(kSignedDots ? 0 : start)};
  }
  static Line line(const std::uint8_t* p) {
    return signed_factors && kSignedDots ? flip_sign(hold_line(p)) : hold_line(p);
  }
  static Factor factor(const std::uint32_t* factors, int step, int steps) {
    return {broadcast_bytes(factors + step), broadcast_bytes(factors + steps + step)};
  }
  static Acc step(Acc acc, Line a, Factor x) {
    if constexpr (signed_factors) return {dot4(acc.high, a, x.high), dot4(acc.low, a, x.low)};
    return {dot4(acc.high, x.high, a), dot4(acc.low, x.low, a)};
  }
  static V end(Acc acc) { return to_float(join_terms(acc.high, acc.low)); }
};

}  // namespace
}  // namespace smollm2
