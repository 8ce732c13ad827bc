// What this machine can do at most: the limits that a speed is a share of.
#pragma once

namespace smollm2 {

struct Limits {
  double read_gb_s;   // memory read by all threads together
  double dot_gmac_s;  // 8-bit multiply-adds of all threads together; 0 where it is not known
};

// Takes about a quarter of a second, and 256 MB of memory.
Limits probe(int threads);

}  // namespace smollm2
