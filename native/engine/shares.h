// Dealing work out: each worker begins with its own share, and helps the others when it is through.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>

#include "engine/split.h"

namespace smollm2 {

// Workers are rarely equally fast: memory serves one core sooner than another, and on a busy
// machine one of them may not be running at all. Which worker computes something does not change
// its bits.
//
// All workers go through the same rounds in the same order, with a barrier between a round and the
// next but one.
class Shares {
 public:
  explicit Shares(int workers) : taken_(new Taken[static_cast<std::size_t>(workers * kSets)]) {}

  // Before the first round. Nobody may be in one.
  void begin(int workers) {
    for (int i = 0; i < workers * kSets; ++i) taken_[i].count.store(0, std::memory_order_relaxed);
  }

  // Calls f(run, more) for runs of n things, until all of them have been taken by some worker: two
  // thirds of what an owner still has at a time. So runs are long, for memory is read fastest in
  // order, and short in the end, when nobody should have much left that another waits for. `more`
  // says whether what comes after a run is likely to be this worker's next one.
  template <typename F>
  void deal(Seat seat, int round, int n, F f) {
    taken(round + 2, seat.worker, seat.count).store(0, std::memory_order_relaxed);
    for (int k = 0; k < seat.count; ++k) {
      const Seat owner{(seat.worker + k) % seat.count, seat.count};
      const Range range = owner.share(n);
      std::atomic<int>& count = taken(round, owner.worker, seat.count);
      int before = count.load(std::memory_order_relaxed);
      while (before < range.size()) {
        const int after = before + (2 * (range.size() - before) + 2) / 3;
        if (!count.compare_exchange_weak(before, after, std::memory_order_relaxed)) continue;
        f(Range{range.first + before, range.first + after}, after < range.size());
        before = count.load(std::memory_order_relaxed);
      }
    }
  }

 private:
  static constexpr int kSets = 4;

  struct alignas(128) Taken {
    std::atomic<int> count{0};
  };

  std::atomic<int>& taken(int round, int worker, int workers) {
    return taken_[static_cast<std::size_t>(round % kSets * workers + worker)].count;
  }

  std::unique_ptr<Taken[]> taken_;
};

}  // namespace smollm2
