// Teams of threads: who meets at barriers, who fails, and several at once.
#include <atomic>
#include <mutex>
#include <thread>

#include "runtime/threads.h"
#include "tests/check.h"

namespace smollm2::test {
namespace {

void all_meet_at_each_barrier() {
  for (const int count : {1, 2, 3, 5}) {
    Threads team(count);
    std::vector<int> steps(static_cast<std::size_t>(count));  // each worker writes its own
    for (int round = 0; round < 20; ++round) {
      team.run([&](int worker) {
        for (int step = 1; step <= 10; ++step) {
          steps[static_cast<std::size_t>(worker)] = step;
          team.barrier(worker);
          for (const int other : steps) expect(other == step, "a worker went ahead");
          team.barrier(worker);
        }
      });
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
          team.barrier(worker);
          expect(false, "nobody passes");
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
        team.run([&](int worker) {
          ++total;
          team.barrier(worker);
        });
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
      {"threads: all meet at each barrier", all_meet_at_each_barrier},
      {"threads: a failure ends the run alone", a_failure_ends_the_run_alone},
      {"threads: teams do not disturb each other", teams_do_not_disturb_each_other},
      {"threads: teams come and go", teams_come_and_go},
  };
}

}  // namespace smollm2::test
