// How the devices without a GPU describe themselves.
#pragma once

#include "journal/layout.h"

namespace xmig::device {

// 0: the default capacity of the kind.
journal::DeviceDescription describe_cpu(int ordinal, uint64_t memory_bytes);
journal::DeviceDescription describe_null(int ordinal, uint64_t memory_bytes);

}  // namespace xmig::device
