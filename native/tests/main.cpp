// Tests of the C++ code without Python, which run under sanitizers and in an emulator as well.
//
//   smollm2_tests [WORD]   runs those whose name has WORD in it
#include <cstdio>
#include <cstring>
#include <exception>

#include "tests/check.h"

int main(int count, char** arguments) {
  using namespace smollm2;
  const char* word = count > 1 ? arguments[1] : "";
  std::printf("instruction sets:");
  for (const std::string& name : isa_names()) std::printf(" %s", name.c_str());
  std::printf("\n");
  int run = 0, failed = 0;
  for (const auto area :
       {test::dispatch_tests, test::linear_tests, test::row_tests, test::attention_tests,
        test::pack_tests, test::engine_tests, test::thread_tests}) {
    for (const test::Test& test : area()) {
      if (std::strstr(test.name, word) == nullptr) continue;
      ++run;
      try {
        test.run();
        std::printf("ok      %s\n", test.name);
      } catch (const std::exception& error) {
        ++failed;
        std::printf("FAILED  %s\n        %s\n", test.name, error.what());
      }
      std::fflush(stdout);
    }
  }
  std::printf("%d tests, %d failed\n", run, failed);
  return run == 0 || failed > 0 ? 1 : 0;
}
