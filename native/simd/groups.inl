// Dot products of one group of 32 for 16 rows of weights, over dot4: for policies where that is one
// instruction, and for the plain ones. begin, a step for each of 8 lines, end; `sum` is that of the
// group's activations.

namespace smollm2 {
namespace {

// Lines of q + 128, which are q again where dot4 takes signed bytes alone.
struct Dot8 {
  using Acc = I;
  using Line = B;
  static Acc begin(std::int32_t sum) { return broadcast_int(kSignedDots ? 0 : -128 * sum); }
  static Line line(B bytes) { return kSignedDots ? flip_sign(bytes) : bytes; }
  static Acc step(Acc acc, Line w, B x) { return dot4(acc, w, x); }
  static I end(Acc acc, std::int32_t) { return acc; }
};

// Lines of q, 0 ... 15; the sum of q * x less zero * the sum of x.
template <int zero_point>
struct Dot4 {
  using Acc = I;
  static Acc begin(std::int32_t sum) { return broadcast_int(-zero_point * sum); }
  static Acc step(Acc acc, B w, B x) { return dot4(acc, w, x); }
  static I end(Acc acc, std::int32_t) { return acc; }
};

}  // namespace
}  // namespace smollm2
