// What the kernel shows of devices and their driver to everybody, as NVML reports it. No device file is needed for that.
#pragma once

#include <optional>
#include <string>

#include "nvml/driver.h"

namespace xmig::nvml {

// The version of NVIDIA's kernel driver. None: there is no such driver.
std::optional<std::string> kernel_driver_version();

enum class Link { kCurrentGeneration, kCurrentWidth, kMostGeneration, kMostWidth };

// Of a GPU's connection to the machine. None: the device is no GPU of NVIDIA's on PCI, or that is not known.
std::optional<unsigned int> link_of(const Device& device, Link what);

}  // namespace xmig::nvml
