#define SMOLLM2_ISA neon_i8mm
#define SMOLLM2_I8MM 1
// clang-format off: the policy comes before the kernels that are written over it
#include "simd/neon.h"
#include "isa/table.inl"
