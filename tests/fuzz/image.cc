// Module images: everything that reads one before the dynamic linker does.
#include <cstdint>
#include <cstdlib>

#include "device/image.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace xmig::device;
  const Bytes image(reinterpret_cast<const std::byte*>(data), size);
  Image shared, any;
  std::string error;
  // Whatever is refused is refused with a reason.
  if (read_shared_object(image, shared) != CUDA_SUCCESS && shared.error.empty()) std::abort();
  if (check_loadable(image, error) != CUDA_SUCCESS && error.empty()) std::abort();
  read_any(image, any);
  for (const Image* i : {&shared, &any}) {
    if (i->kernels.size() > kMaxKernels) std::abort();
    for (const ImageKernel& kernel : i->kernels)
      for (const auto& parameter : kernel.parameters)
        if (uint64_t{parameter.offset} + parameter.size > kernel.parameter_bytes) std::abort();
  }
  for (const uint32_t architecture : {75, 90, 120}) {
    std::vector<ImageVariable> variables;
    error.clear();
    if (!read_variables(image, architecture, variables, error) && error.empty()) std::abort();
    if (variables.size() > kMaxVariables) std::abort();
  }
  image_extent(image.first(size < 64 ? size : 64));
  return 0;
}
