// The device's handles: a slot's number and how often it has been used, so that a handle that is gone is noticed.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace xmig::device::cpu {

template <typename T, uint8_t Tag>
class Handles {
 public:
  uint64_t add(T value) {
    uint32_t index;
    if (free_.empty()) {
      index = static_cast<uint32_t>(slots_.size());
      slots_.emplace_back();
    } else {
      index = free_.back();
      free_.pop_back();
    }
    Slot& slot = slots_[index];
    slot.value = std::move(value);
    slot.used = true;
    return uint64_t{Tag} << 56 | uint64_t{slot.uses} << 32 | (index + 1);
  }

  T* find(uint64_t handle) {
    const uint32_t index = static_cast<uint32_t>(handle) - 1;
    if (handle >> 56 != Tag || index >= slots_.size()) return nullptr;
    Slot& slot = slots_[index];
    return slot.used && ((handle >> 32) & kUses) == slot.uses ? &slot.value : nullptr;
  }

  // The handle must have been found.
  T remove(uint64_t handle) {
    const uint32_t index = static_cast<uint32_t>(handle) - 1;
    Slot& slot = slots_[index];
    slot.used = false;
    slot.uses = (slot.uses + 1) & kUses;
    free_.push_back(index);
    return std::exchange(slot.value, T{});
  }

  // Removes every handle whose value satisfies `gone`.
  template <typename Gone>
  void remove_if(Gone&& gone) {
    for (uint32_t i = 0; i < slots_.size(); ++i)
      if (slots_[i].used && gone(slots_[i].value)) remove(uint64_t{i} + 1);
  }

 private:
  static constexpr uint32_t kUses = 0xffffff;
  struct Slot {
    T value{};
    uint32_t uses = 0;
    bool used = false;
  };
  std::vector<Slot> slots_;
  std::vector<uint32_t> free_;
};

template <typename H>
uint64_t number(H handle) {
  return reinterpret_cast<uint64_t>(handle);
}
template <typename H>
H as_handle(uint64_t n) {
  return reinterpret_cast<H>(n);
}

}  // namespace xmig::device::cpu
