// What this CPU can do: asked once at run time, never baked in by compiler flags.
#pragma once

#include <string>
#include <vector>

namespace smollm2 {

// Names of those instruction sets that kernels are chosen by, and that the CPU *and* the operating
// system support ("avx2", "avx512_vnni", "neon_i8mm", ...: isa/dispatch.cpp asks for them).
// Source: Intel SDM vol. 2 (CPUID leaves 1, 7.0, 7.1; XGETBV) and the Linux HWCAP bits of AArch64.
std::vector<std::string> cpu_features();

}  // namespace smollm2
