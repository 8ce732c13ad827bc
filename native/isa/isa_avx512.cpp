#define SMOLLM2_ISA avx512
#include "simd/avx512.h"

#include "isa/table.inl"
