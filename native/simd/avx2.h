// The policy of simd/scalar.h for AVX2, FMA and F16C: two registers each for V, I and B.
#pragma once

#include <immintrin.h>

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
  __m256 low, high;
};
struct I {
  __m256i low, high;
};
struct B {
  __m256i low, high;
};

// ---- floats
inline V broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, V a) {
  _mm256_storeu_ps(p, a.low);
  _mm256_storeu_ps(p + 8, a.high);
}
inline V add(V a, V b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline V sub(V a, V b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline V mul(V a, V b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline V div(V a, V b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline V max(V a, V b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline V min(V a, V b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline V fma(V a, V b, V c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline V if_greater(V a, V b, V x, V y) {
  return {_mm256_blendv_ps(y.low, x.low, _mm256_cmp_ps(a.low, b.low, _CMP_GT_OQ)),
          _mm256_blendv_ps(y.high, x.high, _mm256_cmp_ps(a.high, b.high, _CMP_GT_OQ))};
}
inline V round(V a) {
  return {_mm256_round_ps(a.low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(a.high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

inline float sum(V a) {
  const __m256 eight = _mm256_add_ps(a.low, a.high);
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float max(V a) {
  const __m256 eight = _mm256_max_ps(a.low, a.high);
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

// ---- 16-bit floats
inline __m128i load_eight(const std::uint16_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
inline V load_half(const std::uint16_t* p) {
  return {_mm256_cvtph_ps(load_eight(p)), _mm256_cvtph_ps(load_eight(p + 8))};
}
inline V even_bf16(B pairs) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs.low, 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(pairs.high, 16))};
}
inline V odd_bf16(B pairs) {
  const __m256i mask = _mm256_set1_epi32(static_cast<std::int32_t>(0xffff0000U));
  return {_mm256_castsi256_ps(_mm256_and_si256(pairs.low, mask)),
          _mm256_castsi256_ps(_mm256_and_si256(pairs.high, mask))};
}

// ---- integers
inline I broadcast_int(std::int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I add(I a, I b) {
  return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
inline I mul(I a, I b) {
  return {_mm256_mullo_epi32(a.low, b.low), _mm256_mullo_epi32(a.high, b.high)};
}
inline V to_float(I a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
inline I to_int(V a) { return {_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high)}; }
inline __m256 eight_powers_of_two(__m256i a) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(a, _mm256_set1_epi32(127)), 23));
}
inline V power_of_two(I a) { return {eight_powers_of_two(a.low), eight_powers_of_two(a.high)}; }
inline std::int32_t sum(I a) {
  const __m256i eight = _mm256_add_epi32(a.low, a.high);
  __m128i x = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}
inline float greatest_magnitude(V a, V b) {
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  const __m256i x = _mm256_max_epi32(_mm256_and_si256(_mm256_castps_si256(a.low), mask),
                                     _mm256_and_si256(_mm256_castps_si256(a.high), mask));
  const __m256i y = _mm256_max_epi32(_mm256_and_si256(_mm256_castps_si256(b.low), mask),
                                     _mm256_and_si256(_mm256_castps_si256(b.high), mask));
  const __m256i eight = _mm256_max_epi32(x, y);
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1));
  return _mm_cvtss_f32(_mm_castsi128_ps(four));
}
inline void store_int8(std::int8_t* p, I a) {
  // The pack works within 128-bit lanes: quarters 0 2 1 3.
  const __m256i words = _mm256_packs_epi32(a.low, a.high);
  const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
  const __m128i bytes =
      _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
inline void store_int16(std::int16_t* p, I a) {
  const __m256i words = _mm256_packs_epi32(a.low, a.high);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(words, 0xd8));
}
inline V load_int16(const std::int16_t* p) {
  const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8));
  return to_float(I{_mm256_cvtepi16_epi32(low), _mm256_cvtepi16_epi32(high)});
}

// ---- bytes
// Asks for a line of the second-level cache; there may be no such memory.
SMOLLM2_INLINE inline void prefetch(const std::uint8_t* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
}
inline B load_bytes(const void* p) {
  const auto* at = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
inline B broadcast_bytes(const void* p) {
  std::int32_t four;
  std::memcpy(&four, p, sizeof four);
  return {_mm256_set1_epi32(four), _mm256_set1_epi32(four)};
}
inline B low_nibbles(B a) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(a.low, mask), _mm256_and_si256(a.high, mask)};
}
inline B high_nibbles(B a) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(a.low, 4), mask),
          _mm256_and_si256(_mm256_srli_epi16(a.high, 4), mask)};
}
inline B flip_sign(B a) {
  const __m256i top = _mm256_set1_epi8(-128);
  return {_mm256_xor_si256(a.low, top), _mm256_xor_si256(a.high, top)};
}

// ---- what attention does with floats, and with pairs of 16 bits
constexpr int kLineTiles = 2;

// p * 2^n for whole n, -126 ... 127; 0 where x < lowest.
inline V scale_unless_below(V p, V n, V x, float lowest) {
  return if_greater(broadcast(lowest), x, zero(), mul(p, power_of_two(to_int(n))));
}

// Of lanes that are not negative, the greater; NaN counts as greater than infinity.
inline __m256 greater_bits(__m256 a, __m256 b) {
  return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
}
inline V greater_bits(V a, V b) {
  return {greater_bits(a.low, b.low), greater_bits(a.high, b.high)};
}
// Lane i: the greatest lane of x[i], in that sense; the others are 0.
inline V maxima(const V (&x)[8]) {
  float out[kLanes] = {};
  for (int i = 0; i < 8; ++i) out[i] = greatest_magnitude(x[i], zero());
  return load(out);
}

inline B hold_line(const std::uint8_t* p) { return load_bytes(p); }
// Lane i: acc + the products of a's 2 int16 and b's.
inline I dot2(I acc, B a, B b) {
  return {_mm256_add_epi32(acc.low, _mm256_madd_epi16(a.low, b.low)),
          _mm256_add_epi32(acc.high, _mm256_madd_epi16(a.high, b.high))};
}

}  // namespace
}  // namespace smollm2

#if defined(SMOLLM2_AVX_VNNI)
#include "simd/dots_avxvnni.h"
#else
#include "simd/dots_avx2.h"
#endif
#include "simd/exp.inl"
