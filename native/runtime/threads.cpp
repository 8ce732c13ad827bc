#include "runtime/threads.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>

#include "runtime/affinity.h"
#include "runtime/gate.h"
#include "runtime/process.h"

namespace smollm2 {
namespace {

using Nanoseconds = std::int64_t;

// A wait that is longer than this ends asleep: at a barrier, and between runs. Waking somebody up
// takes about 50 us, of which 25 are the caller's, and a step of decode follows the last one after
// 100 to 200.
constexpr Nanoseconds kLongestSpin = 50'000;
constexpr Nanoseconds kLongestPause = 300'000;
// With fewer cores than workers, whoever spins keeps another from working.
constexpr Nanoseconds kCrowdedSpin = 1'000;

Nanoseconds now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Two lines, since neighbouring lines are fetched in pairs.
template <typename T>
struct alignas(128) Alone {
  T value{};
};

// Returns once the gate's count is no longer `old`: spins for a time, and then sleeps.
void wait(Gate& gate, std::uint32_t old, Nanoseconds spin) {
  const Nanoseconds end = now() + spin;
  do {
    for (int i = 0; i < 16 && gate.count() == old; ++i) relax();
  } while (gate.count() == old && now() < end);
  while (gate.count() == old) gate.sleep(old);
}

// Thrown out of barrier() where another worker has failed.
struct Abandoned {};

}  // namespace

struct Threads::Team {
  Alone<Gate> started;                        // runs begun
  Alone<std::atomic<std::uint32_t>> arrived;  // workers at the barrier
  Alone<Gate> epoch;                          // barriers passed
  Alone<Gate> finished;                       // workers through with this run, but for worker 0
  Alone<std::atomic<bool>> failed;
  const std::function<void(int)>* work = nullptr;
  bool stopping = false;
  bool crowded = false;  // more workers than cores
  std::mutex mutex;      // guards error
  std::exception_ptr error;
  std::vector<Alone<std::atomic<int>>> cores;  // where each worker was last seen
  std::vector<std::thread> threads;

  // Waits until the gate's count is no longer `old`; asleep if another worker is on the same core,
  // which it can do nothing on meanwhile.
  void wait(int worker, Gate& gate, std::uint32_t old) {
    if (gate.count() == old) {
      const Nanoseconds longest = &gate == &epoch.value ? kLongestSpin : kLongestPause;
      smollm2::wait(gate, old, crowded ? kCrowdedSpin : shares_core(worker) ? 0 : longest);
    }
  }

  bool shares_core(int worker) {
    const auto self = static_cast<std::size_t>(worker);
    const int core = current_core();
    cores[self].value.store(core, std::memory_order_relaxed);
    if (core < 0) return false;
    for (std::size_t other = 0; other < cores.size(); ++other) {
      if (other != self && cores[other].value.load(std::memory_order_relaxed) == core) return true;
    }
    return false;
  }

  void attempt(int worker) {
    cores[static_cast<std::size_t>(worker)].value.store(current_core(), std::memory_order_relaxed);
    try {
      (*work)(worker);
    } catch (const Abandoned&) {
      return;
    } catch (...) {
      {
        const std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
      }
      failed.value.store(true, std::memory_order_release);
      epoch.value.open();
    }
  }

  void live(int worker) {
    for (std::uint32_t seen = 0;; ++seen) {
      wait(worker, started.value, seen);
      if (stopping) return;
      attempt(worker);
      finished.value.open();
    }
  }

  void begin() { started.value.open(); }

  void stop() {
    stopping = true;
    begin();
    for (std::thread& thread : threads) thread.join();
  }

  // Returns once all but worker 0 are through.
  void finish() {
    const auto others = static_cast<std::uint32_t>(cores.size() - 1);
    while (true) {
      const std::uint32_t seen = finished.value.count();
      if (seen == others) return;
      wait(0, finished.value, seen);
    }
  }
};

Threads::Threads(int count) : count_(std::max(count, 1)), owner_(process_id()) { start(); }

void Threads::start() {
  if (count_ == 1) return;
  team_ = std::make_unique<Team>();
  team_->crowded = count_ > available_cores();
  team_->cores = std::vector<Alone<std::atomic<int>>>(static_cast<std::size_t>(count_));
  try {
    for (int worker = 1; worker < count_; ++worker) {
      team_->threads.emplace_back([team = team_.get(), worker] { team->live(worker); });
    }
  } catch (const std::system_error& error) {
    team_->stop();
    team_.reset();
    throw std::runtime_error("the system cannot start " + std::to_string(count_) +
                             " threads (" + error.code().message() + "): take fewer");
  }
}

Threads::~Threads() {
  if (!team_) return;
  if (owner_ != process_id()) {
    static_cast<void>(team_.release());  // its threads are the parent's: there is none to join
    return;
  }
  team_->stop();
}

void Threads::run(const std::function<void(int)>& work) {
  if (count_ == 1) return work(0);
  if (owner_ != process_id()) {
    static_cast<void>(team_.release());
    start();
    owner_ = process_id();
  }
  team_->work = &work;
  team_->error = nullptr;
  team_->failed.value.store(false, std::memory_order_relaxed);
  team_->arrived.value.store(0, std::memory_order_relaxed);
  team_->finished.value.reset();
  team_->begin();
  team_->attempt(0);
  team_->finish();
  if (team_->error) std::rethrow_exception(team_->error);
}

void Threads::barrier(int worker) {
  if (count_ == 1) return;
  Team& team = *team_;
  const std::uint32_t epoch = team.epoch.value.count();
  if (team.failed.value.load(std::memory_order_acquire)) throw Abandoned{};
  if (team.arrived.value.fetch_add(1, std::memory_order_acq_rel) + 1 ==
      static_cast<std::uint32_t>(count_)) {
    team.arrived.value.store(0, std::memory_order_relaxed);
    team.epoch.value.open();
  } else {
    team.wait(worker, team.epoch.value, epoch);
  }
  if (team.failed.value.load(std::memory_order_acquire)) throw Abandoned{};
}

}  // namespace smollm2
