// The policy of simd/scalar.h for AVX2, FMA and F16C: two registers each for V, I and B.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

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
inline __m256 floats_of_bf16(__m128i halves) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
inline V load_bf16(const std::uint16_t* p) {
  return {floats_of_bf16(load_eight(p)), floats_of_bf16(load_eight(p + 8))};
}
// Eight bf16, each in 32 bits.
inline __m256i bf16_of(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i high = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const __m256i near = _mm256_srli_epi32(
      _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(near, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), nan);
}
inline void store_bf16(std::uint16_t* p, V a) {
  // The pack works within 128-bit lanes: quarters 0 2 1 3.
  const __m256i packed = _mm256_packus_epi32(bf16_of(a.low), bf16_of(a.high));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
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
  const __m256i words = _mm256_packs_epi32(a.low, a.high);  // quarters 0 2 1 3, as in store_bf16
  const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
  const __m128i bytes =
      _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
inline void store_int16(std::int16_t* p, I a) {
  const __m256i words = _mm256_packs_epi32(a.low, a.high);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(words, 0xd8));
}
inline V load_int8(const std::int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return to_float(I{_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))});
}
inline V load_int16(const std::int16_t* p) {
  const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8));
  return to_float(I{_mm256_cvtepi16_epi32(low), _mm256_cvtepi16_epi32(high)});
}

// ---- bytes
// Asks for a line of the second-level cache; there may be no such memory.
inline void prefetch(const std::uint8_t* p) {
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
// In 16 bits, even and odd bytes apart: VPMADDUBSW would saturate.
inline __m256i eight_dots(__m256i acc, __m256i u, __m256i s) {
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(0xff)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
  return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
}
inline I dot4(I acc, B u, B s) {
  return {eight_dots(acc.low, u.low, s.low), eight_dots(acc.high, u.high, s.high)};
}

// ---- dot products of one group of 32, for 16 rows of weights

// |w| * (x with the sign of w): a pair is at most 2 * 128 * 127 = 32512, so that nothing
// saturates. The weights are signed again here, so there is nothing to take off.
struct Dot8 {
  using Acc = I;
  struct Line {
    B magnitude, sign;
  };
  static Acc begin(std::int32_t) { return broadcast_int(0); }
  static Line line(B bytes) {
    const B w = flip_sign(bytes);
    return {{_mm256_abs_epi8(w.low), _mm256_abs_epi8(w.high)}, w};
  }
  static __m256i step(__m256i acc, __m256i magnitude, __m256i sign, __m256i x) {
    const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x, sign));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  static Acc step(Acc acc, Line w, B x) {
    return {step(acc.low, w.magnitude.low, w.sign.low, x.low),
            step(acc.high, w.magnitude.high, w.sign.high, x.high)};
  }
  static I end(Acc acc, std::int32_t) { return acc; }
};

// Pairs are at most 2 * 15 * 127 = 3810, and 8 of them fit 16 bits.
template <int zero_point>
struct Dot4 {
  struct Acc {
    __m256i low, high;  // 16 pairs each
  };
  static Acc begin(std::int32_t) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static Acc step(Acc acc, B w, B x) {
    return {_mm256_add_epi16(acc.low, _mm256_maddubs_epi16(w.low, x.low)),
            _mm256_add_epi16(acc.high, _mm256_maddubs_epi16(w.high, x.high))};
  }
  static I end(Acc acc, std::int32_t sum) {
    const __m256i one = _mm256_set1_epi16(1);
    const I dots{_mm256_madd_epi16(acc.low, one), _mm256_madd_epi16(acc.high, one)};
    return add(dots, broadcast_int(-zero_point * sum));
  }
};

}  // namespace
}  // namespace smollm2

#include "simd/dots_avx2.h"
#include "simd/exp.inl"
