// What attention multiplies lines of keys and values with, for AVX-512 (VNNI).
#pragma once

#include "simd/avx512.h"

namespace smollm2 {
namespace {

// p * 2^n for whole n; 0 where x < lowest.
inline V scale_unless_below(V p, V n, V x, float lowest) {
  const __mmask16 kept = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(lowest), _CMP_NLT_UQ);
  return {_mm512_maskz_scalef_ps(kept, p.v, n.v)};
}

// Of lanes that are not negative, the greater; NaN counts as greater than infinity.
inline V greater_bits(V a, V b) {
  return {
      _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a.v), _mm512_castps_si512(b.v)))};
}
// Lane i: the greatest lane of x[i], in that sense; the others repeat. A tree that halves pairs of
// vectors together.
inline V maxima(const V (&x)[8]) {
  V two[4], four[2];
  for (int i = 0; i < 4; ++i) {
    const __m512 a = x[2 * i].v, b = x[2 * i + 1].v;
    two[i] = greater_bits({_mm512_unpacklo_ps(a, b)}, {_mm512_unpackhi_ps(a, b)});
  }
  for (int i = 0; i < 2; ++i) {
    const __m512d a = _mm512_castps_pd(two[2 * i].v), b = _mm512_castps_pd(two[2 * i + 1].v);
    four[i] = greater_bits({_mm512_castpd_ps(_mm512_unpacklo_pd(a, b))},
                           {_mm512_castpd_ps(_mm512_unpackhi_pd(a, b))});
  }
  // Quarters of both: 0 and 2 beside 1 and 3, then those beside each other.
  const V half = greater_bits({_mm512_shuffle_f32x4(four[0].v, four[1].v, 0x88)},
                              {_mm512_shuffle_f32x4(four[0].v, four[1].v, 0xdd)});
  const V whole = greater_bits(half, {_mm512_shuffle_f32x4(half.v, half.v, 0xb1)});
  return {_mm512_shuffle_f32x4(whole.v, whole.v, 0x88)};
}

// Loads a line once: GCC would rather load it again for each row.
inline B hold_line(const std::uint8_t* p) {
  B line = load_bytes(p);
#if defined(__GNUC__)
  __asm__("" : "+v"(line.v));
#endif
  return line;
}

inline void store_bytes(std::uint8_t* p, I a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}
inline void store_terms(std::uint8_t* high, std::uint8_t* low, I x, I carry) {
  const __m512i above = _mm512_srai_epi32(_mm512_add_epi32(x.v, carry.v), 8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(high), _mm512_cvtepi32_epi8(above));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(low), _mm512_cvtepi32_epi8(x.v));
}
inline I join_terms(I high, I low) {
  return {_mm512_add_epi32(_mm512_slli_epi32(high.v, 8), low.v)};
}

inline I dot2(I acc, B a, B b) { return {_mm512_dpwssd_epi32(acc.v, a.v, b.v)}; }

constexpr int kLineTiles = 4, kQuadTiles = 2;

}  // namespace
}  // namespace smollm2

#include "simd/groups.inl"
#include "simd/mix.inl"
#include "simd/pairs.inl"
#include "simd/quads.inl"
