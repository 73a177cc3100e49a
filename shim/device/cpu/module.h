// A loaded module: a private copy of a shared object, its kernels and globals.
#pragma once

#include <cuda.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device/cpu/guard.h"
#include "device/image.h"
#include "ipc/fd.h"
#include "xmig/kernel.h"

namespace xmig::device::cpu {

using RunBlock = decltype(xmig_descriptor::run);

struct Function {
  ImageKernel kernel;
  RunBlock run;
  int max_dynamic_shared;
  int carveout = -1;
};

struct GlobalVariable {
  ImageGlobal global;
  void** cell;
  const void* initial;
  uint64_t address = 0;
};

class Module {
 public:
  // `trap.error` is set if the image's own initialisers faulted. The dynamic linker was left in their middle then: the
  // process is not to be trusted any more. So it is after a fault while unloading, for which there is no caller to
  // tell: `unload_fault` is informed.
  static CUresult load(Bytes image, std::function<void(const Trap&)> unload_fault, std::shared_ptr<Module>& out,
                       Trap& trap);
  ~Module();
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  std::vector<Function>& functions() { return functions_; }
  std::vector<GlobalVariable>& globals() { return globals_; }
  // Points the global to its memory and gives it its first content. False if that memory is not there.
  bool bind(size_t index, uint64_t address);

 private:
  Module() = default;

  // The dynamic linker knows a library by its path, /proc/self/fd/N: N stays taken as long as the library is there.
  ipc::UniqueFd fd_;
  void* library_ = nullptr;
  std::function<void(const Trap&)> unload_fault_;
  std::vector<Function> functions_;
  std::vector<GlobalVariable> globals_;
};

}  // namespace xmig::device::cpu
