#define SMOLLM2_ISA avx2
#include "simd/avx2.h"

#include "isa/table.inl"
