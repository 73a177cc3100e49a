// The null device: an H200's complete interface. Every call succeeds at once, kernels and copies do nothing, memory is
// addresses only. What is left when the device costs nothing is the cost of everything else: overhead is measured
// with it, and real frameworks run on it wherever numbers do not matter.
#pragma once

#include <memory>
#include <span>

#include "device/device.h"

namespace xmig::device {

std::unique_ptr<Device> open_null(std::span<const int> ordinals, uint64_t memory_bytes);

}  // namespace xmig::device
