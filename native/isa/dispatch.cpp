#include <cstdlib>
#include <stdexcept>

#include "cpu/features.h"
#include "kernels/kernels.h"

namespace smollm2 {

const Kernels& table_scalar();
#if defined(SMOLLM2_X86)
const Kernels& table_avx2();
const Kernels& table_avxvnni();
const Kernels& table_avx512();
#elif defined(SMOLLM2_NEON)
const Kernels& table_neon();
const Kernels& table_neon_dotprod();
const Kernels& table_neon_i8mm();
#endif

namespace {

struct Entry {
  const Kernels& (*table)();
  std::vector<std::string> needs;
};

// From the slowest to the fastest.
const std::vector<Entry>& entries() {
  static const std::vector<Entry> all{
      {table_scalar, {}},
#if defined(SMOLLM2_X86)
      {table_avx2, {"avx2", "fma", "f16c"}},
#if defined(SMOLLM2_EVEX_VNNI)
      {table_avxvnni, {"avx2", "fma", "f16c", "avx512vl", "avx512_vnni"}},
#else
      {table_avxvnni, {"avx2", "fma", "f16c", "avx_vnni"}},
#endif
      {table_avx512, {"avx512f", "avx512bw", "avx512vl", "avx512_vnni", "fma", "f16c"}},
#elif defined(SMOLLM2_NEON)
      {table_neon, {"neon"}},
      {table_neon_dotprod, {"neon", "neon_dotprod"}},
      {table_neon_i8mm, {"neon", "neon_dotprod", "neon_i8mm"}},
#endif
  };
  return all;
}

// CPUID is slow under a hypervisor: asked once.
const std::vector<std::string>& detected() {
  static const std::vector<std::string> features = cpu_features();
  return features;
}

bool runs(const Entry& entry, const std::vector<std::string>& features) {
  for (const std::string& need : entry.needs) {
    bool found = false;
    for (const std::string& feature : features) found = found || feature == need;
    if (!found) return false;
  }
  return true;
}

const Kernels& choose() {
  const char* wanted = std::getenv("SMOLLM2_ISA");
  const std::vector<std::string> names = isa_names();
  if (wanted == nullptr || *wanted == '\0') return *kernels_for(names.back());
  if (const Kernels* table = kernels_for(wanted)) return *table;
  std::string message = "SMOLLM2_ISA=" + std::string(wanted) + " cannot run here: choose from";
  for (const std::string& name : names) message += " " + name;
  throw std::runtime_error(message);
}

}  // namespace

std::vector<std::string> isa_names() {
  const std::vector<std::string>& features = detected();
  std::vector<std::string> names;
  for (const Entry& entry : entries()) {
    if (runs(entry, features)) names.emplace_back(entry.table().name);
  }
  return names;
}

const Kernels* kernels_for(const std::string& name) {
  const std::vector<std::string>& features = detected();
  for (const Entry& entry : entries()) {
    if (entry.table().name == name && runs(entry, features)) return &entry.table();
  }
  return nullptr;
}

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace smollm2
