// Values that libraries keep per context ("context-local storage", one of the driver's unpublished tables). Every copy
// of libcudart looks its own value up in about every call, so looking up takes no lock.
//
// A slot, once claimed by a key, belongs to that key for ever: the keys are addresses of variables of libraries, few,
// and a reader can never meet the value of another key.
#pragma once

#include <cuda.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

namespace xmig::client {

class ContextStorage {
 public:
  using Destructor = void (*)(CUcontext, void* key, void* value);

  CUresult put(void* key, void* value, Destructor destructor);
  CUresult remove(void* key);
  CUresult get(void* key, void** value) const;
  // The context is gone: every value is forgotten, and its destructor run.
  void clear(CUcontext context);

 private:
  struct Slot {
    std::atomic<void*> key{nullptr};
    std::atomic<void*> value{nullptr};
    std::atomic<bool> present{false};
    Destructor destructor = nullptr;  // under mutex_
  };
  static constexpr size_t kSlots = 256;

  static size_t start(void* key) { return (reinterpret_cast<uintptr_t>(key) * 0x9e3779b97f4a7c15ull) >> 56; }
  const Slot* find(void* key) const;

  std::mutex mutex_;  // of writers
  std::array<Slot, kSlots> slots_;
};

}  // namespace xmig::client
