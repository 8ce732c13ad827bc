#define SMOLLM2_ISA neon
// clang-format off: the policy comes before the kernels that are written over it
#include "simd/neon.h"
#include "isa/table.inl"
