// Copies between a device and memory of this process that the device cannot reach, as that of files: through small
// page-locked buffers, on several threads, each with one buffer that the device works on and one that the processor does.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "device/device.h"
#include "driver_table.h"

namespace xmig::server {

class Bounce {
 public:
  // `use_ordinal` makes a device's context the calling thread's current one.
  Bounce(const DriverTable& driver, std::function<void(uint32_t)> use_ordinal)
      : driver_(driver), use_ordinal_(std::move(use_ordinal)) {}

  struct Piece {
    uint64_t device;
    std::byte* plain;
    uint32_t ordinal;
  };
  // One granule each. The device is drained. False: the device failed, or there is no memory for the buffers.
  bool to_plain(std::span<const Piece> pieces) { return copy(pieces, true); }
  bool to_device(std::span<const Piece> pieces) { return copy(pieces, false); }

 private:
  class Lane;
  bool copy(std::span<const Piece> pieces, bool to_plain);

  const DriverTable& driver_;
  const std::function<void(uint32_t)> use_ordinal_;
};

}  // namespace xmig::server
