// Variables of modules whose addresses the driver has chosen: those that the program has requested, which have a twin in its own
// memory (docs/decisions/0004), and all others, which have a place there (cuda/objects/placed_variables.h).
//
// The executor's thread alone. A snapshot takes what was written to them (keep()), a recovery puts it back (restore()).
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "common/result.h"
#include "server/cuda/handlers/session.h"
#include "server/cuda/handlers/streams.h"
#include "server/cuda/objects/placed_variables.h"

namespace xmig::server {

class Variables {
 public:
  Variables(const Session& session, Streams& streams);
  Variables(const Variables&) = delete;

  // Where the device has what the program knows at this address.
  CUdeviceptr at(uint64_t address) const { return twins_.empty() ? address : twin_at(address); }
  // Parameters in which the addresses of twins are those of their variables. Nothing, if there are none. The journal keeps the
  // program's: the next server's driver places variables elsewhere.
  std::vector<std::byte> translated(std::span<const std::byte> parameters) const;
  bool has_twins() const { return !twins_.empty(); }
  const std::map<uint64_t, Variable>& twins() const { return twins_; }

  uint64_t bytes_for(uint32_t index, const Module& module, std::span<const std::byte> image) {
    return placed_.bytes_for(index, module, image);
  }
  // The module goes.
  void forget(uint32_t module);

  // For a snapshot: what has been written to variables since the last one is in the program's memory afterwards.
  void keep();
  // A recovery: a variable that had a twin; then, when memory has its content, variables become what that says.
  CUresult add_twin(uint32_t module, uint64_t address, std::string name);
  Result<> restore();

  CUresult on_xmGlobal(Record& record);
  CUresult on_xmTwin(Record& record);
  CUresult on_xmVariables(Record& record);

 private:
  CUdeviceptr twin_at(uint64_t address) const;
  void to_variable(Variable& variable);
  void from_variable(Variable& variable);

  const DriverTable& driver_;
  Contexts& contexts_;
  Faults& faults_;
  LiveSet& live_;
  Images& images_;
  Objects& objects_;
  const Granules& granules_;
  Streams& streams_;
  Current& current_;
  std::map<uint64_t, Variable> twins_;  // by the twin's address
  PlacedVariables placed_;
};

}  // namespace xmig::server
