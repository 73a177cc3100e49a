#pragma once

#include "device/cpu/cpu_device.h"

namespace xmig::device::cpu {

// cuEventRecord, under the device's lock.
CUresult record_event(Event& event, Stream& stream);

}  // namespace xmig::device::cpu
