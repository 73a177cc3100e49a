// Collectives that are captured: a node of a graph, which begins them at each of its launches.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <span>

#include "journal/collectives.h"

namespace xmig::client {

// A group, whose communicators there are, in streams that take part in this capture.
CUresult capture_group(uint64_t capture, std::span<const journal::CollectiveOperation> operations);

}  // namespace xmig::client
