// A team of threads that lives as long as its owner, and does one thing at a time together.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace smollm2 {

// Waiting spins for a bounded time and then sleeps, so that a busy machine gets its cores back.
//
// After fork() the child has none of the threads: a run starts new ones there. One run at a time:
// the owner sees to that. If some worker throws, the first exception is thrown on.
class Threads {
 public:
  // `count` workers, the caller of a run among them; at least one.
  explicit Threads(int count);
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  int count() const { return count_; }

  // Calls work(worker) for each worker 0 ... count - 1, as worker 0 on this thread, and returns
  // once all are through.
  void run(const std::function<void(int)>& work);

  // Calls work(worker, phase) for phases 0 ... phases - 1. A phase begins once all are through the
  // last one who took part in it, which is not always everybody: nobody waits for a worker that has
  // gone to sleep, or that has no core. Such a one joins in the phase that it finds when it is
  // back. So whoever takes part must do all of a phase, and each must be able to begin with it.
  void run(int phases, const std::function<void(int, int)>& work);

 private:
  struct Team;
  using Work = std::function<void(int, int)>;

  void start();
  void run(int phases, const Work& work, bool everyone);

  int count_;
  long owner_;                  // the process that started the team
  std::unique_ptr<Team> team_;  // none where there is one worker only
};

}  // namespace smollm2
