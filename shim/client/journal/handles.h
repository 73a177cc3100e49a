// Numbers for objects, and flat tables from a number to an object.
//
// A freed number goes to the end of a queue. Reuse is safe in any case (the record that destroys an object lies before
// the one that makes the next of this number, at a replay too); the queue is there so that a program that goes on using a
// destroyed handle is reported as such, for a while, instead of being given another object.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>

#include "client/journal/append.h"
#include "journal/layout.h"

namespace xmig::client {

class Numbers {
 public:
  // From `step` on, its multiples; none when all below `limit` are in use.
  explicit Numbers(uint32_t limit, uint32_t step = 1) : limit_(limit), step_(step), next_(step) {}

  std::optional<uint32_t> take();
  void give(uint32_t number);

 private:
  static constexpr size_t kMinimumQueue = 256;  // so many are free before one is used again
  const uint32_t limit_, step_;
  std::mutex mutex_;
  uint32_t next_;
  std::deque<uint32_t> free_;
};

// How many objects of a kind there can be; what the server's tables take.
constexpr uint32_t number_limit(journal::Kind kind) {
  switch (kind) {
    case journal::Kind::kEvent:
      return journal::kMaxEvents;
    case journal::Kind::kCommunicator:
      return journal::kMaxCommunicators;
    case journal::Kind::kStream:
    case journal::Kind::kModule:
    case journal::Kind::kLibrary:
      return 1u << 16;
    default:
      return 1u << 20;
  }
}

// Objects by number. T is default-constructible and is never destroyed: what comes and goes is `T::alive` (an
// atomic<bool>), so a lookup takes no lock and meets no freed memory.
template <typename T, uint32_t kLimit>
class Table {
 public:
  // The object's place, made if need be. The caller owns the number.
  T& place(uint32_t number) {
    std::atomic<Chunk*>& chunk = chunks_[number / kChunk];
    Chunk* there = chunk.load(std::memory_order_acquire);
    if (!there) {
      auto* const made = new Chunk;
      if (chunk.compare_exchange_strong(there, made, std::memory_order_acq_rel)) {
        there = made;
      } else {
        delete made;
      }
    }
    return (*there)[number % kChunk];
  }
  // nullptr unless it is alive.
  T* find(uint64_t handle, journal::Kind kind) const {
    if (!journal::handle_is(handle, kind)) return nullptr;
    const uint32_t number = journal::handle_index(handle);
    if (number >= kLimit) return nullptr;
    Chunk* const chunk = chunks_[number / kChunk].load(std::memory_order_acquire);
    if (!chunk) return nullptr;
    T& object = (*chunk)[number % kChunk];
    return object.alive.load(std::memory_order_acquire) ? &object : nullptr;
  }
  template <typename F>
  void for_each(F&& f) const {
    for (uint32_t i = 0; i < chunks_.size(); ++i) {
      Chunk* const chunk = chunks_[i].load(std::memory_order_acquire);
      if (!chunk) continue;
      for (uint32_t j = 0; j < kChunk; ++j) {
        if ((*chunk)[j].alive.load(std::memory_order_acquire)) f(i * kChunk + j, (*chunk)[j]);
      }
    }
  }

 private:
  static constexpr uint32_t kChunk = 256;
  using Chunk = std::array<T, kChunk>;
  static_assert(kLimit % kChunk == 0);
  std::array<std::atomic<Chunk*>, kLimit / kChunk> chunks_{};
};

}  // namespace xmig::client
