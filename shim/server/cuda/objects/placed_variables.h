// The variables of modules that the driver has placed, whether the program has requested one or not: what kernels leave in them
// is kept in the program's own memory, and so comes through whatever that comes through (docs/decisions/0031).
//
// Invariants:
//   A module has a place before any of its kernels runs; then its variables are as the image has them.
//   From keep() to the next work of the device the places have what the variables have.
//   A variable that was never written has no content in its place: a later server's own is right.
//   Of content with addresses the place has the words that the program has changed, and the first server's of the others.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "device/device.h"
#include "server/channel/daemon.h"
#include "server/contexts.h"
#include "server/cuda/objects/objects.h"
#include "server/cuda/objects/variable_directory.h"

namespace xmig::server {

class PlacedVariables {
 public:
  // Where the device hashes and copies for a snapshot, by ordinal.
  using Where = std::function<device::Runtime::Where(uint32_t)>;

  PlacedVariables(device::Device& device, Contexts& contexts, Log& log)
      : device_(device), driver_(device.driver()), contexts_(contexts), log_(log) {}

  // How large a module's place has to be; 0: it needs none, or has one.
  uint64_t bytes_for(uint32_t index, const Module& module, std::span<const std::byte> image);
  // The module's place, given by the program. `stream`: of the module's device, and nothing else is done in it.
  CUresult create(uint32_t index, const Module& module, std::span<const std::byte> image, uint64_t address, uint64_t bytes,
                  CUstream stream);
  // A place that an earlier server had. What it has may not have come yet.
  CUresult adopt(uint32_t index, const Module& module, uint64_t address, uint64_t bytes);
  // It has: the variables of modules that were adopted become what their places say. Otherwise why they cannot.
  using Find = std::function<const Module&(uint32_t)>;
  using Streams = std::function<CUstream(uint32_t)>;  // by ordinal
  Result<> restore(const Find& module, const Streams& streams);
  // What variables are now is what their places say. The device is idle, here and below. False: it cannot hash, or copy.
  bool learn(const Where& where);
  // The places become what variables are.
  bool keep(const Where& where);
  void forget(uint32_t index);
  bool empty() const { return places_.empty(); }

 private:
  struct Variable {
    KeptVariable kept;
    CUdeviceptr real = 0;
    // Of one whose first content has addresses: what that is in this process, and in the one that the place is from.
    std::vector<std::byte> first, original;
  };
  struct Place {
    uint32_t ordinal = 0;
    uint64_t address = 0, bytes = 0;
    bool adopted = false;  // and not restored yet
    std::vector<Variable> variables;
    std::vector<device::Chunk> pieces;  // of all variables, in their order
    std::vector<uint64_t> hashes;
  };
  struct Layout {
    uint64_t bytes = 0;
    std::vector<KeptVariable> variables;
    std::vector<CUdeviceptr> real;  // where the driver has them
  };

  const Layout& layout(uint32_t index, const Module& module, std::span<const std::byte> image);
  static void split_up(Place& place);
  Result<> restore(Place& place, const Module& module, CUstream stream);
  // f(Place&, hashes) for each place, with what its pieces hash to.
  template <typename F>
  bool hash(const Where& where, F&& f);
  CUresult keep_changed(Place& place, std::span<const uint64_t> hashes, CUstream stream, std::vector<device::Move>& moves);
  CUresult read(uint64_t address, std::span<std::byte> to, CUstream stream);
  CUresult write(uint64_t address, std::span<const std::byte> from, CUstream stream);
  CUresult write_directory(const Place& place, CUstream stream);

  device::Device& device_;
  const DriverTable& driver_;
  Contexts& contexts_;
  Log& log_;
  bool reported_refused_ = false;
  std::map<uint32_t, Layout> layouts_;  // by module, of those that have no place yet
  std::map<uint32_t, Place> places_;    // by module
};

}  // namespace xmig::server
