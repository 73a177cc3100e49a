// A device that several jobs share: what the daemon wants of this server's job, and what its neighbours show (page.h).
//
// A job's class is critical, normal or best-effort. A server of a normal job has no page, and pays one comparison for each batch of
// records. One of a critical job writes down when it has work. One of a best-effort job looks before each kernel: it waits while a
// critical job has work and while it is another best-effort job's turn, and gives the device few kernels at once. It waits for no
// kernel longer than `longest_wait`, whatever the pages say.
//
// What lies in this folder: page (the layout), sharing, turns (the executor's side); and quota.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

#include "common/result.h"
#include "ipc/fd.h"
#include "journal/layout.h"
#include "journal/mapping.h"
#include "server/sharing/page.h"
#include "server/sharing/quota.h"

namespace xmig::server {

enum class SharingClass : uint8_t { kNormal, kCritical, kBestEffort };

// The daemon's message `share`.
struct Share {
  SharingClass as = SharingClass::kNormal;
  uint32_t ordinal = 0;
  uint32_t slot = 0;
  uint32_t backlog = 4;                    // kernels that the device has at once, of a best-effort job
  uint64_t backlog_ns = 1'000'000;         // and how long they take, as estimated
  uint64_t longest_wait = 100'000'000;     // ns, for one kernel
  uint64_t slice = 20'000'000;             // ns, of a best-effort job among others
  ipc::UniqueFd own, critical;             // `critical`: of a best-effort job
};

class Sharing {
 public:
  struct Place {
    std::shared_ptr<journal::Mapping> own;       // with our slot; null: none
    std::shared_ptr<journal::Mapping> critical;  // of a best-effort job
    uint32_t slot = 0;

    sharing::Slot* mine() const { return own ? &page(*own).slots[slot] : nullptr; }
    static sharing::Page& page(const journal::Mapping& of) { return *reinterpret_cast<sharing::Page*>(of.data()); }
  };
  struct Wanted {
    SharingClass as = SharingClass::kNormal;
    uint32_t backlog = 0;
    uint64_t backlog_ns = 0, longest_wait = 0, slice = 0;
    std::array<Place, journal::kMaxDevices> places;  // by ordinal
  };

  // The thread that listens to the daemon.
  Result<> share(Share request);
  Quota& quota() { return quota_; }
  // The executor's thread. How often something else was wanted; then what.
  uint32_t changes() const { return changes_.load(std::memory_order_acquire); }
  Wanted wanted() const;

 private:
  Quota quota_;
  mutable std::mutex mutex_;
  Wanted wanted_;  // guarded by mutex_
  std::atomic<uint32_t> changes_{0};
};

}  // namespace xmig::server
