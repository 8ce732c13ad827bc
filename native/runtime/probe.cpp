#include "runtime/probe.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "runtime/memory.h"
#include "runtime/threads.h"

namespace smollm2 {
namespace {

constexpr std::size_t kBytes = std::size_t{256} << 20;  // more than any cache
constexpr int kRepeats = 7;
constexpr std::int64_t kRounds = 1'000'000;

void read_plain(const std::uint8_t* p, std::size_t bytes) {
  std::uint64_t total = 0;
  for (std::size_t at = 0; at + 8 <= bytes; at += 8) {
    std::uint64_t word;
    std::memcpy(&word, p + at, sizeof word);
    total += word;
  }
  volatile std::uint64_t kept = total;
  static_cast<void>(kept);
}

#define SMOLLM2_EACH(f) f("2") f("3") f("4") f("5") f("6") f("7") f("8") f("9") f("10") f("11")

// read: reads all of it and throws it away. dots: does nothing but multiply-adds, and says how
// many; 0 where it cannot.
#if defined(SMOLLM2_X86) && defined(__GNUC__)
#define SMOLLM2_DOT_512(r) "vpdpbusd %%zmm0, %%zmm1, %%zmm" r "\n"
#define SMOLLM2_DOT_256(r) "vpmaddubsw %%ymm0, %%ymm1, %%ymm" r "\n"
#define SMOLLM2_CHANGED \
  "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11"

__attribute__((target("avx2"))) void read_fast(const std::uint8_t* p, std::size_t bytes) {
  for (const std::uint8_t* end = p + bytes / 256 * 256; p < end; p += 256) {
    __asm__ volatile(
        "vmovdqu (%0), %%ymm0\n vmovdqu 32(%0), %%ymm1\n"
        "vmovdqu 64(%0), %%ymm2\n vmovdqu 96(%0), %%ymm3\n"
        "vmovdqu 128(%0), %%ymm0\n vmovdqu 160(%0), %%ymm1\n"
        "vmovdqu 192(%0), %%ymm2\n vmovdqu 224(%0), %%ymm3\n"
        :
        : "r"(p)
        : "xmm0", "xmm1", "xmm2", "xmm3", "memory");
  }
}

__attribute__((target("avx512f"))) double dots_avx512() {
  for (std::int64_t i = 0; i < kRounds; ++i) {
    __asm__ volatile(SMOLLM2_EACH(SMOLLM2_DOT_512) : : : SMOLLM2_CHANGED);
  }
  return 10.0 * 64 * kRounds;
}

__attribute__((target("avx2"))) double dots_avx2() {
  for (std::int64_t i = 0; i < kRounds; ++i) {
    __asm__ volatile(SMOLLM2_EACH(SMOLLM2_DOT_256) : : : SMOLLM2_CHANGED);
  }
  return 10.0 * 32 * kRounds;
}

double dots(const std::string& isa) {
  if (isa == "avx512") return dots_avx512();
  return isa == "avx2" || isa == "avxvnni" ? dots_avx2() : 0;
}
#elif defined(SMOLLM2_NEON) && defined(__GNUC__)
#define SMOLLM2_DOT_128(r) "sdot v" r ".4s, v0.16b, v1.16b\n"

void read_fast(const std::uint8_t* p, std::size_t bytes) {
  for (const std::uint8_t* end = p + bytes / 256 * 256; p < end; p += 256) {
    __asm__ volatile(
        "ldp q0, q1, [%0]\n ldp q2, q3, [%0, #32]\n"
        "ldp q0, q1, [%0, #64]\n ldp q2, q3, [%0, #96]\n"
        "ldp q0, q1, [%0, #128]\n ldp q2, q3, [%0, #160]\n"
        "ldp q0, q1, [%0, #192]\n ldp q2, q3, [%0, #224]\n"
        :
        : "r"(p)
        : "v0", "v1", "v2", "v3", "memory");
  }
}

__attribute__((target("arch=armv8.2-a+dotprod"))) double dots_neon() {
  for (std::int64_t i = 0; i < kRounds; ++i) {
    __asm__ volatile(SMOLLM2_EACH(SMOLLM2_DOT_128)
                     :
                     :
                     : "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11");
  }
  return 10.0 * 16 * kRounds;
}

double dots(const std::string& isa) {
  return isa == "neon_dotprod" || isa == "neon_i8mm" ? dots_neon() : 0;
}
#else
void read_fast(const std::uint8_t* p, std::size_t bytes) { read_plain(p, bytes); }

double dots(const std::string&) { return 0; }
#endif

void read(const std::string& isa, const std::uint8_t* p, std::size_t bytes) {
  isa == "scalar" ? read_plain(p, bytes) : read_fast(p, bytes);
}

// The median of what `repeats` calls take, in seconds.
template <typename F>
double seconds(F f) {
  std::vector<double> all;
  for (int i = 0; i < kRepeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    f();
    all.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::nth_element(all.begin(), all.begin() + kRepeats / 2, all.end());
  return all[kRepeats / 2];
}

}  // namespace

Limits probe(int threads) {
  const std::string isa = kernels().name;
  Threads team(threads);
  const Memory memory(kBytes, Memory::Pages::huge);
  const std::size_t share = kBytes / static_cast<std::size_t>(team.count()) / 256 * 256;
  const auto mine = [&](int worker) {
    return memory.data() + share * static_cast<std::size_t>(worker);
  };
  team.run([&](int worker) { std::memset(mine(worker), 1, share); });
  const double reading =
      seconds([&] { team.run([&](int worker) { read(isa, mine(worker), share); }); });
  std::vector<double> done(static_cast<std::size_t>(team.count()));
  const double multiplying = seconds(
      [&] { team.run([&](int worker) { done[static_cast<std::size_t>(worker)] = dots(isa); }); });
  const auto bytes = static_cast<double>(share) * team.count();
  return {bytes / reading / 1e9, done[0] * team.count() / multiplying / 1e9};
}

}  // namespace smollm2
