#define SMOLLM2_ISA scalar
// clang-format off: the policy comes before the kernels that are written over it
#include "simd/scalar.h"
#include "isa/table.inl"
