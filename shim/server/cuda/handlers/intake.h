// The way of bytes from the program's page-locked memory into the copy log: a stream of the server's own.
//
// A copy's bytes are in its source when the program asks for the copy, unless the device or a function of the program has
// yet to write them. So they need not wait for the work before the copy: they are brought while the device computes, and
// what remains in the program's stream is a copy within the device's memory.
#pragma once

#include <array>
#include <cstdint>
#include <map>

#include "driver_table.h"
#include "journal/layout.h"

namespace xmig::server {

class Intake {
 public:
  explicit Intake(const DriverTable& driver) : driver_(driver) {}
  // The contexts are gone after this.
  template <typename Use>
  void close(Use&& use) {
    for (uint32_t ordinal = 0; ordinal < ways_.size(); ++ordinal) {
      if (!ways_[ordinal].stream) continue;
      use(ordinal);
      if (ways_[ordinal].brought) driver_.cuEventDestroy_v2(ways_[ordinal].brought);
      driver_.cuStreamDestroy_v2(ways_[ordinal].stream);
      ways_[ordinal] = {};
    }
  }

  // The stream; its context is current. Null if it cannot be made.
  CUstream stream(uint32_t ordinal);
  // Null if nothing has ever come this way.
  CUstream existing(uint32_t ordinal) const { return ways_[ordinal].stream; }
  // What is put into `stream` from now on waits for what has been put into ours.
  CUresult join(uint32_t ordinal, CUstream stream);

  // The device will write this, some time before drained(): copies from it take their turn.
  void will_write(uint64_t address, uint64_t bytes);
  // The device may write any page-locked memory.
  void may_write_all() { all_ = true; }
  bool is_written(uint64_t address, uint64_t bytes) const;
  void drained() {
    written_.clear();
    all_ = false;
  }

 private:
  struct Way {
    CUstream stream = nullptr;
    CUevent brought = nullptr;
  };
  const DriverTable& driver_;
  std::array<Way, journal::kMaxDevices> ways_{};
  std::map<uint64_t, uint64_t> written_;  // end by beginning, apart from each other
  bool all_ = false;
};

}  // namespace xmig::server
