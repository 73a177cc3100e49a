// Several devices in one job: which reach each other's memory.
//
// A device reaches another one's memory once the program has requested that (cuCtxEnablePeerAccess, cuMemPoolSetAccess,
// cuMemSetAccess): then all of that device's memory is mapped for it, for memory made with cuMemMap knows no other way.
//
// The executor's thread alone.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <set>
#include <utility>

#include "server/cuda/handlers/session.h"

namespace xmig::server {

class Peers {
 public:
  explicit Peers(const Session& session);
  Peers(const Peers&) = delete;

  // Does `device` reach the memory of `memory`?
  bool shares(uint32_t memory, uint32_t device) const { return memory_.hosting.shares(memory, device); }
  // If it can, then from now on it does, whatever the program asks for.
  CUresult share_for_good(uint32_t memory, uint32_t device);
  // What was requested in this context, or for memory of this context, is over.
  void reset(uint32_t context);

  CUresult on_xmPeer(Record& record);

 private:
  bool reaches(uint32_t device, uint32_t memory) const;
  bool is_shared(uint32_t memory, uint32_t device) const;
  CUresult share(uint32_t memory, uint32_t device, bool on);

  device::Device& device_;
  Contexts& contexts_;
  ProcessMemory& memory_;
  Objects& objects_;
  // Memory (its device's ordinal) that a device reaches although the program did not ask: its graphs' copies.
  std::set<std::pair<uint32_t, uint32_t>> lasting_shares_;
};

}  // namespace xmig::server
