#define SMOLLM2_ISA scalar
#include "simd/scalar.h"

#include "isa/table.inl"
