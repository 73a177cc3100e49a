// A graph that the program takes part in is not launched as one: its records are appended one by one, in an order that its
// edges allow. What the journal keeps of such records is what makes them repeatable. (docs/decisions/0005)
#pragma once

#include <cuda.h>

#include "client/graph/graph.h"

namespace xmig::client {

// Does the program take part in this record's work: with its page-locked memory, a function, a word that it may write?
bool is_programs(Op op);
// Is there anything of the kind in the graph, at any depth? Events are, too.
bool has_program_in_it(const Graph& graph);
bool has_collectives(const Graph& graph);

// Appends, in the stream, what an operation, a node or all of a graph does. Conditional nodes cannot be appended.
CUresult play(const Operation& operation, CUstream stream);
CUresult play(const Node& node, CUstream stream);
CUresult play(const Graph& graph, CUstream stream);

}  // namespace xmig::client
