#include "runtime/gate.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#endif

namespace smollm2 {
namespace {

#if defined(__linux__)
static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));

void wait(std::atomic<std::uint32_t>& count, std::uint32_t old) {
  syscall(SYS_futex, &count, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
}
void wake(std::atomic<std::uint32_t>& count) {
  syscall(SYS_futex, &count, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}
#else
void wait(std::atomic<std::uint32_t>& count, std::uint32_t old) { count.wait(old); }
void wake(std::atomic<std::uint32_t>& count) { count.notify_all(); }
#endif

}  // namespace

// Either this sees the sleeper, or the sleeper sees the new count: both are sequentially
// consistent.
void Gate::open() {
  count_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) wake(count_);
}

void Gate::sleep(std::uint32_t old) {
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  if (count_.load(std::memory_order_seq_cst) == old) wait(count_, old);
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace smollm2
