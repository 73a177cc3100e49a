// Waits for the device on behalf of client threads. The executor never waits: it starts a Wait and goes on.
//
// A Wait is watched in three stages. While nothing else happens, the streams themselves are queried (no cost to the
// device). Before another record is executed, arm() puts marks into the streams, so that later work does not count.
// When the executor has nothing else to do it hands those that somebody waits for to waiter threads, which sleep.
//
// A barrier is a wait whose end the program knows of already, from the server before this one: it went on from there,
// perhaps on another stream, and so nothing that it has appended since may be executed before. What other threads of it had
// appended until then may, and has to: among it may be what the wait is for, as another rank's part of a collective.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "driver_table.h"
#include "journal/layout.h"
#include "server/executor/replies.h"
#include "server/faults/faults.h"
#include "server/memory/scratch.h"

namespace xmig::server {

struct Wait {
  Answer answer;  // to nobody, if there is no record
  bool barrier = false;
  uint64_t from = 0;  // of a barrier: the position of the first record that it holds
  uint32_t ordinal = 0;
  std::vector<CUstream> streams;  // all that it waits for; empty once armed
  CUevent event = nullptr;        // the program's, likewise
  std::vector<CUevent> marks;
  size_t done = 0;                // so many of the streams, or of the marks, have been found done
  CUstream helper = nullptr;  // waits for the program's event
  // The bytes that the copy before it brings.
  const std::byte* data = nullptr;
  size_t bytes = 0;
  bool inline_reply = false;
  ScratchPool::Buffer scratch{nullptr, {}};
};

class Waits {
 public:
  // `use_ordinal` makes a device's context the calling thread's current one.
  Waits(const DriverTable& driver, Replies& replies, Faults& faults, std::function<void(uint32_t)> use_ordinal);
  ~Waits();

  void start(std::unique_ptr<Wait> wait);
  bool unarmed() const { return armed_ < watched_.size(); }
  void arm();
  // Answer those that are done. True if there were any.
  bool poll();
  bool watching() const { return !watched_.empty(); }
  // Is the record at this position held?
  bool at_barrier(uint64_t position) const {
    return barriers_ != 0 && std::any_of(watched_.begin(), watched_.end(), [&](const auto& wait) {
      return wait->barrier && wait->from <= position;
    });
  }
  // Later records may be what the device waits for: the barriers of now hold no longer.
  void lift_barriers();
  void hand_over();
  // Return when every wait is answered. The device is drained.
  void finish_all();

 private:
  struct Pool {
    std::vector<CUevent> marks;
    std::vector<CUstream> helpers;
  };
  CUresult query(Wait& wait) const;
  void complete(Wait& wait, CUresult result);
  void run_waiter();

  const DriverTable& driver_;
  Replies& replies_;
  Faults& faults_;
  const std::function<void(uint32_t)> use_ordinal_;

  std::vector<std::unique_ptr<Wait>> watched_;  // the executor's own; the first armed_ are armed
  size_t armed_ = 0;
  size_t barriers_ = 0;

  std::mutex mutex_;
  std::condition_variable work_, done_;
  std::deque<std::unique_ptr<Wait>> queue_;  // guarded by mutex_, as is all that follows
  Pool pools_[journal::kMaxDevices];
  size_t idle_ = 0, busy_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> waiters_;
};

}  // namespace xmig::server
