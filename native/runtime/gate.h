// A counter that threads wait at until it moves on.
#pragma once

#include <atomic>
#include <cstdint>

namespace smollm2 {

// A thread that sleeps here gives its core away at once. std::atomic::wait would yield a few times
// before, and Linux counts a yield as a whole turn taken.
class Gate {
 public:
  std::uint32_t count() const { return count_.load(std::memory_order_acquire); }

  // Moves on, and wakes whoever sleeps.
  void open();
  // Back to nothing. Nobody may be waiting.
  void reset() { count_.store(0, std::memory_order_relaxed); }
  // Sleeps until the count is no longer `old`; it may wake up before.
  void sleep(std::uint32_t old);

 private:
  std::atomic<std::uint32_t> count_{0};
  std::atomic<std::uint32_t> sleepers_{0};
};

}  // namespace smollm2
