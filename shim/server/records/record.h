// One record while it is executed: a private copy of what decides anything, and the places in the ring that data is
// read from and the reply goes to.
//
// What lies in this folder: record (checked once, here, before anybody acts upon it), stored_records (those that a snapshot keeps),
// reader (for bytes of which nothing is believed).
#pragma once

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "journal/layout.h"
#include "journal/record_info.h"

namespace xmig::server {

class Record {
 public:
  // Copy the record at `shared`, of which `available` bytes may be read. False, and `why`, if it is none.
  bool load(std::byte* shared, uint64_t available, uint64_t expected_sequence, uint32_t devices, const char*& why) {
    if (available < sizeof(journal::RecordHeader)) return fail("shorter than a record's header", why);
    shared_ = reinterpret_cast<journal::RecordHeader*>(shared);
    std::memcpy(static_cast<void*>(&header_), shared, sizeof(header_));
    const uint32_t size = header_.size;
    if (size > available || size % 8 != 0) return fail("the size runs past the tail, or is no multiple of 8", why);
    if (header_.op == 0 || header_.op >= kRecordKinds) return fail("unknown operation", why);
    info_ = &kRecordInfos[header_.op];
    const uint64_t payload_at = sizeof(header_) + journal::align8(info_->args_bytes);
    const uint64_t reply_at = payload_at + journal::align8(header_.payload);
    if (reply_at + journal::align8(header_.reply) > size) return fail("the parts are longer than the whole", why);
    if (header_.payload > journal::kMaxPayload) return fail("the payload is too long", why);
    if (header_.sequence != expected_sequence) return fail("the sequence number is not the next one", why);
    if (header_.thread >= journal::kMaxThreads) return fail("no such thread slot", why);
    if (header_.ordinal >= devices) return fail("no such device", why);
    if (synchronous() != ((header_.flags & journal::kSynchronous) != 0)) return fail("the wrong class of call", why);
    std::memcpy(args_.data(), shared + sizeof(header_), info_->args_bytes);
    payload_ = shared + payload_at;
    reply_space_ = shared + reply_at;
    start();
    return true;
  }

  // A record that a snapshot kept: header and arguments, of some a payload, nobody who waits. `stored` outlives this.
  bool load_stored(std::span<const std::byte> stored) {
    if (stored.size() < sizeof(header_)) return false;
    shared_ = nullptr;
    std::memcpy(static_cast<void*>(&header_), stored.data(), sizeof(header_));
    if (header_.op == 0 || header_.op >= kRecordKinds) return false;
    info_ = &kRecordInfos[header_.op];
    const size_t fixed = sizeof(header_) + info_->args_bytes;
    if (stored.size() < fixed || stored.size() - fixed > journal::kMaxPayload || header_.ordinal >= journal::kMaxDevices) return false;
    std::memcpy(args_.data(), stored.data() + sizeof(header_), info_->args_bytes);
    header_.payload = static_cast<uint32_t>(stored.size() - fixed);
    header_.reply = 0;
    payload_ = const_cast<std::byte*>(stored.data() + fixed);  // only ever read
    reply_space_ = nullptr;
    start();
    return true;
  }
  // What a graph's node does, on behalf of the record that brings the graph. The parts outlive this.
  void load_operation(const Record& of, Op op, std::span<const std::byte> arguments, std::span<const std::byte> payload) {
    shared_ = nullptr;
    position_ = of.position_;
    std::memcpy(static_cast<void*>(&header_), static_cast<const void*>(&of.header_), sizeof(header_));
    header_.op = static_cast<uint16_t>(op);
    header_.payload = static_cast<uint32_t>(payload.size());
    header_.reply = 0;
    info_ = &kRecordInfos[header_.op];
    std::memcpy(args_.data(), arguments.data(), std::min<size_t>(arguments.size(), info_->args_bytes));
    payload_ = const_cast<std::byte*>(payload.data());  // only ever read
    reply_space_ = nullptr;
    start();
  }
  std::vector<std::byte> stored() const {
    std::vector<std::byte> bytes(sizeof(header_) + info_->args_bytes);
    std::memcpy(bytes.data(), static_cast<const void*>(&header_), sizeof(header_));
    std::memcpy(bytes.data() + sizeof(header_), args_.data(), info_->args_bytes);
    return bytes;
  }

  template <typename T>
  bool arguments(T& args) const {
    if (sizeof(T) != info_->args_bytes) return false;
    std::memcpy(&args, args_.data(), sizeof(T));
    return true;
  }

  const journal::RecordHeader& header() const { return header_; }
  journal::RecordHeader* shared() const { return shared_; }
  const OpInfo& info() const { return *info_; }
  uint64_t sequence() const { return header_.sequence; }
  bool synchronous() const { return info_->call == CallClass::kSynchronous; }
  // The program knew, when it appended this one, that what it waits for is done.
  bool known() const { return (header_.flags & journal::kKnown) != 0; }
  // In the journal. 0: it is none of it.
  void lies_at(uint64_t position) { position_ = position; }
  // Where the journal ended when the program had the answer to this one, or its host function.
  uint64_t answered_at() const { return journal::marked_tail(position_, header_.answered); }
  // The program has this reply already: execute, compare, write nothing.
  bool replied() const { return replied_; }
  uint32_t state() const { return header_.state.load(std::memory_order_relaxed) & 0xff; }

  // In the ring, where the program can change it at any time: only ever data.
  std::span<std::byte> payload() const { return {payload_, header_.payload}; }
  std::span<std::byte> reply_space() const { return {reply_space_, header_.reply}; }

  // The reply; what does not fit is left out, and `needed` says how much there would be.
  void set_reply(const void* data, size_t bytes, size_t needed = 0) {
    const size_t fitting = std::min<size_t>(bytes, header_.reply);
    if (!replied_ && shared_) std::memcpy(reply_space_, data, fitting);
    reply_bytes_ = static_cast<uint32_t>(std::max(fitting, needed));
    reply_hash_ = XXH3_64bits(data, fitting);
  }
  uint32_t reply_bytes() const { return reply_bytes_; }
  uint64_t reply_hash() const { return reply_hash_; }

  // The reply comes later, from Waits.
  void defer() { deferred_ = true; }
  bool deferred() const { return deferred_; }

 private:
  static bool fail(const char* reason, const char*& why) {
    why = reason;
    return false;
  }
  void start() {
    replied_ = shared_ && synchronous() && state() == journal::kReplied;
    deferred_ = false;
    reply_bytes_ = 0;
    reply_hash_ = 0;
  }

  journal::RecordHeader header_{};
  std::array<std::byte, kMostArgumentBytes> args_{};
  journal::RecordHeader* shared_ = nullptr;
  uint64_t position_ = 0;
  const OpInfo* info_ = &kRecordInfos[0];
  std::byte* payload_ = nullptr;
  std::byte* reply_space_ = nullptr;
  uint64_t reply_hash_ = 0;
  uint32_t reply_bytes_ = 0;
  bool replied_ = false;
  bool deferred_ = false;
};

}  // namespace xmig::server
