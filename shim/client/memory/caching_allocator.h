// PyTorch's caching allocator says what it gives back: it has trackers for that, which hear of every block.
//
// A training step ends with little in use, and the driver does not see it: the allocator keeps its segments. With a tracker
// of ours a snapshot leaves out what no tensor has (cached_blocks.h), and the program has the allocator that it expects.
//
// PyTorch has no C interface for this. The tracker is attached by functions of libc10_cuda.so that its symbol table
// names with their types: a library whose symbols are others, or none, is left alone, and everything counts as in use.
// Blocks of private pools (CUDA graphs, MemPool) count as in use, always: what a graph leaves in memory that the allocator
// has back already, the graph's next launch may read.
#pragma once

namespace xmig::client {

// Looks for it, when the program takes device memory. Costs nothing once there is an answer.
void watch_caching_allocator();

}  // namespace xmig::client
