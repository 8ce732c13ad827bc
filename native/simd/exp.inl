// exp over any policy; included by each at its end.

namespace smollm2 {
namespace {

// e^x within 2 units in the last place for -87.3 <= x <= 88.3. Below it is 0 (so that nothing is
// subnormal), above it stays what it is at 88.3; NaN stays NaN.
// Method: x = n ln 2 + r, |r| <= ln 2 / 2 with ln 2 in two terms (Cody and Waite); the polynomial
// is Cephes' expf (https://www.netlib.org/cephes/).
inline V exp(V x) {
  const V lowest = broadcast(-87.3f);
  const V inside = min(broadcast(88.3f), max(lowest, x));
  const V n = round(mul(inside, broadcast(1.44269504088896341f)));
  V r = fma(n, broadcast(-0.693359375f), inside);
  r = fma(n, broadcast(2.12194440e-4f), r);
  V p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, broadcast(1.0f)));
  return if_greater(lowest, x, zero(), mul(p, power_of_two(to_int(n))));
}

}  // namespace
}  // namespace smollm2
