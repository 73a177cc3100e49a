// What copies from page-locked memory brought, and copies to it took away, since the last snapshot: the program's buffers are
// its own again as soon as it knows that a copy is done, so a replay must not read or write them a second time.
//
// The bytes stay on the device, in slots of the shadow: keeping them costs a copy within the device's memory, where going
// through the host would cost the device a wait for it. Where a record's bytes are, the record says (reply_hash).
//
// A device that is lost takes them with it. A process that is to survive that has them in host memory (keep_on_host()).
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <vector>

#include "journal/layout.h"
#include "server/memory/shadow.h"

namespace xmig::server {

class CopyLog {
 public:
  explicit CopyLog(Shadow& shadow) : shadow_(shadow) {}

  // How much memory a device has: a small share of it may be used before a snapshot has to make room.
  void set_device(uint32_t ordinal, uint64_t bytes) {
    spaces_[ordinal].most = std::max(kLeast, bytes / 64 / journal::kGranule);
  }

  // From now on; what is on a device stays there until a snapshot releases it.
  void keep_on_host();
  // Of what is needed, so much is on a device.
  uint64_t bytes_on_device() const;
  // Does a replay from the last snapshot need bytes that the snapshot does not hold?
  bool is_needed() const { return !last_.empty(); }

  // Space for the bytes of the record at `position`, at most a granule. Nothing: a snapshot has to make room.
  std::optional<uint64_t> take(uint32_t ordinal, uint64_t bytes, uint64_t position);
  // Recovery: the record at `position` has its bytes there. False: that is no place of ours.
  bool keep(uint64_t address, uint64_t bytes, uint64_t position);
  bool holds(uint64_t address, uint64_t bytes) const;
  // A snapshot was committed: what lies before `position` needs no bytes. `all`: nor is the space to be kept for later.
  void release(uint64_t position, bool all);

 private:
  static constexpr uint64_t kLeast = 256;

  struct Space {
    uint64_t granule = 0;  // that is being filled; 0: none
    uint64_t used = 0;
    std::vector<uint64_t> empty;
    size_t count = 0;
    size_t most = kLeast;  // granules
  };
  Shadow& shadow_;
  bool on_host_ = false;
  std::array<Space, journal::kMaxDevices> spaces_;
  std::map<uint64_t, uint64_t> last_;  // by granule: the last position that uses it
};

}  // namespace xmig::server
