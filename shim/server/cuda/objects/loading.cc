#include "server/cuda/objects/loading.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace xmig::server {
namespace {

void append_text(std::vector<std::byte>& to, std::string_view text) {
  const auto* bytes = reinterpret_cast<const std::byte*>(text.data());
  to.insert(to.end(), bytes, bytes + text.size());
  to.resize(journal::align8(to.size()));
}

CUresult describe(const DriverTable& driver, Log& log, Module& module) {
  unsigned int count = 0;
  CUresult result = driver.cuModuleGetFunctionCount(&count, module.real);
  if (result != CUDA_SUCCESS) return result;
  if (count > kMaxKernels) {
    log(Level::kWarning, "a module has " + std::to_string(count) + " kernels; only the first " +
                             std::to_string(kMaxKernels) + " can be used");
    count = kMaxKernels;
  }
  std::vector<CUfunction> functions(count);
  if (count != 0) result = driver.cuModuleEnumerateFunctions(functions.data(), count, module.real);
  if (result != CUDA_SUCCESS) return result;

  std::vector<std::byte>& out = module.description;
  journal::ModuleInfo info{0, count, static_cast<uint32_t>(module.globals.size()), 0};
  append(out, info);
  for (const CUfunction function : functions) {
    const char* name = nullptr;
    if ((result = driver.cuFuncGetName(&name, function)) != CUDA_SUCCESS) return result;
    append(out, journal::KernelName{static_cast<uint32_t>(std::strlen(name))});
    append_text(out, name);
    module.kernels.push_back({function, {}});
  }
  for (const device::Global& global : module.globals) {
    append(out, journal::GlobalInfo{global.address, global.bytes, static_cast<uint32_t>(global.name.size()), 0});
    append_text(out, global.name);
  }
  info.bytes = static_cast<uint32_t>(out.size());
  std::memcpy(out.data(), &info, sizeof(info));
  return CUDA_SUCCESS;
}

}  // namespace

CUresult load_module(device::Device& device, Log& log, std::span<const std::byte> image, Module& module) {
  if (const CUresult result = device.load_image(&module.real, image); result != CUDA_SUCCESS) return result;
  module.globals = device.globals(module.real);
  const CUresult result = describe(device.driver(), log, module);
  if (result != CUDA_SUCCESS) device.driver().cuModuleUnload(module.real);
  return result;
}

CUresult load_kernel(const DriverTable& driver, Kernel& kernel) {
  if (kernel.loaded) return CUDA_SUCCESS;
  // Measured: of a kernel that is not loaded yet the driver says that it can have 0 threads.
  if (const CUresult result = driver.cuFuncLoad(kernel.real); result != CUDA_SUCCESS) return result;
  kernel.loaded = true;
  if (!kernel.parameter_bytes) describe_parameters(driver, kernel);
  return CUDA_SUCCESS;
}

std::vector<journal::ParameterInfo> describe_parameters(const DriverTable& driver, Kernel& kernel) {
  std::vector<journal::ParameterInfo> parameters;
  uint32_t bytes = 0;
  size_t offset = 0, size = 0;
  while (parameters.size() < journal::kMaxParameters &&
         driver.cuFuncGetParamInfo(kernel.real, parameters.size(), &offset, &size) == CUDA_SUCCESS) {
    parameters.push_back({static_cast<uint32_t>(offset), static_cast<uint32_t>(size)});
    bytes = std::max(bytes, static_cast<uint32_t>(offset + size));
  }
  kernel.parameter_bytes = bytes;
  return parameters;
}

}  // namespace xmig::server
