// Dot products of weights, and of lines of keys and values, for NEON: with USDOT (SMOLLM2_I8MM),
// with SDOT and UDOT (SMOLLM2_DOTPROD), or by widening.
#pragma once

#include "simd/neon.h"

namespace smollm2 {
namespace {

constexpr int kLineTiles = 1, kQuadTiles = 1;

// p * 2^n for whole n, -126 ... 127; 0 where x < lowest.
inline V scale_unless_below(V p, V n, V x, float lowest) {
  return if_greater(broadcast(lowest), x, zero(), mul(p, power_of_two(to_int(n))));
}

// Of lanes that are not negative, the greater; NaN counts as greater than infinity.
inline uint32x4_t greater_bits(float32x4_t a, float32x4_t b) {
  return vmaxq_u32(vreinterpretq_u32_f32(a), vreinterpretq_u32_f32(b));
}
inline V greater_bits(V a, V b) {
  return quarters<V>([&](int i) { return vreinterpretq_f32_u32(greater_bits(a.q[i], b.q[i])); });
}
// Lane i: the greatest lane of x[i], in that sense; the others are 0.
inline V maxima(const V (&x)[8]) {
  uint32x4_t four[8];
  for (int i = 0; i < 8; ++i) {
    four[i] = vmaxq_u32(greater_bits(x[i].q[0], x[i].q[1]), greater_bits(x[i].q[2], x[i].q[3]));
  }
  const auto whole = [&](int i) {
    return vreinterpretq_f32_u32(
        vpmaxq_u32(vpmaxq_u32(four[i], four[i + 1]), vpmaxq_u32(four[i + 2], four[i + 3])));
  };
  return {{whole(0), whole(4), vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)}};
}

inline B hold_line(const std::uint8_t* p) { return load_bytes(p); }
inline void store_bytes(std::uint8_t* p, I a) { vst1q_u8(p, vreinterpretq_u8_s8(low_bytes(a))); }
inline void store_terms(std::uint8_t* high, std::uint8_t* low, I x, I carry) {
  const I sum = add(x, carry);
  store_bytes(high, quarters<I>([&](int i) { return vshrq_n_s32(sum.q[i], 8); }));
  store_bytes(low, x);
}
inline I join_terms(I high, I low) {
  return quarters<I>([&](int i) { return vaddq_s32(vshlq_n_s32(high.q[i], 8), low.q[i]); });
}

// Lane i: acc + the products of a's 2 int16 and b's.
inline I dot2(I acc, B a, B b) {
  return quarters<I>([&](int i) {
    const int16x8_t x = vreinterpretq_s16_u8(a.q[i]), y = vreinterpretq_s16_u8(b.q[i]);
    const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y));
    return vaddq_s32(acc.q[i], vpaddq_s32(low, vmull_high_s16(x, y)));
  });
}

#if defined(SMOLLM2_I8MM)
constexpr bool kSignedDots = false;
inline int32x4_t four_dots(int32x4_t acc, uint8x16_t u, uint8x16_t s) {
  return vusdotq_s32(acc, u, vreinterpretq_s8_u8(s));
}
#else
constexpr bool kSignedDots = true;
// Of int8 and int8.
inline int32x4_t four_dots(int32x4_t acc, uint8x16_t a, uint8x16_t b) {
  const int8x16_t x = vreinterpretq_s8_u8(a), y = vreinterpretq_s8_u8(b);
#if defined(SMOLLM2_DOTPROD)
  return vdotq_s32(acc, x, y);
#else
  const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(x), vget_low_s8(y)));
  return vaddq_s32(acc, vpaddq_s32(low, vpaddlq_s16(vmull_high_s8(x, y))));
#endif
}
// Of uint8 and uint8.
inline uint32x4_t four_dots_unsigned(uint32x4_t acc, uint8x16_t x, uint8x16_t y) {
#if defined(SMOLLM2_DOTPROD)
  return vdotq_u32(acc, x, y);
#else
  const uint32x4_t low = vpaddlq_u16(vmull_u8(vget_low_u8(x), vget_low_u8(y)));
  return vaddq_u32(acc, vpaddq_u32(low, vpaddlq_u16(vmull_high_u8(x, y))));
#endif
}

// As in mix.inl: lines are 128 more, and 128 times the factors' sum is taken off at the end.
struct MixDot {
  static constexpr int tiles = kLineTiles;
  static constexpr bool scaled = true;
  static constexpr int word = 4;  // factors in each
  struct Acc {
    uint32x4_t q[4], sum;
  };
  using Line = B;
  using Factor = uint8x16_t;
  static void prepare(const I* x, int count, std::uint32_t* factors) {
    auto* to = reinterpret_cast<std::uint8_t*>(factors);
    for (int i = 0; i < count; i += kLanes) store_bytes(to + i, x[i / kLanes]);
  }
  static Acc begin(std::int32_t) {
    const uint32x4_t none = vdupq_n_u32(0);
    return {{none, none, none, none}, none};
  }
  static Line line(const std::uint8_t* p) { return flip_sign(hold_line(p)); }
  static Factor factor(const std::uint32_t* factors, int step, int) {
    return vreinterpretq_u8_u32(vdupq_n_u32(factors[step]));
  }
  static Acc step(Acc acc, Line a, Factor x) {
    for (int i = 0; i < 4; ++i) acc.q[i] = four_dots_unsigned(acc.q[i], a.q[i], x);
    acc.sum = four_dots_unsigned(acc.sum, vdupq_n_u8(1), x);
    return acc;
  }
  static V end(Acc acc) {
    const uint32x4_t more = vshlq_n_u32(acc.sum, 7);
    return to_float(
        quarters<I>([&](int i) { return vreinterpretq_s32_u32(vsubq_u32(acc.q[i], more)); }));
  }
};
#endif
inline I dot4(I acc, B u, B s) {
  return quarters<I>([&](int i) { return four_dots(acc.q[i], u.q[i], s.q[i]); });
}

}  // namespace
}  // namespace smollm2

#include "simd/groups.inl"
#include "simd/pairs.inl"
#include "simd/quads.inl"
#if defined(SMOLLM2_I8MM)
#include "simd/mix.inl"
#endif
