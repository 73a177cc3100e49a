// Graphs: the client's image of one becomes a graph of the driver.
//
// Every node is captured from a stream of the server's: the node's records go through the same handlers as any other
// record, only that Streams::translate() answers with that stream. So there is one way to launch a kernel, and a recovery, which
// builds the graphs again from their images, finds the same addresses in them.
//
// The executor's thread alone.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "server/cuda/handlers/addresses.h"
#include "server/cuda/handlers/session.h"
#include "server/cuda/handlers/streams.h"

namespace xmig::server {

struct Handlers;

class Graphs {
 public:
  // `handlers`: of the nodes' records.
  Graphs(const Session& session, Streams& streams, Addresses& addresses, Handlers& handlers);
  Graphs(const Graphs&) = delete;
  void destroy_all();

  CUresult destroy(const GraphExec& graph);

  CUresult on_xmGraph(Record& record);
  CUresult on_xmGraphLaunch(Record& record);
  CUresult on_xmGraphDestroy(Record& record);

 private:
  class Builder;

  uint32_t home_of_work(Op op, std::span<const std::byte> arguments);
  GraphExec* find(uint64_t handle);
  CUresult make(std::span<const std::byte> image, uint64_t flags, GraphExec& made, GraphExec* before);

  const DriverTable& driver_;
  Contexts& contexts_;
  Log& log_;
  Images& images_;
  Objects& objects_;
  Current& current_;
  Schedule& schedule_;
  Streams& streams_;
  Addresses& addresses_;
  Handlers& handlers_;
};

}  // namespace xmig::server
