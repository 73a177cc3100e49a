// When a server may enter the job that it got. A server that is killed gives its device back for tens of milliseconds, in
// which its device's work may still write; meanwhile the next one prepares. Until it enters, it writes nothing that is not
// its own: neither the journal nor the job's memory.
#pragma once

#include <condition_variable>
#include <mutex>

namespace xmig::server {

class Entry {
 public:
  enum class State { kClosed, kOpen, kNever };

  explicit Entry(State state = State::kClosed) : state_(state) {}

  void open() { become(State::kOpen); }
  // The server ends before it could enter.
  void give_up() { become(State::kNever); }
  bool is_open() const {
    const std::lock_guard lock(mutex_);
    return state_ == State::kOpen;
  }
  // False: it will not enter.
  bool wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return state_ != State::kClosed; });
    return state_ == State::kOpen;
  }

 private:
  void become(State state) {
    const std::lock_guard lock(mutex_);
    if (state_ == State::kClosed) state_ = state;
    changed_.notify_all();
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  State state_;
};

}  // namespace xmig::server
