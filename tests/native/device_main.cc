// device_units KERNELS [test ...]: every test, or those named.
#include "device_harness.h"

int main(int argc, char** argv) {
  CHECK(argc >= 2);
  kernels_path() = argv[1];
  if (argc == 2)
    for (const auto& [name, test] : tests()) {
      std::fprintf(stderr, "%s\n", name.c_str());
      test();
    }
  for (int i = 2; i < argc; ++i) {
    CHECK(tests().contains(argv[i]));
    tests().at(argv[i])();
  }
}
