// The policy of simd/scalar.h for AArch64's NEON: four registers each for V, I and B. Dot products
// are those of SMOLLM2_DOTPROD (SDOT) or SMOLLM2_I8MM (USDOT) where one of them is defined.
#pragma once

#include <arm_neon.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "simd/each.h"

namespace smollm2 {
namespace {

constexpr int kLanes = 16;
struct FloatSums {
  static constexpr int rows = 4, tiles = 1, few_rows = 4;
};
struct IntegerSums {
  static constexpr int rows = 4, tiles = 1, few_rows = 4;
};

struct V {
  float32x4_t q[4];
};
struct I {
  int32x4_t q[4];
};
struct B {
  uint8x16_t q[4];
};

// A function of each quarter, as V, I or B.
template <typename Out, typename F>
inline Out quarters(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}

// ---- floats
inline V broadcast(float x) {
  return quarters<V>([&](int) { return vdupq_n_f32(x); });
}
inline V zero() { return broadcast(0.0f); }
inline V load(const float* p) {
  return quarters<V>([&](int i) { return vld1q_f32(p + 4 * i); });
}
inline void store(float* p, V a) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.q[i]);
}
inline V add(V a, V b) {
  return quarters<V>([&](int i) { return vaddq_f32(a.q[i], b.q[i]); });
}
inline V sub(V a, V b) {
  return quarters<V>([&](int i) { return vsubq_f32(a.q[i], b.q[i]); });
}
inline V mul(V a, V b) {
  return quarters<V>([&](int i) { return vmulq_f32(a.q[i], b.q[i]); });
}
inline V div(V a, V b) {
  return quarters<V>([&](int i) { return vdivq_f32(a.q[i], b.q[i]); });
}
// Not FMAX and FMIN, which give NaN where only the first is NaN, and order zeros by sign.
inline float32x4_t greater(float32x4_t a, float32x4_t b) {
  return vbslq_f32(vcgtq_f32(a, b), a, b);
}
inline V max(V a, V b) {
  return quarters<V>([&](int i) { return greater(a.q[i], b.q[i]); });
}
inline V min(V a, V b) {
  return quarters<V>([&](int i) { return vbslq_f32(vcltq_f32(a.q[i], b.q[i]), a.q[i], b.q[i]); });
}
inline V fma(V a, V b, V c) {
  return quarters<V>([&](int i) { return vfmaq_f32(c.q[i], a.q[i], b.q[i]); });
}
inline V if_greater(V a, V b, V x, V y) {
  return quarters<V>([&](int i) { return vbslq_f32(vcgtq_f32(a.q[i], b.q[i]), x.q[i], y.q[i]); });
}
inline V round(V a) {
  return quarters<V>([&](int i) { return vrndnq_f32(a.q[i]); });
}

inline float sum(V a) {
  const float32x4_t four = vaddq_f32(vaddq_f32(a.q[0], a.q[2]), vaddq_f32(a.q[1], a.q[3]));
  return vaddv_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)));
}
inline float max(V a) {
  float32x4_t x = greater(greater(a.q[0], a.q[2]), greater(a.q[1], a.q[3]));
  x = greater(x, vextq_f32(x, x, 2));
  return vgetq_lane_f32(greater(x, vextq_f32(x, x, 1)), 0);
}

// ---- 16-bit floats
inline V load_half(const std::uint16_t* p) {
  return quarters<V>(
      [&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
}
inline V even_bf16(B pairs) {
  return quarters<V>([&](int i) {
    return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u8(pairs.q[i]), 16));
  });
}
inline V odd_bf16(B pairs) {
  const uint32x4_t mask = vdupq_n_u32(0xffff0000U);
  return quarters<V>([&](int i) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u8(pairs.q[i]), mask));
  });
}

// ---- integers
inline I broadcast_int(std::int32_t x) {
  return quarters<I>([&](int) { return vdupq_n_s32(x); });
}
inline I add(I a, I b) {
  return quarters<I>([&](int i) { return vaddq_s32(a.q[i], b.q[i]); });
}
inline I mul(I a, I b) {
  return quarters<I>([&](int i) { return vmulq_s32(a.q[i], b.q[i]); });
}
inline V to_float(I a) {
  return quarters<V>([&](int i) { return vcvtq_f32_s32(a.q[i]); });
}
inline I to_int(V a) {
  return quarters<I>([&](int i) { return vcvtnq_s32_f32(a.q[i]); });
}
inline V power_of_two(I a) {
  return quarters<V>([&](int i) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(a.q[i], vdupq_n_s32(127)), 23));
  });
}
inline std::int32_t sum(I a) {
  return vaddvq_s32(vaddq_s32(vaddq_s32(a.q[0], a.q[1]), vaddq_s32(a.q[2], a.q[3])));
}
inline float greatest_magnitude(V a, V b) {
  uint32x4_t greatest = vdupq_n_u32(0);
  for (int i = 0; i < 4; ++i) {
    greatest = vmaxq_u32(greatest, vreinterpretq_u32_f32(vabsq_f32(a.q[i])));
    greatest = vmaxq_u32(greatest, vreinterpretq_u32_f32(vabsq_f32(b.q[i])));
  }
  const std::uint32_t bits = vmaxvq_u32(greatest);
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}
// The lowest byte of each of 16 numbers.
inline int8x16_t low_bytes(I a) {
  const int16x8_t low = vcombine_s16(vmovn_s32(a.q[0]), vmovn_s32(a.q[1]));
  const int16x8_t high = vcombine_s16(vmovn_s32(a.q[2]), vmovn_s32(a.q[3]));
  return vcombine_s8(vmovn_s16(low), vmovn_s16(high));
}
inline void store_int8(std::int8_t* p, I a) { vst1q_s8(p, low_bytes(a)); }
inline void store_int16(std::int16_t* p, I a) {
  for (int i = 0; i < 4; ++i) vst1_s16(p + 4 * i, vmovn_s32(a.q[i]));
}
inline V load_int16(const std::int16_t* p) {
  return quarters<V>([&](int i) { return vcvtq_f32_s32(vmovl_s16(vld1_s16(p + 4 * i))); });
}

// ---- bytes
// Asks for a line of the second-level cache; there may be no such memory.
SMOLLM2_INLINE inline void prefetch(const std::uint8_t* p) { __builtin_prefetch(p, 0, 2); }
inline B load_bytes(const void* p) {
  return quarters<B>([&](int i) { return vld1q_u8(static_cast<const std::uint8_t*>(p) + 16 * i); });
}
inline B broadcast_bytes(const void* p) {
  std::uint32_t four;
  std::memcpy(&four, p, sizeof four);
  return quarters<B>([&](int) { return vreinterpretq_u8_u32(vdupq_n_u32(four)); });
}
inline B low_nibbles(B a) {
  return quarters<B>([&](int i) { return vandq_u8(a.q[i], vdupq_n_u8(15)); });
}
inline B high_nibbles(B a) {
  return quarters<B>([&](int i) { return vshrq_n_u8(a.q[i], 4); });
}
inline B flip_sign(B a) {
  return quarters<B>([&](int i) { return veorq_u8(a.q[i], vdupq_n_u8(0x80)); });
}

}  // namespace
}  // namespace smollm2

#include "simd/dots_neon.h"
#include "simd/exp.inl"
