// The one thing that takes time on the null device: functions of the host. They run in order, on a thread of their
// own: the caller may hold locks that they need, and some of them wait for the program.
#pragma once

#include <cuda.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

namespace xmig::device {

class HostFunctions {
 public:
  ~HostFunctions() {
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  // False: there is no thread to run it.
  bool add(CUhostFn function, void* user) {
    const std::lock_guard lock(mutex_);
    if (!thread_.joinable()) {
      try {
        thread_ = std::thread([this] { run(); });
      } catch (const std::system_error&) {
        return false;
      }
    }
    queue_.push_back({function, user});
    pending_.fetch_add(1);
    changed_.notify_all();
    return true;
  }

  bool idle() const { return pending_.load() == 0; }

  void wait() {
    if (idle()) return;
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return idle(); });
  }

 private:
  struct Call {
    CUhostFn function;
    void* user;
  };

  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return !queue_.empty() || closed_; });
      if (queue_.empty()) return;
      const Call call = queue_.front();
      queue_.pop_front();
      lock.unlock();
      call.function(call.user);
      lock.lock();
      pending_.fetch_sub(1);
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Call> queue_;
  std::atomic<int> pending_{0};
  bool closed_ = false;
  std::thread thread_;
};

}  // namespace xmig::device
