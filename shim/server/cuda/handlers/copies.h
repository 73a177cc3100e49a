// Copies between the program and the device.
//
// The journal is the source of copies from pageable memory: the payload stays where it is until a snapshot. Bytes from
// pinned memory are kept on the device (CopyLog). Bytes that the program has are never written twice: a replay brings them
// to a scratch buffer, and compares.
//
// A device copies from and to its own memory; where that is another one's than the stream's, streams.h has the way.
//
// The executor's thread alone; buffers (ScratchPool) are given back on the driver's threads.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <optional>

#include "server/cuda/handlers/addresses.h"
#include "server/cuda/handlers/intake.h"
#include "server/cuda/handlers/outside_waits.h"
#include "server/cuda/handlers/peers.h"
#include "server/cuda/handlers/session.h"
#include "server/cuda/handlers/streams.h"
#include "server/memory/scratch.h"

namespace xmig::server {

class Copies {
 public:
  Copies(const Session& session, Streams& streams, Addresses& addresses, Peers& peers, Intake& intake,
         const OutsideWaits& outside);
  Copies(const Copies&) = delete;

  CUresult on_xmCopyFromHost(Record& record);
  CUresult on_xmCopyFromPinned(Record& record);
  CUresult on_xmCopyToHost(Record& record);
  CUresult on_xmCopyToPinned(Record& record);
  CUresult on_xmCopy2D(Record& record);
  CUresult on_cuMemcpyDtoDAsync_v2(Record& record);

 private:
  struct Plane;
  struct PinnedWrite;

  CUresult between(const Plane& to, const Plane& from, CUstream stream);
  CUresult to_peer(const Plane& to, const Plane& from, CUstream stream);
  CUresult to_device(const Plane& to, const Plane& from, CUstream stream);
  CUresult to_device_in_turn(const Plane& to, const Plane& from, uint32_t ordinal, CUstream stream);
  CUresult to_host(const Plane& to, const Plane& from, CUstream stream);
  CUresult on_device(const Plane& to, const Plane& from, CUstream stream);
  std::optional<uint64_t> log_space(uint32_t ordinal, uint64_t bytes);
  CUresult bring(Record& record, uint32_t ordinal, const Plane& kept, const Plane& from, CUstream stream);
  CUresult note_copied(Record& record, uint64_t kept, CUstream stream);
  CUresult compare_with_pinned(Record& record, const Plane& from, CUstream stream);

  const DriverTable& driver_;
  Contexts& contexts_;
  Job& job_;
  ProcessMemory& memory_;
  Replies& replies_;
  Waits& waits_;
  Working& working_;
  const Current& current_;
  Schedule& schedule_;
  Execution& execution_;
  Streams& streams_;
  Addresses& addresses_;
  Peers& peers_;
  Intake& intake_;
  const OutsideWaits& outside_;
  ScratchPool scratch_;
};

}  // namespace xmig::server
