// One table of kernels, compiled once for each instruction set. The including file has included
// its policy from simd/ and defines SMOLLM2_ISA (the table's name, as an identifier).
//
// Everything but the table's accessor lies in an anonymous namespace: a function that two
// instruction sets shared by name would be merged by the linker, and run where it must not.
#include "kernels/kernels.h"

#define SMOLLM2_TEXT_(x) #x
#define SMOLLM2_TEXT(x) SMOLLM2_TEXT_(x)
#define SMOLLM2_JOIN_(a, b) a##b
#define SMOLLM2_JOIN(a, b) SMOLLM2_JOIN_(a, b)

namespace smollm2 {
namespace {

// clang-format off: each uses what those before it define
#include "kernels/elementwise.inl"
#include "kernels/linear.inl"
#include "kernels/attention.inl"
// clang-format on

constexpr Kernels table{
    SMOLLM2_TEXT(SMOLLM2_ISA),
    linear_float,
    linear_integer,
    quantize_row,
    quantize_row_twice,
    rms_norm,
    rope,
    silu_mul,
    unpack_row,
    kv_write,
    attend,
    fetch,
    merge,
};

}  // namespace

const Kernels& SMOLLM2_JOIN(table_, SMOLLM2_ISA)() { return table; }

}  // namespace smollm2
