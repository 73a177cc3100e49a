// Loading modules and kernels onto a device, for a program's call and ahead of a recovery.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "device/device.h"
#include "journal/module_info.h"
#include "server/channel/daemon.h"
#include "server/cuda/objects/objects.h"

namespace xmig::server {

// A value's bytes, behind what is there.
template <typename T>
void append(std::vector<std::byte>& to, const T& value) {
  const auto* bytes = reinterpret_cast<const std::byte*>(&value);
  to.insert(to.end(), bytes, bytes + sizeof(T));
}

// What of a module is of the device: real, kernels, globals and description. The context is current.
CUresult load_module(device::Device& device, Log& log, std::span<const std::byte> image, Module& module);
// Load a kernel, if it is not, and find out how long its parameters are.
CUresult load_kernel(const DriverTable& driver, Kernel& kernel);
std::vector<journal::ParameterInfo> describe_parameters(const DriverTable& driver, Kernel& kernel);

}  // namespace xmig::server
