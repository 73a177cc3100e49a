// Module images: everything that reads one before the dynamic linker does.
#include <cstdint>
#include <cstdlib>

#include "device/image.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace xmig::device;
  const Bytes image(reinterpret_cast<const std::byte*>(data), size);
  // Whatever is refused is refused with a reason.
  const auto with_reason = [](const auto& result) {
    if (!result && (result.why().empty() || result_of(result.error()) == CUDA_SUCCESS)) std::abort();
  };
  const auto shared = read_shared_object(image), any = read_any(image);
  with_reason(shared);
  with_reason(any);
  with_reason(check_loadable(image));
  for (const auto* read : {&shared, &any}) {
    if (!*read) continue;
    if ((*read)->kernels.size() > kMaxKernels) std::abort();
    for (const ImageKernel& kernel : (*read)->kernels)
      for (const auto& parameter : kernel.parameters)
        if (uint64_t{parameter.offset} + parameter.size > kernel.parameter_bytes) std::abort();
  }
  for (const uint32_t architecture : {75, 90, 120}) {
    std::vector<ImageVariable> variables;
    with_reason(read_variables(image, architecture, variables));
    if (variables.size() > kMaxVariables) std::abort();
  }
  image_extent(image.first(size < 64 ? size : 64));
  return 0;
}
