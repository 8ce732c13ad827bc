#include "runtime/threads.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>

#include "runtime/affinity.h"
#include "runtime/gate.h"
#include "runtime/process.h"

namespace smollm2 {
namespace {

using Nanoseconds = std::int64_t;

// A wait that is longer than this ends asleep: after a phase, and between runs. Waking somebody up
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

// Whether `done` holds within that time.
template <typename F>
bool spin(Nanoseconds time, F done) {
  const Nanoseconds end = now() + time;
  do {
    for (int i = 0; i < 16; ++i) {
      if (done()) return true;
      relax();
    }
  } while (now() < end);
  return false;
}

// What a team is at, in one word. Phases are counted through all runs; there are members while a
// run is open, and a phase is over when as many have arrived.
struct State {
  static constexpr std::uint64_t kArrived = 1, kMember = 1 << 12, kEveryone = 1 << 24;

  std::uint64_t word;

  std::uint32_t phase() const { return static_cast<std::uint32_t>(word >> 32); }
  std::uint64_t members() const { return word / kMember % 4096; }
  std::uint64_t arrived() const { return word % kMember; }
  // Nobody joins or leaves: all workers are members from the beginning.
  bool everyone() const { return (word & kEveryone) != 0; }
  // The next phase, with the same members, or with none: the run is over.
  State next(bool over) const {
    const std::uint64_t number = std::uint64_t{phase() + 1} << 32;
    return {over ? number : number | (word & kEveryone) | members() * kMember};
  }
};

}  // namespace

struct Threads::Team {
  Alone<std::atomic<std::uint64_t>> state;
  Alone<Gate> moved;  // opened after each change of the phase
  Alone<std::atomic<bool>> failed;
  const Work* work = nullptr;
  std::uint32_t first = 0, end = 0;  // phases of this run
  std::atomic<bool> stopping = false;
  bool crowded = false;  // more workers than cores
  std::mutex mutex;      // guards error
  std::exception_ptr error;
  std::vector<Alone<std::atomic<int>>> cores;  // where each worker was last seen
  std::vector<std::thread> threads;

  State now_at() const { return {state.value.load(std::memory_order_acquire)}; }

  // Another worker on the same core can do nothing while this one spins.
  Nanoseconds patience(int worker, Nanoseconds longest) {
    return crowded ? kCrowdedSpin : shares_core(worker) ? 0 : longest;
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

  // Opens a run; nobody is in one.
  void open(bool everyone) {
    first = now_at().phase() + 1;
    const std::uint64_t number = std::uint64_t{first} << 32;
    state.value.store(everyone ? number | State::kEveryone | cores.size() * State::kMember
                               : number | State::kMember,
                      std::memory_order_release);
    moved.value.open();
  }

  // Becomes a member of the run that is open, if there is one: the phase that it is at.
  std::optional<std::uint32_t> join() {
    State at = now_at();
    while (at.members() > 0) {
      if (at.everyone() || state.value.compare_exchange_weak(at.word, at.word + State::kMember,
                                                             std::memory_order_acq_rel)) {
        return at.phase();
      }
    }
    return std::nullopt;
  }

  // Works from a phase on, as a member, until the run is over or a wait was long.
  void take_part(int worker, std::uint32_t phase) {
    do {
      cores[static_cast<std::size_t>(worker)].value.store(current_core(),
                                                          std::memory_order_relaxed);
      try {
        (*work)(worker, static_cast<int>(phase - first));
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
        failed.value.store(true, std::memory_order_relaxed);
      }
    } while (arrive(worker, phase++));
  }

  // Through with a phase: whether this worker is a member of the next one.
  bool arrive(int worker, std::uint32_t phase) {
    State at = now_at();
    while (true) {
      const bool last = at.arrived() + 1 == at.members();
      const bool over = phase + 1 == end || failed.value.load(std::memory_order_relaxed);
      const State next = last ? at.next(over) : State{at.word + State::kArrived};
      if (!state.value.compare_exchange_weak(at.word, next.word, std::memory_order_acq_rel)) {
        continue;
      }
      if (!last) return wait(worker, phase);
      moved.value.open();
      return !over;
    }
  }

  // After it has arrived.
  bool wait(int worker, std::uint32_t phase) {
    const auto moved_on = [&] { return now_at().phase() != phase; };
    if (!moved_on() && !spin(patience(worker, kLongestSpin), moved_on)) {
      const bool left = leave(phase);
      sleep(moved_on);
      if (left) return false;
    }
    const State at = now_at();
    return at.phase() == phase + 1 && at.members() > 0;
  }

  // Leaves the members, unless the phase is over meanwhile or all are needed.
  bool leave(std::uint32_t phase) {
    State at = now_at();
    while (at.phase() == phase && !at.everyone()) {
      if (state.value.compare_exchange_weak(at.word, at.word - State::kMember - State::kArrived,
                                            std::memory_order_acq_rel)) {
        return true;
      }
    }
    return false;
  }

  template <typename F>
  void sleep(F done) {
    while (true) {
      const std::uint32_t seen = moved.value.count();
      if (done()) return;
      moved.value.sleep(seen);
    }
  }

  void stop() {
    stopping.store(true, std::memory_order_release);
    moved.value.open();
    for (std::thread& thread : threads) thread.join();
  }

  void live(int worker) {
    while (true) {
      const std::uint32_t seen = moved.value.count();
      if (stopping.load(std::memory_order_acquire)) return;
      if (const auto phase = join()) {
        take_part(worker, *phase);
      } else {
        const auto moved_on = [&] { return moved.value.count() != seen; };
        if (!spin(patience(worker, kLongestPause), moved_on)) sleep(moved_on);
      }
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
    throw std::runtime_error("the system cannot start " + std::to_string(count_) + " threads (" +
                             error.code().message() + "): take fewer");
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
  run(1, [&](int worker, int) { work(worker); }, true);
}

void Threads::run(int phases, const std::function<void(int, int)>& work) {
  run(phases, work, false);
}

void Threads::run(int phases, const Work& work, bool everyone) {
  if (count_ == 1) {
    for (int phase = 0; phase < phases; ++phase) work(0, phase);
    return;
  }
  if (phases < 1) return;
  if (owner_ != process_id()) {
    static_cast<void>(team_.release());
    start();
    owner_ = process_id();
  }
  Team& team = *team_;
  team.work = &work;
  team.error = nullptr;
  team.failed.value.store(false, std::memory_order_relaxed);
  team.end = team.now_at().phase() + 1 + static_cast<std::uint32_t>(phases);
  team.open(everyone);
  team.take_part(0, team.first);
  while (const auto phase = team.join()) team.take_part(0, *phase);
  if (team.error) std::rethrow_exception(team.error);
}

}  // namespace smollm2
