#include "client/memory/graph_memory.h"

#include <atomic>
#include <map>
#include <mutex>

#include "client/memory/memory_map.h"
#include "client/memory/pool.h"
#include "local.h"

namespace xmig::client {
namespace {

// Never destroyed: programs call the driver in their last moments.
struct AllGraphMemory {
  std::mutex mutex;
  std::map<uint64_t, const GraphMemory*> by_address;
};
AllGraphMemory& graph_memory() {
  static auto& all = *new AllGraphMemory;
  return all;
}

constinit std::atomic<int> graph_memories{0};

}  // namespace

std::shared_ptr<GraphMemory> allocate_graph_memory(size_t bytes, int ordinal, CUresult& error) {
  uint64_t address = 0;
  error = allocate(plain_pool(ordinal), MemoryKind::kDevice, bytes, nullptr, 0, &address);
  if (error != CUDA_SUCCESS) return nullptr;
  auto memory = std::make_shared<GraphMemory>();
  memory->address = address;
  memory->bytes = bytes;
  memory->ordinal = ordinal;
  {
    const std::lock_guard lock(graph_memory().mutex);
    graph_memory().by_address.emplace(address, memory.get());
  }
  graph_memories.fetch_add(1);
  return memory;
}

GraphMemory::~GraphMemory() {
  if (!address) return;
  {
    const std::lock_guard lock(graph_memory().mutex);
    graph_memory().by_address.erase(address);  // from here on it can be freed
  }
  graph_memories.fetch_sub(1);
  client::cuMemFree_v2(address);
}

uint64_t graph_memory_bytes(int ordinal) {
  const std::lock_guard lock(graph_memory().mutex);
  uint64_t bytes = 0;
  for (const auto& [address, memory] : graph_memory().by_address) bytes += memory->ordinal == ordinal ? memory->bytes : 0;
  return bytes;
}

bool is_graph_memory(CUdeviceptr address) {
  if (graph_memories.load(std::memory_order_relaxed) == 0) return false;
  const std::lock_guard lock(graph_memory().mutex);
  return graph_memory().by_address.contains(address);
}

}  // namespace xmig::client
