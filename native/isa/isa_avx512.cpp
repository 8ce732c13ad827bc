#define SMOLLM2_ISA avx512
// clang-format off: the policy comes before the kernels that are written over it
#include "simd/avx512.h"
#include "isa/table.inl"
