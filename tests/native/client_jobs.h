// What tests of the client share: a program that has shaken hands with the test's own daemon (client_harness.h).
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "client/bootstrap/process.h"
#include "client_harness.h"

namespace harness {

using client::process;

struct Fixture {
  Control& control = make_control();
  std::string path = "/tmp/xmig-client-test-" + std::to_string(::getpid());
  std::optional<Daemon> daemon;

  Fixture() {
    ::setenv("XMIG_SOCKET", path.c_str(), 1);
    daemon.emplace(control, path);
  }
  ~Fixture() {
    daemon.reset();
    ::unlink(path.c_str());
  }
  CUcontext context = nullptr;
  void start() {
    CU(cuInit(0));
    CU(cuDevicePrimaryCtxRetain(&context, 0));
    CU(cuCtxSetCurrent(context));
  }
  CUfunction kernel() {
    static const char ptx[] = ".version 8.0";
    CUmodule module = nullptr;
    CUfunction function = nullptr;
    CU(cuModuleLoadData(&module, ptx));
    CU(cuModuleGetFunction(&function, module, "many"));
    return function;
  }
};

struct Arguments {
  uint64_t a = 0xa1, c = 0xc3, e = 0xe5, h = 0x88;
  uint32_t b = 0xb2, d = 0xd4, f = 0xf6;
  uint32_t g[3] = {1, 2, 3};
  void* pointers[8] = {&a, &b, &c, &d, &e, &f, &g, &h};
};

inline CUresult launch(CUfunction function, Arguments& arguments, CUstream stream = nullptr) {
  return cuLaunchKernel(function, 3, 2, 1, 64, 2, 1, 128, stream, arguments.pointers, nullptr);
}

// One a process: it initialises once.
using Tests = std::map<std::string_view, void (*)()>;
inline int run_test(int argc, char** argv, const Tests& tests) {
  CHECK(argc == 2 && tests.contains(argv[1]));
  tests.at(argv[1])();
  return 0;
}

}  // namespace harness
