// Answers to the program, and their comparison where the program has one already.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "journal/futex.h"
#include "server/channel/daemon.h"
#include "server/channel/job.h"
#include "server/records/record.h"

#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_acquire(void*);
extern "C" void __tsan_release(void*);
#endif

namespace xmig::server {

// A thread answers the program, the program appends a record, the executor takes it: an order that leads through another
// process, which ThreadSanitizer does not see and has to be informed of.
inline void before_the_program([[maybe_unused]] void* program) {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(program);
#endif
}
inline void after_the_program([[maybe_unused]] void* program) {
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(program);
#endif
}

struct Answer {
  journal::RecordHeader* shared = nullptr;
  uint64_t sequence = 0;
  bool replied = false;      // compare instead of answering
  bool is_volatile = false;  // do not even compare
  uint32_t result = 0;  // the vendor's number
  uint32_t bytes = 0;  // of the reply space
  uint64_t hash = 0;

  static Answer to(const Record& record) {
    return {record.shared(), record.sequence(), record.replied(), record.info().is_volatile};
  }
};

class Replies {
 public:
  explicit Replies(Job& job) : job_(job) {}

  // From any thread.
  void give(const Answer& answer) {
    if (answer.replied) return compare(answer, answer.shared->result, answer.shared->reply_hash);
    answer.shared->result = answer.result;
    answer.shared->reply_bytes = answer.bytes;
    answer.shared->reply_hash = answer.hash;
    answer.shared->answered = journal::tail_mark(job_.header().tail.load(std::memory_order_acquire));
    before_the_program(&job_);
    const uint32_t before = answer.shared->state.exchange(journal::kReplied, std::memory_order_seq_cst);
    if (before & journal::kWaiter) journal::futex_wake(answer.shared->state);
  }
  void compare(const Answer& answer, uint32_t result, uint64_t hash);

  // Work whose outcome will be compared later; the replay is complete only after it.
  void expect() { expected_.fetch_add(1, std::memory_order_relaxed); }
  void met() { expected_.fetch_sub(1, std::memory_order_release); }
  bool all_met() const { return expected_.load(std::memory_order_acquire) == 0; }
  ReplayReport report() const {
    const std::lock_guard lock(mutex_);
    return report_;
  }

 private:
  Job& job_;
  std::atomic<uint64_t> expected_{0};
  mutable std::mutex mutex_;
  ReplayReport report_;  // guarded by mutex_
};

inline void Replies::compare(const Answer& answer, uint32_t result, uint64_t hash) {
  if (answer.is_volatile) return;
  const std::lock_guard lock(mutex_);
  ++report_.compared;
  if (answer.result == result && answer.hash == hash) return;
  ++report_.differing;
  if (!report_.first_difference || answer.sequence < *report_.first_difference) {
    report_.first_difference = answer.sequence;
  }
}

}  // namespace xmig::server
