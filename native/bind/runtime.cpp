// Threads, memory, and the limits of the machine, for Python.
#include <nanobind/stl/function.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <functional>
#include <string>
#include <vector>

#include "bind/arrays.h"
#include "bind/bind.h"
#include "bind/released.h"
#include "runtime/affinity.h"
#include "runtime/memory.h"
#include "runtime/probe.h"
#include "runtime/threads.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace smollm2 {
namespace {

Bytes new_memory(std::size_t bytes) {
  auto* memory = new Memory(bytes, Memory::Pages::huge);
  const nb::capsule owner(memory, [](void* p) noexcept { delete static_cast<Memory*>(p); });
  return Bytes(memory->data(), {bytes}, owner);
}

void bind_threads(nb::module_& m) {
  nb::class_<Threads>(m, "Threads", "A team of threads, for tests.")
      .def(nb::init<int>(), "count"_a)
      .def_prop_ro("count", &Threads::count)
      .def(
          "run",
          [](Threads& team, const std::function<void(int)>& work) {
            const Released released;
            team.run([&](int worker) {
              const nb::gil_scoped_acquire acquire;
              work(worker);
            });
          },
          "work"_a, "Calls work(worker) in each thread; throws on what one of them threw.")
      .def(
          "run_phases",
          [](Threads& team, int phases, const std::function<void(int, int)>& work) {
            const nb::gil_scoped_release release;
            team.run(phases, [&](int worker, int phase) {
              const nb::gil_scoped_acquire acquire;
              work(worker, phase);
            });
          },
          "phases"_a, "work"_a, "Calls work(worker, phase) in each thread that takes part.");
}

}  // namespace

void bind_runtime(nb::module_& m) {
  bind_threads(m);
  m.def("memory", &new_memory, "size"_a, "Zeroed bytes in huge pages, where there are any.");
  m.def(
      "cores",
      [](const std::vector<int>& cpus, const std::string& root) { return cores_for(cpus, root); },
      "cpus"_a, "root"_a, "Threads to use on these CPUs, by the system's files below `root`.");
  m.def("available_cores", &available_cores,
        "Physical cores that this process may use, within the quota of its cgroup.");
  m.def(
      "probe",
      [](int threads) {
        const Released released;
        return probe(threads > 0 ? threads : available_cores());
      },
      "threads"_a = 0, "What the machine reads and multiplies at most, by all threads together.");
  nb::class_<Limits>(m, "Limits", "What a machine can do at most.")
      .def_ro("read_gb_s", &Limits::read_gb_s)
      .def_ro("dot_gmac_s", &Limits::dot_gmac_s);
}

}  // namespace smollm2
