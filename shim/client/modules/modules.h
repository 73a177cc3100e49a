// Modules, libraries, and their kernels.
//
// A module belongs to one context. A library does not: it has a module in every context in which it has been used,
// loaded when it is first needed there, and its kernels (CUkernel) stand for the function of that name in each of them.
//
// What lies in this folder: images, modules, libraries, functions, what the device has reported of them (occupancy, launch_checks: each
// under a lock of its own), and the linker (under one lock). Modules and libraries lie in flat tables; a library is under its own lock.
// What a launch reads of a function is written before the function can be found, or is an atomic.
#pragma once

#include <cuda.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "client/journal/context.h"
#include "journal/layout.h"
#include "journal/module_info.h"

namespace xmig::client {

struct Module;

using journal::kKernelBits;
using journal::kMaxKernels;
// CUkernel handles never leave the client, which keeps them apart from CUfunction: libcudart passes one as the other.
inline constexpr journal::Kind kKernelKind = static_cast<journal::Kind>(0x20);

struct Function {
  std::string name;
  Module* module = nullptr;
  uint64_t handle = 0;
  // What follows is requested when the kernel is first looked up.
  std::atomic<bool> described{false};
  uint32_t parameter_bytes = 0;
  std::vector<journal::ParameterInfo> parameters;
  std::array<std::atomic<int32_t>, journal::kFunctionAttributes> attributes{};
  // Compiled, or set, to run in clusters of blocks?
  bool clustered() const {
    const auto value = [&](CUfunction_attribute which) { return attributes[which].load(std::memory_order_relaxed); };
    return (value(CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET) | value(CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH)) != 0;
  }
};

struct Global {
  std::string name;
  uint64_t bytes = 0;
  uint64_t address = 0;
  bool ours = false;  // placed by us, and ours to free
};

struct Module {
  uint64_t handle = 0;
  Context* context = nullptr;
  uint64_t library = 0;  // handle of the library that it is an instance of, or 0
  std::vector<Function> functions;
  std::unordered_map<std::string_view, uint32_t> by_name;
  std::vector<Global> globals;
  uint64_t variables = 0;  // where the server keeps those that it has placed (xmVariables); 0: nowhere
};

// Reads the server's description of a module, or of a kernel. False: it does not make sense.
bool parse_description(std::span<const std::byte> description, Module& module);
// `variable_bytes`: see KernelInfo.
bool parse_description(std::span<const std::byte> description, Function& function, uint64_t* variable_bytes = nullptr);

// Loads an image into the current context.
CUresult load_module(std::span<const std::byte> image, uint64_t library, Module** loaded);
void unload_module(Module* module);  // in its context; the records too
Module* find_module(uint64_t handle);

// The function that a CUfunction, or a CUkernel cast to one, means in this context. It may load the kernel's library
// there.
struct FunctionHere {
  Function* function = nullptr;
  CUresult error = CUDA_SUCCESS;
};
FunctionHere find_function(CUfunction handle, Context& context);
// The context that a CUfunction belongs to; nullptr for a CUkernel, which belongs to none, and for what is neither.
Context* context_of(CUfunction handle);
// A module's kernel by its number, described.
FunctionHere function_of(Module& module, uint32_t number);

// libraries.cc
FunctionHere kernel_function(uint64_t kernel, Context& context);
void libraries_context_reset(const Context& context);
// A CUkernel handle: which library's, and which of its kernels.
constexpr uint64_t make_kernel(uint64_t library, uint32_t number) {
  return journal::make_handle(kKernelKind, (journal::handle_index(library) << kKernelBits) | number);
}

// The context was reset: its modules are gone.
void modules_context_reset(const Context& context);

// The whole of a file that holds an image; text gets a terminating zero. Empty: it cannot be read.
std::vector<std::byte> read_image_file(const char* path, size_t* length = nullptr);

// functions.cc; `function` in its own context.
CUresult set_attribute(Function& function, CUfunction_attribute attribute, int value);
CUresult get_attribute(const Function& function, CUfunction_attribute attribute, int* value);
CUresult parameter_info(const Function& function, size_t index, size_t* offset, size_t* size);

}  // namespace xmig::client
