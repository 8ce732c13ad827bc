// The little that is asked of the operating system and the CPU between instructions.
#pragma once

#if defined(_WIN32)
#include <process.h>
#else
#include <unistd.h>
#endif

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace smollm2 {

// The number of this process: another one after fork().
inline long process_id() {
#if defined(_WIN32)
  return _getpid();
#else
  return getpid();
#endif
}

// Tells the CPU that this thread only waits.
inline void relax() {
#if defined(__x86_64__) || defined(_M_X64)
  _mm_pause();
#elif defined(__aarch64__) && defined(__GNUC__)
  __asm__ volatile("yield");
#endif
}

// Asks for a line of memory that will be read soon.
inline void prefetch_line([[maybe_unused]] const void* p) {
#if defined(__GNUC__)
  __builtin_prefetch(p, 0, 2);
#endif
}

}  // namespace smollm2
