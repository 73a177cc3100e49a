// Conditions: values that kernels set, and nodes that follow them. docs/decisions/0024-conditional-nodes.md.
#pragma once

#include <cuda.h>

#include "client/graph/graph.h"

namespace xmig::client {

// A graph with conditional nodes is not copied: not cloned, not put into a node by copy, not made executable twice.
CUresult refuse_copy();

// Has it conditions that no node follows?
bool has_unused_conditions(const Graph& graph);
// Can it become executable? Whatever is wrong is reported.
CUresult check_conditions(const Graph& graph);

}  // namespace xmig::client
