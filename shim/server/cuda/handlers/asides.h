// Streams of ours beside one of the program's, on another device: work on that device's memory goes there, in the order of the
// program's stream. The executor's thread alone.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>
#include <map>
#include <tuple>

#include "driver_table.h"
#include "journal/layout.h"
#include "server/contexts.h"
#include "server/executor/working.h"

namespace xmig::server {

class Asides {
 public:
  Asides(const DriverTable& driver, Contexts& contexts, Working& working)
      : driver_(driver), contexts_(contexts), working_(working) {}
  Asides(const Asides&) = delete;

  // From `stream`, which is of the device `home`, to one on `ordinal`, whose context is current afterwards; and back.
  CUresult step(uint32_t home, CUstream stream, uint32_t ordinal, CUstream* aside);
  CUresult come_back(uint32_t home, CUstream stream, uint32_t ordinal, CUstream aside);
  // Of a stream that is about to be destroyed. What they still have to do the stream itself waits for.
  void drop(CUstream gone);
  // The contexts are gone after this.
  void close();

 private:
  CUresult mark_of(uint32_t ordinal, CUevent* mark);

  const DriverTable& driver_;
  Contexts& contexts_;
  Working& working_;
  std::map<std::tuple<uint32_t, CUstream, uint32_t>, CUstream> asides_;  // by home, the program's stream, ordinal
  std::array<CUevent, journal::kMaxDevices> marks_{};
};

}  // namespace xmig::server
