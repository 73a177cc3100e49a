#include "client/journal/context_storage.h"

#include <utility>
#include <vector>

namespace xmig::client {

const ContextStorage::Slot* ContextStorage::find(void* key) const {
  for (size_t i = 0, at = start(key); i < kSlots; ++i, at = (at + 1) % kSlots) {
    void* const there = slots_[at].key.load(std::memory_order_acquire);
    if (there == key) return &slots_[at];
    if (!there) return nullptr;
  }
  return nullptr;
}

CUresult ContextStorage::get(void* key, void** value) const {
  const Slot* const slot = key ? find(key) : nullptr;
  if (!slot || !slot->present.load(std::memory_order_acquire)) return CUDA_ERROR_INVALID_HANDLE;
  *value = slot->value.load(std::memory_order_relaxed);
  return CUDA_SUCCESS;
}

CUresult ContextStorage::put(void* key, void* value, Destructor destructor) {
  if (!key) return CUDA_ERROR_INVALID_VALUE;
  const std::lock_guard lock(mutex_);
  auto* slot = const_cast<Slot*>(find(key));
  if (!slot) {
    for (size_t i = 0, at = start(key); i < kSlots && !slot; ++i, at = (at + 1) % kSlots) {
      if (!slots_[at].key.load(std::memory_order_relaxed)) slot = &slots_[at];
    }
    if (!slot) return CUDA_ERROR_OUT_OF_MEMORY;
  }
  slot->destructor = destructor;
  slot->value.store(value, std::memory_order_relaxed);
  slot->present.store(true, std::memory_order_release);
  slot->key.store(key, std::memory_order_release);
  return CUDA_SUCCESS;
}

CUresult ContextStorage::remove(void* key) {
  const std::lock_guard lock(mutex_);
  auto* const slot = key ? const_cast<Slot*>(find(key)) : nullptr;
  if (!slot || !slot->present.exchange(false)) return CUDA_ERROR_INVALID_HANDLE;
  return CUDA_SUCCESS;
}

void ContextStorage::clear(CUcontext context) {
  struct Value {
    void* key;
    void* value;
    Destructor destructor;
  };
  std::vector<Value> values;
  {
    const std::lock_guard lock(mutex_);
    for (Slot& slot : slots_) {
      if (slot.present.exchange(false)) {
        values.push_back({slot.key.load(), slot.value.load(), slot.destructor});
      }
    }
  }
  for (const Value& value : values) {  // without the lock: a destructor may come back here
    if (value.destructor) value.destructor(context, value.key, value.value);
  }
}

}  // namespace xmig::client
