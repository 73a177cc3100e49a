// Reading module images. An image comes from the program and is hostile: nothing here trusts an offset, a count or a
// string before it has been checked against the image's bounds, and nothing of the image is run.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/result.h"
#include "journal/module_info.h"

namespace xmig::device {

inline constexpr size_t kMaxKernels = 1 << 16;  // of a module
inline constexpr size_t kMaxVariables = 1 << 16;
inline constexpr size_t kMaxVariableName = 16 << 10;

struct ImageKernel {
  std::string name;
  uint32_t parameter_bytes = 0;
  uint32_t max_threads = 1024;
  uint32_t static_shared_bytes = 0;
  std::vector<journal::ParameterInfo> parameters;
  uint64_t descriptor = 0;  // where its xmig_descriptor will lie, relative to the load address
};

struct ImageGlobal {
  std::string name;
  uint64_t bytes = 0;
  uint64_t descriptor = 0;
};

struct Image {
  std::vector<ImageKernel> kernels;
  std::vector<ImageGlobal> globals;
};

using Bytes = std::span<const std::byte>;

// What becomes of an image that is refused; the number is what the driver says of such.
inline Error refused(std::string why, CUresult result = CUDA_ERROR_INVALID_IMAGE) {
  return {.text = std::move(why), .number = result};
}
inline CUresult result_of(const Error& error) { return static_cast<CUresult>(error.number); }

// A shared object with kernels of the cpu device: CUDA_ERROR_INVALID_IMAGE if it is none, is damaged or describes its
// kernels wrongly, CUDA_ERROR_NO_BINARY_FOR_GPU if it is well formed but made for something else.
Result<Image> read_shared_object(Bytes image);

// Can the dynamic linker load this shared object without leaving its bounds? It checks next to nothing itself.
Result<> check_loadable(Bytes image);

// What the null device accepts: a shared object as above, a cubin, PTX, or a fat binary, of which it takes what an H200
// would take. CUDA_ERROR_NO_BINARY_FOR_GPU: there is nothing for one.
Result<Image> read_any(Bytes image);

// A variable that kernels can write, whether a program can ask for it or not (`static`, of a function): not constants.
struct ImageVariable {
  std::string name;
  bool has_addresses = false;  // its first content has addresses, which are other ones in each process
};

// Those of what a device of this architecture (90: compute capability 9.0) takes of an image for GPUs. Where not all of
// them can be read, `out` has those that were found.
Result<> read_variables(Bytes image, uint32_t architecture, std::vector<ImageVariable>& out);

// How long an image is, from its first bytes (at most `known` are there): 0 if they do not say.
size_t image_extent(Bytes known);

}  // namespace xmig::device
