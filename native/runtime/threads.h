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
// After fork() the child has none of the threads: run() starts new ones there. One run() at a
// time: the owner sees to that.
class Threads {
 public:
  // `count` workers, the caller of run() among them; at least one.
  explicit Threads(int count);
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  int count() const { return count_; }

  // Calls work(worker) for each worker 0 ... count - 1, as worker 0 on this thread, and returns
  // once all are through. If some threw, the first exception is thrown on here.
  void run(const std::function<void(int)>& work);

  // Called by all workers from inside run(): returns once all of them have come here. Throws
  // (something that run() swallows) where another worker has failed.
  void barrier(int worker);

 private:
  struct Team;

  void start();

  int count_;
  long owner_;                  // the process that started the team
  std::unique_ptr<Team> team_;  // none where there is one worker only
};

}  // namespace smollm2
