// Where the time of forward passes goes, as worker 0 sees it.
#pragma once

#include <array>
#include <chrono>

namespace smollm2 {

class Profile {
 public:
  enum Phase { embed, qkv, store, attention, output, gate_up, down, head, phases };
  static constexpr std::array<const char*, phases> names{"embed",  "qkv",     "store", "attention",
                                                         "output", "gate_up", "down",  "head"};

  // Nothing is measured until this is set.
  bool enabled = false;
  // Seconds of work, and of waiting for the other workers after it.
  std::array<double, phases> work{};
  std::array<double, phases> wait{};

  void begin() {
    if (enabled) last_ = Clock::now();
  }
  void end_work(Phase phase) { add(work[last_phase_ = phase]); }
  // Of a wait after the last work.
  void end_wait() { add(wait[last_phase_]); }

 private:
  using Clock = std::chrono::steady_clock;

  void add(double& seconds) {
    if (!enabled) return;
    const Clock::time_point now = Clock::now();
    seconds += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

  Clock::time_point last_{};
  Phase last_phase_ = embed;
};

}  // namespace smollm2
