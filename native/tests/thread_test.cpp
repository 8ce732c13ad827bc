// Teams of threads: phases in order, who fails, and several at once.
#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>

#include "runtime/threads.h"
#include "tests/check.h"

namespace smollm2::test {
namespace {

// What a phase writes is there for whoever takes part in the next one.
void phases_follow_each_other() {
  for (const int count : {1, 2, 3, 5}) {
    Threads team(count);
    for (int round = 0; round < 20; ++round) {
      std::vector<int> steps(static_cast<std::size_t>(count), -1);  // each worker writes its own
      std::vector<int> seen(static_cast<std::size_t>(count), -1);
      std::atomic<int> last = -1;
      team.run(50, [&](int worker, int phase) {
        const int before = last.exchange(phase);
        expect(before == phase || before == phase - 1, "a worker went ahead");
        const auto self = static_cast<std::size_t>(worker);
        if (phase % 2 == 0) {
          steps[self] = phase;
        } else {
          for (const int step : steps) seen[self] = std::max(seen[self], step);
          expect(seen[self] == phase - 1, "what the last phase wrote is not there");
        }
      });
      expect(last == 49, "not all phases were run");
    }
  }
}

void a_failure_ends_the_run_alone() {
  for (const int count : {1, 2, 4}) {
    Threads team(count);
    for (int failing = 0; failing < count; ++failing) {
      std::string said;
      try {
        team.run([&](int worker) {
          if (worker == failing) throw Failed(std::to_string(worker));
        });
      } catch (const Failed& error) {
        said = error.what();
      }
      expect(said == std::to_string(failing), "another failure: " + said);
      std::atomic<int> ran = 0;
      team.run([&](int) { ++ran; });
      expect(ran == count, "the team is not whole again");
    }
  }
}

// Each caller has a team of its own, with more workers than there are cores.
void teams_do_not_disturb_each_other() {
  std::vector<std::thread> callers;
  std::atomic<int> total = 0;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&] {
      Threads team(4);
      for (int round = 0; round < 50; ++round) {
        team.run([&](int) { ++total; });
        team.run(3, [](int, int) {});
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  expect(total == 3 * 4 * 50, "some work was not done");
}

void teams_come_and_go() {
  for (int i = 0; i < 50; ++i) {
    Threads team(1 + i % 4);
    if (i % 3 == 0) continue;  // never run
    team.run([](int) {});
  }
}

}  // namespace

Tests thread_tests() {
  return {
      {"threads: phases follow each other", phases_follow_each_other},
      {"threads: a failure ends the run alone", a_failure_ends_the_run_alone},
      {"threads: teams do not disturb each other", teams_do_not_disturb_each_other},
      {"threads: teams come and go", teams_come_and_go},
  };
}

}  // namespace smollm2::test
