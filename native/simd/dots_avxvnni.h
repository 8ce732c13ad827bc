// Dot products of weights, and of lines of keys and values, for AVX2 with AVX-VNNI.
#pragma once

#include "simd/avx2.h"

namespace smollm2 {
namespace {

constexpr int kQuadTiles = 1;  // tiles whose sums lie in registers together

constexpr bool kSignedDots = false;
inline __m256i eight_dots(__m256i acc, __m256i u, __m256i s) {
#if defined(SMOLLM2_EVEX_VNNI)
  return _mm256_dpbusd_epi32(acc, u, s);  // AVX-512's encoding of the same, for tests
#else
  return _mm256_dpbusd_avx_epi32(acc, u, s);
#endif
}
inline I dot4(I acc, B u, B s) {
  return {eight_dots(acc.low, u.low, s.low), eight_dots(acc.high, u.high, s.high)};
}

// The lowest byte of each of 16 numbers.
inline void store_bytes(std::uint8_t* p, I a) {
  const __m256i mask = _mm256_set1_epi32(0xff);
  const __m256i words =
      _mm256_packus_epi32(_mm256_and_si256(a.low, mask), _mm256_and_si256(a.high, mask));
  const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);  // quarters come as 0 2 1 3
  const __m128i bytes =
      _mm_packus_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
inline void store_terms(std::uint8_t* high, std::uint8_t* low, I x, I carry) {
  const I sum = add(x, carry);
  store_bytes(high, {_mm256_srai_epi32(sum.low, 8), _mm256_srai_epi32(sum.high, 8)});
  store_bytes(low, x);
}
inline I join_terms(I high, I low) {
  return add({_mm256_slli_epi32(high.low, 8), _mm256_slli_epi32(high.high, 8)}, low);
}

}  // namespace
}  // namespace smollm2

#include "simd/groups.inl"
#include "simd/mix.inl"
#include "simd/pairs.inl"
#include "simd/quads.inl"
