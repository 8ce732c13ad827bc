// Dot products of weights, and of lines of keys and values, for AVX2 alone.
#pragma once

#include "simd/avx2.h"

namespace smollm2 {
namespace {

// ---- of one group of 32, for 16 rows of weights

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

// ---- of keys and values

// Lines are [16 lanes][4] bytes, factors 16 bits: uint8 lines with signed factors, or int8 lines
// with factors 0 ... 255. A quad's even and odd bytes are widened to 16 bits and meet factors 0 2
// and 1 3. Exact as long as the whole sum fits 32 bits.
template <bool signed_lines>
struct WideDot {
  static constexpr int tiles = 1;
  using Acc = I;
  struct Line {
    I even, odd;
  };
  struct Factor {
    __m256i even, odd;
  };
  static void prepare(const I* x, int count, std::uint32_t* factors) {
    // The low halves of a 128-bit lane's four numbers, as 0 2 1 3.
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 8, 9, 4, 5, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1));
    for (int i = 0; i < count; i += kLanes) {
      auto* to = reinterpret_cast<__m128i*>(factors + i / 2);
      const __m256i both[] = {x[i / kLanes].low, x[i / kLanes].high};
      for (const __m256i eight : both) {
        const __m256i halves = _mm256_shuffle_epi8(eight, order);
        _mm_storeu_si128(to++, _mm256_castsi256_si128(_mm256_permute4x64_epi64(halves, 0x08)));
      }
    }
  }
  static Acc begin(std::int32_t start) { return broadcast_int(start); }
  static __m256i even(__m256i bytes) {
    if (!signed_lines) return _mm256_and_si256(bytes, _mm256_set1_epi16(0xff));
    return _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8);
  }
  static __m256i odd(__m256i bytes) {
    return signed_lines ? _mm256_srai_epi16(bytes, 8) : _mm256_srli_epi16(bytes, 8);
  }
  static Line line(const std::uint8_t* p) {
    const B bytes = load_bytes(p);
    return {{even(bytes.low), even(bytes.high)}, {odd(bytes.low), odd(bytes.high)}};
  }
  static Factor factor(const std::uint32_t* factors, int step, int) {
    return {_mm256_set1_epi32(static_cast<std::int32_t>(factors[2 * step])),
            _mm256_set1_epi32(static_cast<std::int32_t>(factors[2 * step + 1]))};
  }
  static __m256i step(__m256i acc, __m256i even, __m256i odd, Factor x) {
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(even, x.even));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(odd, x.odd));
  }
  static Acc step(Acc acc, Line a, Factor x) {
    return {step(acc.low, a.even.low, a.odd.low, x), step(acc.high, a.even.high, a.odd.high, x)};
  }
  static V end(Acc acc) { return to_float(acc); }
};

struct QuadDot : WideDot<false> {
  static constexpr bool scaled = false;
};
struct MixDot : WideDot<true> {
  static constexpr bool scaled = true;  // a part has its own scale
  static constexpr int word = 2;        // factors in each
};

}  // namespace
}  // namespace smollm2

#include "simd/pairs.inl"
