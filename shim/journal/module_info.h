// How a loaded module describes itself to the client: the reply of xmModuleLoad.
//
//   ModuleInfo
//   KernelName, name (not terminated), padded to 8   } kernel_count times; the n-th is the module's kernel number n
//   GlobalInfo, name, padded to 8                    } global_count times
//
// And a kernel, when the program first asks for it (to describe one the device has to load it, and libraries have
// thousands): the reply of xmKernel.
//
//   KernelInfo
//   ParameterInfo                                    } parameter_count times
#pragma once

#include <cstdint>

namespace xmig::journal {

struct ModuleInfo {
  uint32_t bytes;  // of the whole description; more than the reply holds: fetch with xmModuleInfo
  uint32_t kernel_count;
  uint32_t global_count;
  uint32_t reserved;
};

struct KernelName {
  uint32_t bytes;
};

inline constexpr uint32_t kFunctionAttributes = 16;  // CUfunction_attribute 0..15
inline constexpr uint32_t kMaxParameters = 4096;
struct KernelInfo {
  uint32_t parameter_count;
  uint32_t parameter_bytes;  // of the packed parameter block
  int32_t attributes[kFunctionAttributes];
  // The first kernel of its module: how much memory it takes to keep what kernels leave in the module's variables that the
  // device has placed; the client says where with xmVariables, before anything is launched. 0: none.
  uint64_t variable_bytes;
};
struct ParameterInfo {
  uint32_t offset;
  uint32_t size;
};
struct GlobalInfo {
  uint64_t address;  // 0: the client places it and says so with xmBindGlobal
  uint64_t bytes;
  uint32_t name_bytes;
  uint32_t reserved;
};

// The reply of xmGlobal.
struct GlobalSize {
  uint64_t bytes;
};

}  // namespace xmig::journal
