// The little that is asked of the operating system and the CPU between instructions.
#pragma once

#if defined(_WIN32)
#include <process.h>
#else
#include <sched.h>
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

// The core that this thread is running on; -1 where the system does not say.
inline int current_core() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
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

}  // namespace smollm2
