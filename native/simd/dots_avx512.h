// What attention multiplies lines of keys and values with, for AVX-512 (BF16, VNNI).
#pragma once

#include "simd/avx512.h"

namespace smollm2 {
namespace {

// p * 2^n for whole n; 0 where x < lowest.
inline V scale_unless_below(V p, V n, V x, float lowest) {
  const __mmask16 kept = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(lowest), _CMP_NLT_UQ);
  return {_mm512_maskz_scalef_ps(kept, p.v, n.v)};
}

// Loads a line once: GCC would rather load it again for each row.
inline B hold_line(const std::uint8_t* p) {
  B line = load_bytes(p);
#if defined(__GNUC__)
  __asm__("" : "+v"(line.v));
#endif
  return line;
}

inline void store_terms(std::uint8_t* high, std::uint8_t* low, I x, I carry) {
  const __m512i above = _mm512_srai_epi32(_mm512_add_epi32(x.v, carry.v), 8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(high), _mm512_cvtepi32_epi8(above));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(low), _mm512_cvtepi32_epi8(x.v));
}
inline I join_terms(I high, I low) {
  return {_mm512_add_epi32(_mm512_slli_epi32(high.v, 8), low.v)};
}

constexpr int kLineTiles = 4, kQuadTiles = 2;

// Lines are [16 lanes][2] bf16, factors the sum of `terms` bf16 (two hold 16 bits of a float).
template <int terms>
struct PairDot {
  static constexpr int tiles = 4;  // whose sums lie in registers together
  using Acc = V;
  using Line = B;
  struct Factor {
    __m512bh term[terms];
  };
  static void prepare(const V* x, int count, std::uint32_t* factors) {
    auto* halves = reinterpret_cast<std::uint16_t*>(factors);
    for (int i = 0; i < count; i += kLanes) {
      V rest = x[i / kLanes];
      for (int term = 0; term < terms; ++term) {
        const __m256i near = (__m256i)_mm512_cvtneps_pbh(rest.v);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(halves + term * count + i), near);
        const __m512i exact = _mm512_slli_epi32(_mm512_cvtepu16_epi32(near), 16);
        rest = sub(rest, {_mm512_castsi512_ps(exact)});
      }
    }
  }
  static Acc begin(std::int32_t) { return zero(); }
  static Line line(const std::uint8_t* p) { return hold_line(p); }
  static Factor factor(const std::uint32_t* factors, int step, int steps) {
    Factor out;
    for (int term = 0; term < terms; ++term) {
      out.term[term] =
          (__m512bh)_mm512_set1_epi32(static_cast<std::int32_t>(factors[term * steps + step]));
    }
    return out;
  }
  static Acc step(Acc acc, Line a, Factor x) {
    for (int term = 0; term < terms; ++term) {
      acc.v = _mm512_dpbf16_ps(acc.v, (__m512bh)a.v, x.term[term]);
    }
    return acc;
  }
  static V end(Acc acc) { return acc; }
};

}  // namespace
}  // namespace smollm2

#include "simd/quads.inl"
