#include "runtime/affinity.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <limits>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

#if defined(__linux__)
#include <sched.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace smollm2 {
namespace {

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

double number_of(const std::string& path) {
  double value = std::numeric_limits<double>::quiet_NaN();
  std::istringstream(text_of(path)) >> value;
  return value;
}

// CPUs of a quota and a period in microseconds; no limit unless both are positive.
double quota(double time, double period) {
  return time > 0 && period > 0 ? time / period : std::numeric_limits<double>::infinity();
}

// The limit of a cgroup's folder: version 2 says "max 100000" or "150000 100000", version 1 has a
// file for each number and -1 for none.
double limit_of(const std::string& folder) {
  double time = 0, period = 0;
  std::istringstream second(text_of(folder + "/cpu.max"));
  if (second >> time >> period) return quota(time, period);
  return quota(number_of(folder + "/cpu.cfs_quota_us"), number_of(folder + "/cpu.cfs_period_us"));
}

// The tightest limit of a cgroup and all those around it.
double limit_up(const std::string& mount, std::string path) {
  double limit = limit_of(mount);
  while (path.size() > 1) {
    limit = std::min(limit, limit_of(mount + path));
    path.resize(path.find_last_of('/'));
  }
  return limit;
}

// Lines of /proc/self/cgroup are "number:controllers:path", without controllers in version 2.
double cgroup_limit(const std::string& root) {
  double limit = std::numeric_limits<double>::infinity();
  std::istringstream lines(text_of(root + "/proc/self/cgroup"));
  for (std::string line; std::getline(lines, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    std::string controllers = line.substr(first, second - first + 1);
    controllers.front() = controllers.back() = ',';
    const std::string path = line.substr(second + 1);
    if (controllers == ",,") {
      limit = std::min(limit, limit_up(root + "/sys/fs/cgroup", path));
    } else if (controllers.find(",cpu,") != std::string::npos) {
      limit = std::min(limit, limit_up(root + "/sys/fs/cgroup/cpu", path));
    }
  }
  return limit;
}

// CPUs with the same package and core are threads of one core; unknown ones count by themselves.
int physical_cores(const std::vector<int>& cpus, const std::string& root) {
  std::set<std::pair<double, double>> cores;
  int unknown = 0;
  for (const int cpu : cpus) {
    const std::string folder =
        root + "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
    const double package = number_of(folder + "physical_package_id");
    const double core = number_of(folder + "core_id");
    if (std::isnan(package) || std::isnan(core)) {
      ++unknown;
    } else {
      cores.emplace(package, core);
    }
  }
  return static_cast<int>(cores.size()) + unknown;
}

}  // namespace

std::vector<int> allowed_cpus() {
  std::vector<int> cpus;
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
    }
  }
#endif
  return cpus;
}

int cores_for(const std::vector<int>& cpus, const std::string& root) {
  const double limit = cgroup_limit(root);
  const int cores = physical_cores(cpus, root);
  return std::max(1, limit < cores ? static_cast<int>(limit) : cores);
}

int available_cores() {
  const std::vector<int> cpus = allowed_cpus();
  if (!cpus.empty()) return cores_for(cpus, "");
#if defined(__APPLE__)
  int cores = 0;
  std::size_t size = sizeof cores;
  if (sysctlbyname("hw.perflevel0.physicalcpu", &cores, &size, nullptr, 0) == 0) return cores;
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace smollm2
