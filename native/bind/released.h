// Computing without the interpreter's lock, which a thread may ask back while the interpreter ends.
#pragma once

#include <nanobind/nanobind.h>

namespace smollm2 {

// Gives up the lock for as long as it lives.
//
// A thread that asks for the lock once the interpreter ends is unwound by it, which no C++ function
// on its stack survives. So from the moment that `stay_outside` tells, whoever comes back stays
// here until the process is gone; the thread that ends the interpreter may pass.
class Released {
 public:
  Released();
  ~Released();
  Released(const Released&) = delete;
  Released& operator=(const Released&) = delete;

 private:
  PyThreadState* state_;
};

// To be called by `atexit`.
void stay_outside();

}  // namespace smollm2
