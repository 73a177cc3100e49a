// Peer access between contexts. The client knows who has enabled what, for the driver's errors; the server maps the memory.
//
// Access is by device: when a context may touch another one's memory, its device may touch all memory of that one's device,
// pools and mappings included. A program that relies on being stopped there is the only one that sees a difference.
#include "client/memory/peers.h"

#include <mutex>
#include <set>
#include <utility>

#include "client/bootstrap/message.h"
#include "client/bootstrap/process.h"
#include "client/journal/append.h"
#include "local.h"
#include "ops.h"

namespace xmig::client {
namespace {

// Context numbers: who has enabled access to whose memory. The lock is held across the record: they are rare, and must be in the
// journal's order.
struct Enabled {
  std::mutex lock;
  std::set<std::pair<uint32_t, uint32_t>> contexts;
  std::set<std::pair<int, int>> devices;  // reported for good: memory, device
};
Enabled& enabled() {
  static auto& all = *new Enabled;
  return all;
}

CUresult tell(CUcontext peer, int device, int memory, bool reaches) {
  const Args_xmPeer args{.peer = reinterpret_cast<uint64_t>(peer),
                         .device = static_cast<uint32_t>(device),
                         .memory = static_cast<uint32_t>(memory),
                         .reaches = reaches,
                         .reserved = 0};
  return call(Op::xmPeer, &args, sizeof(args), nullptr, 0);
}

struct Pair {
  Context* context = nullptr;
  Context* peer = nullptr;
  CUresult error = CUDA_SUCCESS;
};
Pair pair_with(CUcontext peer) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return {.error = error};
  const Current now = current(this_thread());
  if (now.error != CUDA_SUCCESS) return {.error = now.error};
  Context* const found = find_context(peer);
  if (!found || !found->alive.load()) return {.error = CUDA_ERROR_INVALID_CONTEXT};
  return {now.context, found, CUDA_SUCCESS};
}

}  // namespace

uint32_t peer_access(int device, int peer) {
  return process.header->peers[static_cast<uint32_t>(device) * journal::kMaxDevices + static_cast<uint32_t>(peer)].load(
      std::memory_order_relaxed);
}

bool promise_peer(int device, int peer) {
  if (!(peer_access(device, peer) & journal::kPeerReaches)) return false;
  process.header->peers_promised.fetch_or(1ull << (device * static_cast<int>(journal::kMaxDevices) + peer));
  return true;
}

CUresult share_memory(int memory, int device) {
  if (memory == device) return CUDA_SUCCESS;
  if (!promise_peer(device, memory)) return CUDA_ERROR_INVALID_DEVICE;
  Enabled& all = enabled();
  const std::lock_guard guard(all.lock);
  if (all.devices.contains({memory, device})) return CUDA_SUCCESS;
  const CUresult result = tell(nullptr, device, memory, true);
  if (result == CUDA_SUCCESS) all.devices.insert({memory, device});
  return result;
}

void peers_context_reset(const Context& context) {
  Enabled& all = enabled();
  const std::lock_guard guard(all.lock);
  std::erase_if(all.contexts, [&](const auto& pair) { return pair.first == context.index || pair.second == context.index; });
}

CUresult cuCtxEnablePeerAccess(CUcontext peerContext, unsigned int Flags) {
  const Pair pair = pair_with(peerContext);
  if (pair.error != CUDA_SUCCESS) return pair.error;
  if (Flags) return CUDA_ERROR_INVALID_VALUE;
  if (pair.context == pair.peer) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  Enabled& all = enabled();
  const std::lock_guard guard(all.lock);
  const std::pair key(pair.context->index, pair.peer->index);
  if (all.contexts.contains(key)) return CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
  // Two contexts of one device: nothing has to be mapped, and natively that is allowed.
  if (pair.context->ordinal != pair.peer->ordinal) {
    if (!promise_peer(pair.context->ordinal, pair.peer->ordinal)) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    const CUresult result = tell(pair.peer->handle(), pair.context->ordinal, pair.peer->ordinal, true);
    if (result != CUDA_SUCCESS) return result;
  }
  all.contexts.insert(key);
  return CUDA_SUCCESS;
}

CUresult cuCtxDisablePeerAccess(CUcontext peerContext) {
  const Pair pair = pair_with(peerContext);
  if (pair.error != CUDA_SUCCESS) return pair.error;
  Enabled& all = enabled();
  const std::lock_guard guard(all.lock);
  if (all.contexts.erase({pair.context->index, pair.peer->index}) == 0) return CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
  if (pair.context->ordinal == pair.peer->ordinal) return CUDA_SUCCESS;
  return tell(pair.peer->handle(), pair.context->ordinal, pair.peer->ordinal, false);
}

}  // namespace xmig::client
