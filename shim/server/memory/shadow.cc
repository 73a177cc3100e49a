#include "server/memory/shadow.h"

#include <algorithm>

namespace xmig::server {
namespace {

using journal::kGranule;

constexpr uint64_t kSmallestSlab = 8 * kGranule;

}  // namespace

Shadow::Map::iterator Shadow::containing(uint64_t slot) {
  auto it = slabs_.upper_bound(slot);
  if (it == slabs_.begin()) return slabs_.end();
  --it;
  return slot - it->first < it->second.memory.bytes ? it : slabs_.end();
}

void Shadow::note_room(uint64_t address, const Slab& slab) {
  if (slab.used_count < slab.used.size() && !slab.memory.sealed) {
    with_room_.insert(address);
  } else {
    with_room_.erase(address);
  }
}

std::optional<uint64_t> Shadow::gap(uint32_t ordinal, Place place, uint64_t bytes) const {
  const bool device = place == Place::kDevice;
  uint64_t address = device ? shadow_base(ordinal) : host_shadow_base(ordinal);
  const uint64_t end = device ? host_shadow_base(ordinal) : shadow_base(ordinal) + kShadowSpan;
  auto slab = slabs_.lower_bound(address);
  auto aside = set_aside_.lower_bound(address);
  while (true) {
    const uint64_t next_slab = slab == slabs_.end() ? end : slab->first;
    const uint64_t next_aside = aside == set_aside_.end() ? end : aside->first;
    const uint64_t next = std::min({next_slab, next_aside, end});
    if (next == end) break;
    if (next - address >= bytes) return address;
    address = next == next_slab ? next + (slab++)->second.memory.bytes : next + (aside++)->second;
  }
  if (end - address < bytes) return std::nullopt;
  return address;
}

// `locked`: host memory with an address that the device reaches.
Result<Hosted> Shadow::make_memory(uint32_t ordinal, Place place, uint64_t address, uint64_t bytes, bool locked) {
  constexpr HostedKind kKind = HostedKind::kShadow;
  if (place == Place::kDevice) return physical_.create(kKind, ordinal, address, bytes);
  if (place == Place::kFile) return physical_.create_file(kKind, ordinal, address, bytes);
  if (locked) return physical_.create_host(kKind, ordinal, address, bytes);
  return physical_.create_memfd(kKind, ordinal, address, bytes);
}

Shadow::Slab* Shadow::add_slab(uint32_t ordinal, Place place, uint64_t wanted, bool locked) {
  const uint64_t largest = place == Place::kHost && !locked ? kPlainBytes : kLargestSlab;
  const uint64_t most = std::clamp(wanted * kGranule, kSmallestSlab, largest);
  for (const uint64_t bytes : {most, kGranule}) {  // where there is no room for much there may be room for one
    const auto address = gap(ordinal, place, bytes);
    if (!address) continue;
    Result<Hosted> memory = make_memory(ordinal, place, *address, bytes, locked);
    if (!memory) continue;
    return &add(*std::move(memory));
  }
  return nullptr;
}

Shadow::Slab* Shadow::slab_with_room(uint32_t ordinal, Place place, bool locked) {
  for (auto it = with_room_.lower_bound(shadow_base(ordinal)); it != with_room_.end(); ++it) {
    if (ordinal_of_slot(*it) != ordinal) break;
    Slab& slab = slabs_.at(*it);
    const bool plain = place == Place::kHost && !locked;
    if (!slab.memory.foreign && slab.memory.place() == place && (place != Place::kHost || slab.memory.plain() == plain)) return &slab;
  }
  return nullptr;
}

std::optional<uint64_t> Shadow::take_from(Slab* slab) {
  if (!slab) return std::nullopt;
  const auto free = std::find(slab->used.begin(), slab->used.end(), false);
  *free = true;
  ++slab->used_count;
  note_room(slab->memory.address, *slab);
  return slab->memory.address + static_cast<uint64_t>(free - slab->used.begin()) * kGranule;
}

std::optional<uint64_t> Shadow::allocate(uint32_t ordinal, Place place, uint64_t wanted, bool strictly) {
  const bool instead = place == Place::kDevice && !strictly;
  Slab* slab = slab_with_room(ordinal, place, false);
  if (!slab && instead) slab = slab_with_room(ordinal, Place::kHost, true);
  if (!slab) slab = add_slab(ordinal, place, wanted, false);
  if (!slab && instead) slab = add_slab(ordinal, Place::kHost, wanted, true);
  return take_from(slab);
}

std::optional<uint64_t> Shadow::allocate_in_reach(uint32_t ordinal) {
  Slab* slab = slab_with_room(ordinal, Place::kHost, true);
  return take_from(slab ? slab : add_slab(ordinal, Place::kHost, 1, true));
}

void Shadow::free(uint64_t slot) {
  const auto it = containing(slot);
  if (it == slabs_.end()) return;
  it->second.used[(slot - it->first) / kGranule] = false;
  --it->second.used_count;
  note_room(it->first, it->second);
}

bool Shadow::on_device(uint64_t slot) const {
  const auto it = containing(slot);
  return it != slabs_.end() && it->second.memory.place() == Place::kDevice;
}

Place Shadow::place(uint64_t slot) const {
  const auto it = containing(slot);
  return it == slabs_.end() ? Place::kDevice : it->second.memory.place();
}

std::optional<Shadow::PlainAt> Shadow::plain_at(uint64_t slot) const {
  const auto it = containing(slot);
  if (it == slabs_.end() || !it->second.memory.plain()) return std::nullopt;
  return PlainAt{it->second.memory.fd.get(), slot - it->first, it->second.memory.mapped};
}

std::optional<uint64_t> Shadow::set_aside(uint32_t ordinal, Place place, uint64_t bytes) {
  const auto address = gap(ordinal, place, bytes);
  if (address) set_aside_.emplace(*address, bytes);
  return address;
}

void Shadow::add_held(Hosted memory) {
  set_aside_.erase(memory.address);
  add(std::move(memory)).held = true;
}

Shadow::Slab& Shadow::add(Hosted memory) {
  const uint64_t address = memory.address;
  Slab slab;
  slab.used.assign(memory.bytes / kGranule, false);
  slab.memory = std::move(memory);
  note_room(address, slab);
  return slabs_.emplace(address, std::move(slab)).first->second;
}

std::vector<Shadow::Room> Shadow::held_rooms() const {
  std::vector<Room> rooms;
  for (const auto& [address, slab] : slabs_) {
    if (!slab.held || slab.memory.name != kPlainName) continue;
    for (size_t i = 0; i < slab.used.size(); ++i) {
      if (slab.used[i]) continue;
      if (i > 0 && !slab.used[i - 1]) {
        rooms.back().bytes += kGranule;
      } else {
        rooms.push_back({{slab.memory.fd.get(), i * kGranule}, kGranule});
      }
    }
  }
  return rooms;
}

std::vector<Shadow::PlainAt> Shadow::unused_plain() const {
  std::vector<PlainAt> unused;
  for (const auto& [address, slab] : slabs_) {
    if (!slab.memory.plain()) continue;
    for (size_t i = 0; i < slab.used.size(); ++i) {
      if (!slab.used[i]) unused.push_back({slab.memory.fd.get(), i * kGranule});
    }
  }
  return unused;
}

void Shadow::unhold() {
  for (auto& [address, slab] : slabs_) slab.held = false;
}

uint64_t Shadow::device_bytes(uint32_t ordinal) const {
  uint64_t sum = 0;
  for (const auto& [address, slab] : slabs_) {
    const bool ours = slab.memory.place() == Place::kDevice && !slab.memory.foreign;
    if (ours && ordinal_of_slot(address) == ordinal) sum += slab.memory.bytes;
  }
  return sum;
}

bool Shadow::trim(size_t most) {
  for (auto it = slabs_.begin(); it != slabs_.end();) {
    if (it->second.used_count != 0 || it->second.held) {
      ++it;
    } else if (most-- == 0) {
      return true;
    } else {
      physical_.release(it->second.memory);
      with_room_.erase(it->first);
      it = slabs_.erase(it);
    }
  }
  return false;
}

Status Shadow::adopt(Hosted memory) {
  if (!in_place(HostedKind::kShadow, static_cast<uint32_t>(memory.ordinal), memory.address, memory.bytes)) {
    return Problem::kInvalid;
  }
  const auto next = slabs_.lower_bound(memory.address);
  if ((next != slabs_.end() && next->first - memory.address < memory.bytes) ||
      containing(memory.address) != slabs_.end()) {
    return Problem::kMapped;
  }
  if (const Status result = physical_.adopt(memory); !result) return result;
  add(std::move(memory));
  return {};
}

bool Shadow::forget(uint64_t id) {
  for (auto it = slabs_.begin(); it != slabs_.end(); ++it) {
    if (it->second.memory.id != id) continue;
    physical_.let_go(it->second.memory);
    with_room_.erase(it->first);
    slabs_.erase(it);
    return true;
  }
  return false;
}

void Shadow::avoid(const std::vector<uint64_t>& slots) {
  auto last = set_aside_.end();
  for (const uint64_t slot : slots) {
    if (last != set_aside_.end() && last->first + last->second == slot) {
      last->second += kGranule;
    } else {
      last = set_aside_.emplace(slot, kGranule).first;
    }
  }
}

Result<std::vector<Hosted>> Shadow::make_again(uint32_t ordinal, const std::vector<uint64_t>& slots) {
  // Small holes between them are made, too: many small slabs would hold many descriptors.
  std::vector<Extent> wanted;
  for (const uint64_t slot : slots) {
    const auto fits = [&](const Extent& last) {
      return slot - (last.address + last.bytes) <= kSmallestSlab && slot + kGranule - last.address <= kLargestSlab &&
             slabs_.lower_bound(last.address) == slabs_.lower_bound(slot);  // nothing lies between
    };
    if (!wanted.empty() && fits(wanted.back())) {
      wanted.back().bytes = slot + kGranule - wanted.back().address;
    } else {
      wanted.push_back({slot, kGranule});
    }
  }
  std::vector<Hosted> made;
  for (const Extent& extent : wanted) {
    Result<Hosted> memory = physical_.create(HostedKind::kShadow, ordinal, extent.address, extent.bytes, Physical::When::kBeforehand);
    if (!memory) {
      for (Hosted& one : made) physical_.let_go(one);
      return memory.error();
    }
    made.push_back(*std::move(memory));
  }
  return made;
}

void Shadow::add_again(std::vector<Hosted> memory, const std::vector<uint64_t>& slots) {
  for (Hosted& one : memory) {
    physical_.daemon().memory_add(one);
    set_aside_.erase(set_aside_.lower_bound(one.address), set_aside_.lower_bound(one.address + one.bytes));
    add(std::move(one));
  }
  for (const uint64_t slot : slots) take(slot);
}

bool Shadow::is_foreign(uint64_t slot) const {
  const auto it = containing(slot);
  return it != slabs_.end() && it->second.memory.foreign;
}

bool Shadow::is_sealed(uint64_t slot) const {
  const auto it = containing(slot);
  return it != slabs_.end() && it->second.memory.sealed;
}

bool Shadow::has_foreign() const {
  return std::any_of(slabs_.begin(), slabs_.end(), [](const auto& entry) { return entry.second.memory.foreign; });
}

bool Shadow::take(uint64_t slot) {
  const auto it = containing(slot);
  if (it == slabs_.end() || slot % kGranule != 0) return false;
  const size_t index = (slot - it->first) / kGranule;
  if (it->second.used[index]) return false;  // two chunks in one slot: not a snapshot of ours
  it->second.used[index] = true;
  ++it->second.used_count;
  note_room(it->first, it->second);
  return true;
}

}  // namespace xmig::server
