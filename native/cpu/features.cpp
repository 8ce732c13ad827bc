#include "cpu/features.h"

#include <array>
#include <cstdint>

#if defined(__x86_64__) || defined(_M_X64)
#define SMOLLM2_X86 1
#if defined(_MSC_VER)
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace smollm2 {
namespace {

#if defined(SMOLLM2_X86)

struct Registers {
  std::uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(std::uint32_t leaf, std::uint32_t subleaf) {
  Registers r;
#if defined(_MSC_VER)
  int out[4];
  __cpuidex(out, static_cast<int>(leaf), static_cast<int>(subleaf));
  r = {static_cast<std::uint32_t>(out[0]), static_cast<std::uint32_t>(out[1]),
       static_cast<std::uint32_t>(out[2]), static_cast<std::uint32_t>(out[3])};
#else
  __cpuid_count(leaf, subleaf, r.eax, r.ebx, r.ecx, r.edx);
#endif
  return r;
}

// XCR0: which register files the operating system saves on a context switch.
std::uint64_t saved_state() {
#if defined(_MSC_VER)
  return _xgetbv(0);
#else
  std::uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<std::uint64_t>(high) << 32) | low;
#endif
}

bool bit(std::uint32_t word, unsigned index) { return ((word >> index) & 1U) != 0; }

std::vector<std::string> detect() {
  const std::uint32_t last_leaf = cpuid(0, 0).eax;
  const Registers one = cpuid(1, 0);
  const bool osxsave = bit(one.ecx, 27);
  const std::uint64_t state = osxsave ? saved_state() : 0;
  const bool ymm = (state & 0x06) == 0x06;
  const bool zmm = (state & 0xe6) == 0xe6;
  const Registers seven = last_leaf >= 7 ? cpuid(7, 0) : Registers{};
  const Registers seven_one = last_leaf >= 7 && seven.eax >= 1 ? cpuid(7, 1) : Registers{};

  struct Feature {
    const char* name;
    bool present;
  };
  const std::array<Feature, 8> table{{
      {"f16c", ymm && bit(one.ecx, 29)},
      {"fma", ymm && bit(one.ecx, 12)},
      {"avx2", ymm && bit(seven.ebx, 5)},
      {"avx_vnni", ymm && bit(seven_one.eax, 4)},
      {"avx512f", zmm && bit(seven.ebx, 16)},
      {"avx512bw", zmm && bit(seven.ebx, 30)},
      {"avx512vl", zmm && bit(seven.ebx, 31)},
      {"avx512_vnni", zmm && bit(seven.ecx, 11)},
  }};
  std::vector<std::string> names;
  for (const Feature& feature : table) {
    if (feature.present) names.emplace_back(feature.name);
  }
  return names;
}

#elif defined(__aarch64__) && defined(__linux__)

std::vector<std::string> detect() {
  // Bit numbers of <asm/hwcap.h>, spelled out so that older headers build as well.
  constexpr unsigned long asimd = 1UL << 1, dotprod = 1UL << 20, i8mm = 1UL << 13;
  const unsigned long first = getauxval(AT_HWCAP);
  const unsigned long second = getauxval(AT_HWCAP2);
  std::vector<std::string> names;
  if (first & asimd) names.emplace_back("neon");
  if (first & dotprod) names.emplace_back("neon_dotprod");
  if (second & i8mm) names.emplace_back("neon_i8mm");
  return names;
}

#elif defined(__aarch64__) && defined(__APPLE__)

bool has(const char* key) {
  int value = 0;
  std::size_t size = sizeof value;
  return sysctlbyname(key, &value, &size, nullptr, 0) == 0 && value != 0;
}

std::vector<std::string> detect() {
  std::vector<std::string> names{"neon"};
  if (has("hw.optional.arm.FEAT_DotProd")) names.emplace_back("neon_dotprod");
  if (has("hw.optional.arm.FEAT_I8MM")) names.emplace_back("neon_i8mm");
  return names;
}

#else

std::vector<std::string> detect() { return {}; }

#endif

}  // namespace

std::vector<std::string> cpu_features() { return detect(); }

}  // namespace smollm2
