#include "server/cuda/handlers/peers.h"

#include <algorithm>

namespace xmig::server {

Peers::Peers(const Session& session)
    : device_(session.device),
      contexts_(session.services.contexts),
      memory_(session.memory),
      objects_(session.objects) {}

bool Peers::reaches(uint32_t device, uint32_t memory) const {
  return (device_.peer(static_cast<int>(device), static_cast<int>(memory)) & journal::kPeerReaches) != 0;
}

// A graph's copies are settled when it is made, and what the driver says of such a node it says only at its launch.
CUresult Peers::share_for_good(uint32_t memory, uint32_t device) {
  if (!reaches(device, memory) || shares(memory, device)) return CUDA_SUCCESS;
  if (const CUresult result = share(memory, device, true); result != CUDA_SUCCESS) return result;
  lasting_shares_.insert({memory, device});
  return CUDA_SUCCESS;
}

bool Peers::is_shared(uint32_t memory, uint32_t device) const {
  return lasting_shares_.contains({memory, device}) ||
         std::any_of(objects_.peers.begin(), objects_.peers.end(), [&](const auto& entry) {
           return entry.first.memory == memory && entry.first.device == device;
         });
}

CUresult Peers::share(uint32_t memory, uint32_t device, bool on) {
  const std::lock_guard lock(memory_.mutex);
  return device::result_of(memory_.hosting.share(memory, device, on));
}

CUresult Peers::on_xmPeer(Record& record) {
  Args_xmPeer args;
  if (!record.arguments(args) || args.device >= contexts_.count() || args.memory >= contexts_.count() ||
      args.device == args.memory || (args.peer != 0 && !journal::handle_is(args.peer, journal::Kind::kContext))) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const bool lasting = args.peer == 0;
  const PeerKey key{lasting ? 0 : record.header().context, lasting ? 0 : journal::handle_index(args.peer), args.device, args.memory};
  if (args.reaches == 0) {
    objects_.peers.erase(key);
    return is_shared(args.memory, args.device) ? CUDA_SUCCESS : share(args.memory, args.device, false);
  }
  if (!reaches(args.device, args.memory)) {
    return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  }
  // A device that could not be opened then is not to be now: the program knows that it has no access.
  if (record.replied() && record.header().result != CUDA_SUCCESS) return static_cast<CUresult>(record.header().result);
  for (const uint32_t ordinal : {args.device, args.memory}) {
    if (const device::Status opened = contexts_.try_open(ordinal); !opened) return device::result_of(opened);
  }
  contexts_.use(record.header().ordinal);
  const CUresult result = share(args.memory, args.device, true);
  if (result == CUDA_SUCCESS) objects_.peers.insert_or_assign(key, objects_.records.keep(record.sequence(), record.stored()));
  return result;
}

// What was requested in this context, or for memory of this context.
void Peers::reset(uint32_t context) {
  std::set<std::pair<uint32_t, uint32_t>> dropped;
  std::erase_if(objects_.peers, [&](const auto& entry) {
    const bool gone = context != 0 && (entry.first.context == context || entry.first.peer == context);
    if (gone) dropped.insert({entry.first.memory, entry.first.device});
    return gone;
  });
  for (const auto& [memory, device] : dropped) {
    if (!is_shared(memory, device)) share(memory, device, false);
  }
}

}  // namespace xmig::server
