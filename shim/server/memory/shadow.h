// Where snapshots keep content: slots of one granule, in slabs that are hosted like device memory.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <vector>

#include "server/memory/physical.h"

namespace xmig::server {

// Of which device it is a slot.
inline uint32_t ordinal_of_slot(uint64_t slot) { return static_cast<uint32_t>((slot - kShadowBase) / kShadowSpan); }

class Shadow {
 public:
  // A slab is as large as what is requested at once: nothing stays empty, and a large job holds few descriptors.
  static constexpr uint64_t kLargestSlab = 512 * journal::kGranule;

  explicit Shadow(Physical& physical) : physical_(physical) {}
  ~Shadow() {
    for (auto& [address, slab] : slabs_) physical_.release(slab.memory);
  }
  Shadow(const Shadow&) = delete;

  // A slot for the device `ordinal`. One on the device is an address of this process, also where, without `strictly`, it
  // is from host memory because the device has no room; one elsewhere is plain (plain_at). `wanted`: how many will
  // be requested now, this one included. Nothing: there is no memory.
  std::optional<uint64_t> allocate(uint32_t ordinal, Place place, uint64_t wanted = 1, bool strictly = false);
  // One in host memory, at an address that the device reaches.
  std::optional<uint64_t> allocate_in_reach(uint32_t ordinal);
  void free(uint64_t slot);
  Place place(uint64_t slot) const;
  // Where a slot of plain memory is: its descriptor, and the offset in it; `mapped`: and at its address. Nothing if the
  // slot has an address that the device reaches.
  struct PlainAt {
    int fd;
    uint64_t offset;
    bool mapped = false;
  };
  std::optional<PlainAt> plain_at(uint64_t slot) const;

  // Room is made beforehand, while others work: addresses are set aside; then the slab is made, which takes long; then it
  // is added, or the addresses are given up. What was made so is kept, also while it is empty, until unhold().
  std::optional<uint64_t> set_aside(uint32_t ordinal, Place place, uint64_t bytes);
  void add_held(Hosted memory);
  void give_up(uint64_t address) { set_aside_.erase(address); }
  // Where these have not been used yet, in memory without an address.
  struct Room {
    PlainAt at;
    uint64_t bytes;
  };
  std::vector<Room> held_rooms() const;
  void unhold();
  // Of memory without an address, what no snapshot uses: it may be copies of what an earlier server had (snapshot/host_copies.h).
  std::vector<PlainAt> unused_plain() const;
  bool on_device(uint64_t slot) const;  // this server's, or the one that the job was on before
  uint64_t device_bytes(uint32_t ordinal) const;
  // Give so many empty slabs back. False: there are no more.
  bool trim(size_t most = ~0ull);

  Status adopt(Hosted memory);
  // A move: the server that holds this memory gives it up. False if it is none of these.
  bool forget(uint64_t id);
  // These slots, in order, lie nowhere any more. Nothing else is to come to their places as long as the last snapshot names them.
  void avoid(const std::vector<uint64_t>& slots);
  // Memory of the device for such slots, in order, at the same places; all of it, or none. The daemon hears of it when they hold content
  // again: until then a next server must not find them.
  Result<std::vector<Hosted>> make_again(uint32_t ordinal, const std::vector<uint64_t>& slots);
  void add_again(std::vector<Hosted> memory, const std::vector<uint64_t>& slots);
  // Is the slot in a slab that is mapped here?
  bool maps(uint64_t slot) const { return slot % journal::kGranule == 0 && containing(slot) != slabs_.end(); }
  // Is it memory of the device that the job was on before?
  bool is_foreign(uint64_t slot) const;
  bool has_foreign() const;
  // May nothing be written there?
  bool is_sealed(uint64_t slot) const;
  // Recovery: this slot holds content. False if it is in no slab.
  bool take(uint64_t slot);

  template <typename F>
  void for_each(F&& f) const {
    for (const auto& [address, slab] : slabs_) f(slab.memory);
  }

 private:
  struct Slab {
    Hosted memory;
    bool held = false;  // also while it is empty
    std::vector<bool> used;
    size_t used_count = 0;
  };
  using Map = std::map<uint64_t, Slab>;

  Map::iterator containing(uint64_t slot);
  Map::const_iterator containing(uint64_t slot) const { return const_cast<Shadow*>(this)->containing(slot); }
  std::optional<uint64_t> gap(uint32_t ordinal, Place place, uint64_t bytes) const;
  Result<Hosted> make_memory(uint32_t ordinal, Place place, uint64_t address, uint64_t bytes, bool locked);
  Slab* slab_with_room(uint32_t ordinal, Place place, bool locked);
  std::optional<uint64_t> take_from(Slab* slab);
  Slab& add(Hosted memory);
  Slab* add_slab(uint32_t ordinal, Place place, uint64_t wanted, bool locked);

  void note_room(uint64_t address, const Slab& slab);

  Physical& physical_;
  Map slabs_;
  std::set<uint64_t> with_room_;  // addresses of slabs that have a free slot, which may be written
  std::map<uint64_t, uint64_t> set_aside_;  // bytes, by address
};

}  // namespace xmig::server
