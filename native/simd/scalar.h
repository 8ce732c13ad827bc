// The policy that kernels are written over, in plain C++: the reference for every other one.
//
// V is 16 floats, I 16 int32, B 64 bytes that are [16 lanes][4]. Every policy offers the same
// operations under the same names, and each gives the same bits on every instruction set: FMA is
// one rounding, max and min return their second argument where either is NaN, and sums fold halves
// onto each other (lane i + lane i+8, then i+4, i+2, i+1).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "pack/half.h"
#include "simd/each.h"

namespace smollm2 {
namespace {

constexpr int kLanes = 16;

// What a linear kernel holds the sums of at once, as much as fits the registers: `rows` of `tiles`,
// or up to `few_rows` of one tile.
struct FloatSums {
  static constexpr int rows = 1, tiles = 1, few_rows = 1;
};
struct IntegerSums {
  static constexpr int rows = 1, tiles = 1, few_rows = 1;
};

struct V {
  float lane[kLanes];
};
struct I {
  std::int32_t lane[kLanes];
};
struct B {
  std::uint8_t byte[4 * kLanes];
};

// A lane-wise function, as V or I.
template <typename Out, typename F>
inline Out lanes(F f) {
  Out out;
  for (int i = 0; i < kLanes; ++i) out.lane[i] = f(i);
  return out;
}

// ---- floats
inline V broadcast(float x) {
  return lanes<V>([&](int) { return x; });
}
inline V zero() { return broadcast(0.0f); }
inline V load(const float* p) {
  V out;
  std::memcpy(out.lane, p, sizeof out.lane);
  return out;
}
inline void store(float* p, V a) { std::memcpy(p, a.lane, sizeof a.lane); }
inline V add(V a, V b) {
  return lanes<V>([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline V sub(V a, V b) {
  return lanes<V>([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline V mul(V a, V b) {
  return lanes<V>([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline V div(V a, V b) {
  return lanes<V>([&](int i) { return a.lane[i] / b.lane[i]; });
}
inline V max(V a, V b) {
  return lanes<V>([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline V min(V a, V b) {
  return lanes<V>([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}
// a * b + c
inline V fma(V a, V b, V c) {
  return lanes<V>([&](int i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); });
}
// x where a > b, else y.
inline V if_greater(V a, V b, V x, V y) {
  return lanes<V>([&](int i) { return a.lane[i] > b.lane[i] ? x.lane[i] : y.lane[i]; });
}
// Half to even, |a| < 2^22.
inline V round(V a) {
  constexpr float magic = 12582912.0f;  // 1.5 * 2^23: its unit in the last place is 1
  return lanes<V>([&](int i) { return (a.lane[i] + magic) - magic; });
}

inline float sum(V a) {
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) a.lane[i] += a.lane[i + half];
  }
  return a.lane[0];
}
// The greatest lane; which one where some are NaN is not said.
inline float max(V a) {
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) {
      a.lane[i] = a.lane[i] > a.lane[i + half] ? a.lane[i] : a.lane[i + half];
    }
  }
  return a.lane[0];
}

// ---- 16-bit floats
inline V load_half(const std::uint16_t* p) {
  return lanes<V>([&](int i) { return float_of_half(p[i]); });
}
// The two values of each pair of [16][2] bf16.
inline V even_bf16(B pairs) {
  return lanes<V>([&](int i) {
    std::uint16_t half;
    std::memcpy(&half, pairs.byte + 4 * i, sizeof half);
    return float_of_bf16(half);
  });
}
inline V odd_bf16(B pairs) {
  return lanes<V>([&](int i) {
    std::uint16_t half;
    std::memcpy(&half, pairs.byte + 4 * i + 2, sizeof half);
    return float_of_bf16(half);
  });
}

// ---- integers
inline I broadcast_int(std::int32_t x) {
  return lanes<I>([&](int) { return x; });
}
inline I add(I a, I b) {
  return lanes<I>([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline I mul(I a, I b) {
  return lanes<I>([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline V to_float(I a) {
  return lanes<V>([&](int i) { return static_cast<float>(a.lane[i]); });
}
// Half to even, |a| < 2^22; else some number.
inline I to_int(V a) {
  constexpr float magic = 12582912.0f;
  return lanes<I>([&](int i) {
    return static_cast<std::int32_t>(bits_of(a.lane[i] + magic) - bits_of(magic));
  });
}
// 2^a for -126 <= a <= 127; else some number.
inline V power_of_two(I a) {
  return lanes<V>(
      [&](int i) { return float_of((static_cast<std::uint32_t>(a.lane[i]) + 127U) << 23); });
}
inline std::int32_t sum(I a) {
  std::int32_t total = 0;
  for (const std::int32_t x : a.lane) total += x;
  return total;
}
// The greatest |lane| of two; NaN counts as greater than infinity.
inline float greatest_magnitude(V a, V b) {
  std::uint32_t greatest = 0;
  for (int i = 0; i < kLanes; ++i) {
    const std::uint32_t x = bits_of(a.lane[i]) & 0x7fffffffU;
    const std::uint32_t y = bits_of(b.lane[i]) & 0x7fffffffU;
    greatest = x > greatest ? x : greatest;
    greatest = y > greatest ? y : greatest;
  }
  return float_of(greatest);
}
// |lane| <= 127
inline void store_int8(std::int8_t* p, I a) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<std::int8_t>(a.lane[i]);
}
// |lane| <= 32767
inline void store_int16(std::int16_t* p, I a) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<std::int16_t>(a.lane[i]);
}
inline V load_int16(const std::int16_t* p) {
  return lanes<V>([&](int i) { return static_cast<float>(p[i]); });
}

// ---- bytes
// Asks for a line of the second-level cache, where that helps; there may be no such memory.
inline void prefetch(const std::uint8_t*) {}
inline B load_bytes(const void* p) {
  B out;
  std::memcpy(out.byte, p, sizeof out.byte);
  return out;
}
// The same 4 bytes in all 16 lanes.
inline B broadcast_bytes(const void* p) {
  B out;
  for (int i = 0; i < kLanes; ++i) std::memcpy(out.byte + 4 * i, p, 4);
  return out;
}
inline B low_nibbles(B a) {
  for (std::uint8_t& x : a.byte) x &= 15;
  return a;
}
inline B high_nibbles(B a) {
  for (std::uint8_t& x : a.byte) x = static_cast<std::uint8_t>(x >> 4);
  return a;
}
// Flips the top bit of every byte: int8 q to uint8 q + 128, and back.
inline B flip_sign(B a) {
  for (std::uint8_t& x : a.byte) x ^= 0x80U;
  return a;
}
constexpr bool kSignedDots = false;  // whether dot4 takes int8 for both
// Lane i: acc + the products of u's 4 uint8 and s's 4 int8, exact.
inline I dot4(I acc, B u, B s) {
  for (int i = 0; i < 4 * kLanes; ++i) {
    acc.lane[i / 4] += u.byte[i] * static_cast<std::int8_t>(s.byte[i]);
  }
  return acc;
}
// Lane i: acc + the products of a's 2 int16 and b's.
inline I dot2(I acc, B a, B b) {
  std::int16_t x[2 * kLanes], y[2 * kLanes];
  std::memcpy(x, a.byte, sizeof x);
  std::memcpy(y, b.byte, sizeof y);
  return lanes<I>(
      [&](int i) { return acc.lane[i] + x[2 * i] * y[2 * i] + x[2 * i + 1] * y[2 * i + 1]; });
}

}  // namespace
}  // namespace smollm2

#include "simd/dots_scalar.h"
#include "simd/exp.inl"
