// How many threads this process should use.
#pragma once

#include <string>
#include <vector>

namespace smollm2 {

// CPUs that this process may run on; empty where the system does not say.
std::vector<int> allowed_cpus();

// Physical cores among those CPUs, and no more than the cgroup's quota rounded down; at least one.
// The files of the system are looked up below `root`.
int cores_for(const std::vector<int>& cpus, const std::string& root);

// The same of this process and system.
int available_cores();

}  // namespace smollm2
