// Memory of graphs, which freeing does not give back. Under a lock of its own.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace xmig::client {

// Memory that belongs to a graph: it has one address for as long as the graph, a copy, or an executable of it is there.
struct GraphMemory {
  uint64_t address = 0;
  uint64_t bytes = 0;
  int ordinal = 0;
  ~GraphMemory();
};

// Does freeing this address mean a graph's own memory? Then it stays until the graph goes.
bool is_graph_memory(CUdeviceptr address);
uint64_t graph_memory_bytes(int ordinal);
std::shared_ptr<GraphMemory> allocate_graph_memory(size_t bytes, int ordinal, CUresult& error);

}  // namespace xmig::client
