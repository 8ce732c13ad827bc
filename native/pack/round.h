// Rounding 32 weights to the kinds that are quantized.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"

namespace smollm2 {

// One group of one row as it is stored: w = scale * q (q8, q16), scale * (q - 8) (q4) or
// scale * q + minimum (q4m); scale and minimum are half floats.
struct Group {
  std::int16_t q[kGroup];
  std::uint16_t scale;
  std::uint16_t minimum;
};

// The group that stands for 32 zeros.
Group zero_group(Kind kind);

// w [32], all finite, rounded to a quantized kind.
//   q8, q16  the greatest magnitude gets 127 or 32767, to nearest. Values are divided by the scale
//            as it is stored. A half float ends at 6e-8 and 65504: a scale is raised until q fits,
//            so q16 has an absolute step of at least 6e-8; weights beyond 65504 times 127 (or
//            32767) are cut off.
//   q4, q4m  of some scales (and minimums) near those that span the group, each improved once by
//            least squares, the one with the least squared error, in which value i counts
//            importance[i] >= 0 times.
Group round_group(Kind kind, const float* w, const float* importance);

}  // namespace smollm2
