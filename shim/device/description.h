// How devices describe themselves to programs.
#pragma once

#include "journal/layout.h"

namespace xmig::device {

// 0: the default capacity of the kind.
journal::DeviceDescription describe_cpu(int ordinal, uint64_t memory_bytes);
journal::DeviceDescription describe_null(int ordinal, uint64_t memory_bytes);

// Takes back what the device could do and xMIG refuses. Every description has gone through it.
void promise_what_works(journal::DeviceDescription& out);

}  // namespace xmig::device
