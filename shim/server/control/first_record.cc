#include "server/control/first_record.h"

#include <chrono>
#include <cstring>

#include "journal/futex.h"
#include "ops.h"
#include "server/executor/replies.h"

namespace xmig::server {
namespace {

constexpr std::chrono::seconds kLongestSleep{60};

bool waits_for_devices(const journal::RecordHeader& record) { return record.op == static_cast<uint16_t>(Op::xmOpen); }

// It wanted the devices, and did not get them.
bool was_refused(const journal::RecordHeader& record) {
  return waits_for_devices(record) && (record.state.load() & 0xff) == journal::kReplied && record.result != 0;
}

}  // namespace

bool FirstRecord::wait() {
  journal::JournalHeader& header = job_.header();
  for (;;) {
    header.server_sleeping.store(journal::kAsleep, std::memory_order_seq_cst);
    const uint32_t rung = header.doorbell.load(std::memory_order_seq_cst);
    if (wanted_.load(std::memory_order_seq_cst) != 0 || first()) break;
    journal::futex_wait(header.doorbell, rung, kLongestSleep);
  }
  header.server_sleeping.store(journal::kAwake, std::memory_order_seq_cst);
  seen_ = header.tail.load(std::memory_order_seq_cst);
  return (wanted_.fetch_and(~uint32_t{kRequested}) & kGivenUp) == 0;
}

uint64_t FirstRecord::devices() {
  const journal::RecordHeader* const record = first();
  return record && record->ordinal < journal::kMaxDevices ? uint64_t{1} << record->ordinal : 0;
}

bool FirstRecord::refuse(int error) {
  Replies replies(job_);
  const uint64_t device = devices();
  while (journal::RecordHeader* const record = first()) {
    if (position_ >= seen_ || devices() != device) break;
    if (!waits_for_devices(*record)) return false;
    replies.give({.shared = record, .result = static_cast<uint32_t>(error)});
  }
  return true;
}

journal::RecordHeader* FirstRecord::first() {
  const journal::JournalHeader& header = job_.header();
  const uint64_t tail = header.tail.load(std::memory_order_seq_cst);
  after_the_program(&job_);
  // A snapshot is more than refused requests.
  const bool begins_here = header.snapshot.load() == 0 && tail <= job_.journal().ring_bytes();
  while (position_ < tail) {
    auto* const shared = reinterpret_cast<journal::RecordHeader*>(job_.journal().at(position_));
    journal::RecordHeader record;
    std::memcpy(static_cast<void*>(&record), shared, sizeof(record));
    const bool whole = record.size >= sizeof(record) && record.size % 8 == 0 && record.size <= tail - position_;
    if (!begins_here || !whole || !was_refused(record)) return shared;
    position_ += record.size;
  }
  return nullptr;
}

void FirstRecord::wake(Why why) {
  journal::JournalHeader& header = job_.header();
  wanted_.fetch_or(why, std::memory_order_seq_cst);
  header.doorbell.fetch_add(1, std::memory_order_seq_cst);
  journal::futex_wake(header.doorbell);
}

}  // namespace xmig::server
