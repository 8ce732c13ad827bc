#define SMOLLM2_ISA avx2
// clang-format off: the policy comes before the kernels that are written over it
#include "simd/avx2.h"
#include "isa/table.inl"
