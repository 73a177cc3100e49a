// Where cuts keep content: slots of one granule, in slabs that are hosted like device memory.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "server/physical.h"

namespace xmig::server {

class Shadow {
 public:
  explicit Shadow(Physical& physical) : physical_(physical) {}
  ~Shadow() {
    for (auto& [address, slab] : slabs_) physical_.release(slab.memory);
  }
  Shadow(const Shadow&) = delete;

  // A slot near the device `ordinal`, as an address of this process. From host memory where the device has no room, or
  // where `host` says that it needs the room itself. `wanted`: how many will be asked for now, this one included.
  // Nothing: there is no memory at all.
  std::optional<uint64_t> allocate(uint32_t ordinal, bool host, uint64_t wanted = 1);
  void free(uint64_t slot);
  bool on_device(uint64_t slot) const;
  bool has_device_slabs(uint32_t ordinal) const { return device_bytes(ordinal) != 0; }
  uint64_t device_bytes(uint32_t ordinal) const;
  // Give empty slabs back.
  void trim();

  CUresult adopt(Hosted memory);
  // Recovery: this slot holds content. False if it is in no slab.
  bool take(uint64_t slot);

  template <typename F>
  void for_each(F&& f) const {
    for (const auto& [address, slab] : slabs_) f(slab.memory);
  }

 private:
  struct Slab {
    Hosted memory;
    std::vector<bool> used;
    size_t used_count = 0;
  };
  using Map = std::map<uint64_t, Slab>;

  Map::iterator containing(uint64_t slot);
  Map::const_iterator containing(uint64_t slot) const { return const_cast<Shadow*>(this)->containing(slot); }
  std::optional<uint64_t> gap(uint32_t ordinal, uint64_t bytes) const;
  Slab* add_slab(uint32_t ordinal, bool host, uint64_t wanted);

  Physical& physical_;
  Map slabs_;
};

}  // namespace xmig::server
