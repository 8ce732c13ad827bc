// Dot products of quads of bytes: for policies whose dot4 is one instruction, and for the plain
// one. The policy that includes this has store_terms and store_bytes.

namespace smollm2 {
namespace {

// Lines are [16 lanes][4] uint8, factors 256 * high + low in two int8 terms. Exact as long as the
// whole sum fits 32 bits.
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
  static Acc begin(std::int32_t start) { return {broadcast_int(0), broadcast_int(start)}; }
  static Line line(const std::uint8_t* p) { return hold_line(p); }
  static Factor factor(const std::uint32_t* factors, int step, int steps) {
    return {broadcast_bytes(factors + step), broadcast_bytes(factors + steps + step)};
  }
  static Acc step(Acc acc, Line a, Factor x) {
    return {dot4(acc.high, a, x.high), dot4(acc.low, a, x.low)};
  }
  static V end(Acc acc) { return to_float(join_terms(acc.high, acc.low)); }
};

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
