// Half floats and bf16 as bits, in portable C++.
#pragma once

#include <cstdint>
#include <cstring>

namespace smollm2 {

inline std::uint32_t bits_of(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline float float_of_half(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000U) << 16;
  const std::uint32_t magnitude = half & 0x7fffU;
  if (magnitude >= 0x7c00U) return float_of(sign | 0x7f800000U | (magnitude & 0x3ffU) << 13);
  // Shifted into place the exponent is too small by 112, for subnormals as well.
  return float_of(sign | bits_of(float_of(magnitude << 13) * 0x1p112f));
}

// To nearest, half to even; what is too large becomes infinity, NaN stays NaN.
inline std::uint16_t half_of(float x) {
  const std::uint32_t sign = (bits_of(x) >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits_of(x) & 0x7fffffffU;
  if (magnitude > 0x7f800000U) return static_cast<std::uint16_t>(sign | 0x7e00U);
  if (magnitude >= 0x477ff000U) return static_cast<std::uint16_t>(sign | 0x7c00U);
  if (magnitude < 0x38800000U) {
    // Subnormal: a half's unit is then 2^-24, the unit of 0.5 as a float.
    const std::uint32_t units = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    return static_cast<std::uint16_t>(sign | units);
  }
  const std::uint32_t rounded = magnitude + 0xfffU + (magnitude >> 13 & 1U) - (112U << 23);
  return static_cast<std::uint16_t>(sign | rounded >> 13);
}

inline float float_of_bf16(std::uint16_t half) {
  return float_of(static_cast<std::uint32_t>(half) << 16);
}

// To nearest, half to even; NaN stays NaN.
inline std::uint16_t bf16_of(float x) {
  const std::uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<std::uint16_t>(bits >> 16 | 0x40U);
  return static_cast<std::uint16_t>((bits + 0x7fffU + (bits >> 16 & 1U)) >> 16);
}

}  // namespace smollm2
