// What other threads want of the executor, which looks between two records.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <utility>

#include "journal/futex.h"
#include "server/channel/job.h"

namespace xmig::server {

class Interrupts {
 public:
  // kAnswer: if there is nothing to preserve, the daemon is informed. kLook: something that the executor looks at in each turn has
  // changed; without it, an executor that is about to sleep would not see it before it wakes.
  enum What : uint32_t { kStop = 1, kSnapshot = 2, kPause = 4, kHandover = 8, kSuspend = 16, kAnswer = 32, kLook = 64 };

  // `release`: the executor can be woken on any processor now.
  Interrupts(const Job& job, std::function<void()> release) : job_(job), release_(std::move(release)) {}

  // From any thread. The executor is woken.
  void request(uint32_t what) {
    pending_.fetch_or(what, std::memory_order_seq_cst);
    journal::JournalHeader& header = job_.header();
    release_();
    header.doorbell.fetch_add(1, std::memory_order_seq_cst);
    journal::futex_wake(header.doorbell);
  }
  // How often a snapshot that was requested was taken, or found not to be needed or not possible.
  uint64_t snapshots_decided() const { return snapshots_decided_.load(); }

  // The executor's thread.
  uint32_t pending(std::memory_order order = std::memory_order_relaxed) const { return pending_.load(order); }
  void add(uint32_t what) { pending_.fetch_or(what); }
  // Which of these there were.
  uint32_t take(uint32_t what) { return pending_.fetch_and(~what) & what; }
  void snapshot_decided() { snapshots_decided_.fetch_add(1); }

 private:
  const Job& job_;
  const std::function<void()> release_;
  std::atomic<uint32_t> pending_{0};
  std::atomic<uint64_t> snapshots_decided_{0};
};

}  // namespace xmig::server
