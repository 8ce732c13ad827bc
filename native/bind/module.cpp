#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.h"
#include "bind/released.h"
#include "cpu/features.h"

NB_MODULE(_native, m) {
  m.doc() = "The compiled part of smollm2.";
  // A thread that computes when the process ends leaves its objects behind.
  nanobind::set_leak_warnings(false);
  nanobind::module_::import_("atexit").attr("register")(
      nanobind::cpp_function(&smollm2::stay_outside));
  m.def("cpu_features", &smollm2::cpu_features,
        "Names of the instruction sets that this CPU and operating system support.");
  smollm2::bind_kernels(m);
  smollm2::bind_pack(m);
  smollm2::bind_attention(m);
  smollm2::bind_engine(m);
  smollm2::bind_runtime(m);
}
