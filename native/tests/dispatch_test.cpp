// Which tables of kernels there are, and which one is chosen.
#include <cstdlib>

#include "cpu/features.h"
#include "tests/check.h"

namespace smollm2::test {
namespace {

void set_isa(const char* name) {
#if defined(_WIN32)
  _putenv_s("SMOLLM2_ISA", name);
#else
  setenv("SMOLLM2_ISA", name, 1);
#endif
}

void tables_have_names() {
  const std::vector<std::string> names = isa_names();
  expect(names.front() == "scalar", "the plain one comes first");
  for (const std::string& name : names) {
    const Kernels* table = kernels_for(name);
    expect(table != nullptr && table->name == name, name + " has another table");
  }
  expect(kernels_for("mmx") == nullptr && kernels_for("") == nullptr, "no such tables");
}

// The first choice holds: this test comes before all others that would make one.
void the_environment_chooses() {
  set_isa("mmx");
  std::string said;
  try {
    kernels();
  } catch (const std::runtime_error& error) {
    said = error.what();
  }
  expect(said.find("SMOLLM2_ISA=mmx cannot run here: choose from scalar") == 0, said);
  const std::string worst = isa_names()[isa_names().size() > 1 ? 1 : 0];
  set_isa(worst.c_str());
  expect(kernels().name == worst, "another one was chosen");
  set_isa("scalar");
  expect(kernels().name == worst, "the choice changed");
}

}  // namespace

Tests dispatch_tests() {
  return {
      {"dispatch: tables have names", tables_have_names},
      {"dispatch: the environment chooses once", the_environment_chooses},
  };
}

}  // namespace smollm2::test
