// What records do: a class for each family, which has the family's state. A record's number says which function of them executes it:
// kHandlers, a table that is generated (shim/api/generate.py, from HANDLERS in table.py).
//
// Families know each other one way only, in the order of the fields below; but a graph's nodes are records, and may be of others.
//
// The executor's thread alone, but for `outside`.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "server/cuda/handlers/addresses.h"
#include "server/cuda/handlers/collectives.h"
#include "server/cuda/handlers/copies.h"
#include "server/cuda/handlers/events.h"
#include "server/cuda/handlers/graphs.h"
#include "server/cuda/handlers/host_functions.h"
#include "server/cuda/handlers/intake.h"
#include "server/cuda/handlers/launches.h"
#include "server/cuda/handlers/memory.h"
#include "server/cuda/handlers/modules.h"
#include "server/cuda/handlers/outside_waits.h"
#include "server/cuda/handlers/peers.h"
#include "server/cuda/handlers/program_contexts.h"
#include "server/cuda/handlers/session.h"
#include "server/cuda/handlers/streams.h"
#include "server/cuda/handlers/tensor_maps.h"
#include "server/cuda/handlers/variables.h"

namespace xmig::server {

struct Handlers final : Preserved {
  Handlers(const Session& session, ModulePreload& preload, PreparedCommunicators& prepared, Snapshots& snapshots, Relocation& relocation);
  Handlers(const Handlers&) = delete;
  // Every object of the program, and what handlers have made for themselves. The device has nothing to do.
  void destroy_all();
  void describe(SnapshotContent& content, std::vector<uint64_t>& images) override;

  const DriverTable& driver;
  Objects& objects;
  Contexts& real_contexts;
  OutsideWaits outside;
  Intake intake;
  Streams streams;
  Variables variables;
  Addresses addresses;
  Peers peers;
  Events events;
  Copies copies;
  HostFunctions host_functions;
  Collectives collectives;
  Modules modules;
  Launches launches;
  Graphs graphs;
  Memory memory;
  ProgramContexts contexts;
  TensorMaps tensor_maps;

  // For what is generated: as Objects::translate(); objects come and go.
  bool translate(uint64_t handle, CUstream* real) { return streams.translate(handle, real); }
  template <typename Real>
  bool translate(uint64_t handle, Real* real) {
    return objects.translate(handle, real);
  }
  void created(uint64_t handle, CUstream real, const Record& record) { streams.created(handle, real, record); }
  void created(uint64_t handle, CUevent real, const Record& record) { events.created(handle, real, record); }
  void destroyed(uint64_t handle, CUevent) { objects.events.erase(journal::handle_index(handle)); }
};

using Handler = CUresult (*)(Handlers&, Record&);
extern const Handler kHandlers[];  // by Op; generated

}  // namespace xmig::server
