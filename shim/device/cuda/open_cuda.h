#pragma once

#include <memory>
#include <span>

#include "device/device.h"

namespace xmig::device {

std::unique_ptr<Device> open_cuda(std::span<const int> ordinals);

}  // namespace xmig::device
