// Dealing work out: each worker begins with its own share, and helps the others when it is through.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "engine/split.h"

namespace smollm2 {

// Workers are rarely equally fast: memory serves one core sooner than another, and on a busy
// machine one of them may not be running at all. Which worker computes something does not change
// its bits.
//
// Workers go through rounds 0, 1, ... of which some may miss any number; none begins with a round
// before all that take part in the last one are through.
class Shares {
 public:
  explicit Shares(int workers) : taken_(new Taken[static_cast<std::size_t>(workers)]) {}

  // Before round 0. Nobody may be in one.
  void begin(int workers) {
    for (int i = 0; i < workers; ++i) taken_[i].word.store(0, std::memory_order_relaxed);
  }

  // Calls f(run, more) for runs of n things, until all of them have been taken by some worker: two
  // thirds of what an owner still has at a time, `most` at most. So runs are long, for memory is
  // read fastest in order, and short in the end, when nobody should have much left that another
  // waits for. `more` says whether what comes after a run is likely to be this worker's next one.
  template <typename F>
  void deal(Seat seat, int round, int n, int most, F f) {
    const std::uint64_t tag = static_cast<std::uint64_t>(round) + 1;
    for (int k = 0; k < seat.count; ++k) {
      const Seat owner{(seat.worker + k) % seat.count, seat.count};
      const Range range = owner.share(n);
      std::atomic<std::uint64_t>& taken = taken_[owner.worker].word;
      std::uint64_t word = taken.load(std::memory_order_relaxed);
      while (true) {
        const int before = word >> 32 == tag ? static_cast<int>(word & UINT32_MAX) : 0;
        if (before == range.size()) break;
        const int after = before + std::min(most, (2 * (range.size() - before) + 2) / 3);
        if (!taken.compare_exchange_weak(word, tag << 32 | static_cast<std::uint64_t>(after),
                                         std::memory_order_relaxed)) {
          continue;
        }
        f(Range{range.first + before, range.first + after}, after < range.size());
        word = taken.load(std::memory_order_relaxed);
      }
    }
  }

 private:
  // How much of a worker's share has been taken, below the number of the round and one.
  struct alignas(128) Taken {
    std::atomic<std::uint64_t> word{0};
  };

  std::unique_ptr<Taken[]> taken_;
};

}  // namespace smollm2
