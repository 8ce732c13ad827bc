// What attention multiplies lines of keys and values with, in plain C++.
#pragma once

#include "simd/scalar.h"

namespace smollm2 {
namespace {

constexpr int kLineTiles = 1, kQuadTiles = 1;  // tiles whose sums lie in registers together

// p * 2^n for whole n, -126 ... 127; 0 where x < lowest.
inline V scale_unless_below(V p, V n, V x, float lowest) {
  return lanes<V>([&](int i) {
    if (x.lane[i] < lowest) return 0.0f;
    if (!(n.lane[i] <= 127.0f)) return p.lane[i];  // NaN
    const auto exponent = static_cast<std::int32_t>(n.lane[i]) + 127;
    return p.lane[i] * float_of(static_cast<std::uint32_t>(exponent) << 23);
  });
}
// Of lanes that are not negative, the greater; NaN counts as greater than infinity.
inline V greater_bits(V a, V b) {
  return lanes<V>(
      [&](int i) { return bits_of(a.lane[i]) > bits_of(b.lane[i]) ? a.lane[i] : b.lane[i]; });
}
// Lane i: the greatest lane of x[i], in that sense; the others are 0.
inline V maxima(const V (&x)[8]) {
  float out[kLanes] = {};
  for (int i = 0; i < 8; ++i) out[i] = greatest_magnitude(x[i], x[i]);
  return load(out);
}
inline B hold_line(const std::uint8_t* p) { return load_bytes(p); }

// The low bytes of 16 factors.
inline void store_bytes(std::uint8_t* p, I a) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<std::uint8_t>(a.lane[i]);
}
// The two bytes of 16 factors; `carry` is added before the high one is taken.
inline void store_terms(std::uint8_t* high, std::uint8_t* low, I x, I carry) {
  for (int i = 0; i < kLanes; ++i) {
    high[i] = static_cast<std::uint8_t>((x.lane[i] + carry.lane[i]) >> 8);
    low[i] = static_cast<std::uint8_t>(x.lane[i]);
  }
}
// 256 * high + low
inline I join_terms(I high, I low) {
  return lanes<I>([&](int i) { return high.lane[i] * 256 + low.lane[i]; });
}

}  // namespace
}  // namespace smollm2

#include "simd/groups.inl"
#include "simd/mix.inl"
#include "simd/pairs.inl"
#include "simd/quads.inl"
