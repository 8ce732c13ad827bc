#define SMOLLM2_ISA avxvnni
#define SMOLLM2_AVX_VNNI 1
// clang-format off: the policy comes before the kernels that are written over it
#include "simd/avx2.h"
#include "isa/table.inl"
