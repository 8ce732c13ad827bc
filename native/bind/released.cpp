#include "bind/released.h"

#include <atomic>
#include <chrono>
#include <thread>

namespace smollm2 {
namespace {

std::atomic<int> returning{0};  // threads between their work and the lock
std::atomic<bool> ending{false};
std::thread::id ender;  // written before `ending`

}  // namespace

Released::Released() : state_(PyEval_SaveThread()) {}

Released::~Released() {
  ++returning;
  if (ending && std::this_thread::get_id() != ender) {
    --returning;
    while (true) std::this_thread::sleep_for(std::chrono::hours(1));
  }
  PyEval_RestoreThread(state_);
  --returning;
}

// Those who are on their way get the lock first; that the wait has an end is for a forked child,
// where some of the threads that were counted do not exist.
void stay_outside() {
  ender = std::this_thread::get_id();
  ending = true;
  PyThreadState* state = PyEval_SaveThread();
  for (int waited = 0; returning > 0 && waited < 1000; ++waited) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  PyEval_RestoreThread(state);
}

}  // namespace smollm2
