// The policy of simd/scalar.h for AVX-512 (F, BW, VL, VNNI): one register each for V, I and B.
#pragma once

// GCC 12's own headers read what they call undefined (its bug 105593).
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "simd/each.h"

namespace smollm2 {
namespace {

constexpr int kLanes = 16;
struct FloatSums {
  static constexpr int rows = 8, tiles = 1, few_rows = 8;
};
struct IntegerSums {
  static constexpr int rows = 4, tiles = 2, few_rows = 8;
};

struct V {
  __m512 v;
};
struct I {
  __m512i v;
};
struct B {
  __m512i v;
};

// ---- floats
inline V broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline V zero() { return {_mm512_setzero_ps()}; }
inline V load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, V a) { _mm512_storeu_ps(p, a.v); }
inline V add(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
inline V sub(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline V mul(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline V div(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }
inline V max(V a, V b) { return {_mm512_max_ps(a.v, b.v)}; }
inline V min(V a, V b) { return {_mm512_min_ps(a.v, b.v)}; }
inline V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline V if_greater(V a, V b, V x, V y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ), y.v, x.v)};
}
inline V round(V a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

inline __m256 low_half(V a) { return _mm512_castps512_ps256(a.v); }
inline __m256 high_half(V a) {
  return _mm256_castsi256_ps(_mm512_extracti64x4_epi64(_mm512_castps_si512(a.v), 1));
}
inline float sum(V a) {
  const __m256 eight = _mm256_add_ps(low_half(a), high_half(a));
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float max(V a) {
  const __m256 eight = _mm256_max_ps(low_half(a), high_half(a));
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

// ---- 16-bit floats
inline V load_half(const std::uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline V even_bf16(B pairs) { return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs.v, 16))}; }
inline V odd_bf16(B pairs) {
  return {_mm512_castsi512_ps(
      _mm512_and_si512(pairs.v, _mm512_set1_epi32(static_cast<std::int32_t>(0xffff0000U))))};
}

// ---- integers
inline I broadcast_int(std::int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I add(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I mul(I a, I b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline V to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I to_int(V a) { return {_mm512_cvtps_epi32(a.v)}; }
inline V power_of_two(I a) {
  return {
      _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(a.v, _mm512_set1_epi32(127)), 23))};
}
inline std::int32_t sum(I a) { return _mm512_reduce_add_epi32(a.v); }
inline float greatest_magnitude(V a, V b) {
  const __m512i mask = _mm512_set1_epi32(0x7fffffff);
  const std::int32_t greatest =
      _mm512_reduce_max_epi32(_mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(a.v), mask),
                                               _mm512_and_si512(_mm512_castps_si512(b.v), mask)));
  float out;
  std::memcpy(&out, &greatest, sizeof out);
  return out;
}
inline void store_int8(std::int8_t* p, I a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}
inline void store_int16(std::int16_t* p, I a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a.v));
}
inline V load_int16(const std::int16_t* p) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(words))};
}

// ---- bytes
// Asks for a line of the second-level cache; there may be no such memory.
SMOLLM2_INLINE inline void prefetch(const std::uint8_t* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
}
inline B load_bytes(const void* p) { return {_mm512_loadu_si512(p)}; }
inline B broadcast_bytes(const void* p) {
  std::int32_t four;
  std::memcpy(&four, p, sizeof four);
  return {_mm512_set1_epi32(four)};
}
inline B low_nibbles(B a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline B high_nibbles(B a) {
  return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))};
}
inline B flip_sign(B a) { return {_mm512_xor_si512(a.v, _mm512_set1_epi8(-128))}; }
inline I dot4(I acc, B u, B s) { return {_mm512_dpbusd_epi32(acc.v, u.v, s.v)}; }
constexpr bool kSignedDots = false;

}  // namespace
}  // namespace smollm2

#include "simd/dots_avx512.h"
#include "simd/exp.inl"
