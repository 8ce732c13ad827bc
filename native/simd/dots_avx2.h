// What attention multiplies lines of keys and values with, for AVX2.
#pragma once

#include "simd/avx2.h"

namespace smollm2 {
namespace {

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

// Lines are [16 lanes][2] int16, factors int16. Exact as long as the whole sum fits 32 bits.
struct PairDot {
  static constexpr int tiles = 2;  // whose sums lie in registers together
  static constexpr bool scaled = false;
  using Acc = I;
  using Line = B;
  using Factor = __m256i;
  static void prepare(const I* x, int count, std::uint32_t* factors) {
    auto* to = reinterpret_cast<std::int16_t*>(factors);
    for (int i = 0; i < count; i += kLanes) store_int16(to + i, x[i / kLanes]);
  }
  static Acc begin(std::int32_t start) { return broadcast_int(start); }
  static Line line(const std::uint8_t* p) { return load_bytes(p); }
  static Factor factor(const std::uint32_t* factors, int step, int) {
    return _mm256_set1_epi32(static_cast<std::int32_t>(factors[step]));
  }
  static Acc step(Acc acc, Line a, Factor x) {
    return {_mm256_add_epi32(acc.low, _mm256_madd_epi16(a.low, x)),
            _mm256_add_epi32(acc.high, _mm256_madd_epi16(a.high, x))};
  }
  static V end(Acc acc) { return to_float(acc); }
};

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
      for (const __m256i eight : {x[i / kLanes].low, x[i / kLanes].high}) {
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
