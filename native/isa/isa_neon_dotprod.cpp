#define SMOLLM2_ISA neon_dotprod
#define SMOLLM2_DOTPROD 1
// clang-format off: the policy comes before the kernels that are written over it
#include "simd/neon.h"
#include "isa/table.inl"
