#include "server/peers.h"

#include <string>

namespace xmig::server {

void describe_peers(const Services& services) {
  const uint32_t count = services.contexts.count();
  for (uint32_t device = 0; device < count; ++device) {
    for (uint32_t peer = 0; peer < count; ++peer) {
      services.job.header().peers[device * journal::kMaxDevices + peer].store(
          services.device.peer(static_cast<int>(device), static_cast<int>(peer)));
    }
  }
}

Result<> keeps_promises(const Services& services) {
  const uint32_t count = services.contexts.count();
  const uint64_t promised = services.job.header().peers_promised.load();
  for (uint32_t device = 0; device < count; ++device) {
    for (uint32_t peer = 0; peer < count; ++peer) {
      const bool needed = (promised >> (device * journal::kMaxDevices + peer) & 1) != 0;
      if (!needed || device == peer ||
          (services.device.peer(static_cast<int>(device), static_cast<int>(peer)) & journal::kPeerReaches) != 0) {
        continue;
      }
      return Error{"the program was informed that its device " + std::to_string(device) + " reaches the memory of its device " +
                   std::to_string(peer) + ", and these devices do not reach each other: choose devices with peer "
                   "access (nvidia-smi topo -p2p r)"};
    }
  }
  return {};
}

}  // namespace xmig::server
