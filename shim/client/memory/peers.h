// Which devices reach each other's memory, and what the program requested of that (peers.cc).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "client/journal/context.h"

namespace xmig::client {

// journal::PeerAccess and the rank, of the devices that the job runs on now.
uint32_t peer_access(int device, int peer);
// Does `device` reach the memory of `peer`? If so, the program is about to know, and it stays so.
bool promise_peer(int device, int peer);

// `device` reaches all memory of `memory` from here on, for as long as the job lives: what pools and mappings ask for.
CUresult share_memory(int memory, int device);

// A context's objects are gone: what it had enabled, and what others had enabled for it.
void peers_context_reset(const Context& context);

}  // namespace xmig::client
