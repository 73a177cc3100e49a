#include "device/cpu/stream.h"

#include <pthread.h>
#include <signal.h>

#include <thread>

#include "device/cpu/context.h"
#include "device/cpu/cpu_device.h"
#include "device/cpu/progress.h"
#include "device/cpu/worker.h"

namespace xmig::device::cpu {

bool Reach::done() const { return stream->reached(position); }

std::atomic<int>& Stream::threads() {
  static std::atomic<int> count{0};
  return count;
}

uint64_t Stream::push(Work work, uint64_t sequence) {
  if (!started_) {
    // The thread keeps the stream alive and is never joined: one that runs a kernel without end cannot be.
    // Signals are for the server's own threads.
    sigset_t all, previous;
    sigfillset(&all);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&all, fault);
    pthread_sigmask(SIG_SETMASK, &all, &previous);
    ++threads();
    try {
      std::thread([self = shared_from_this()]() mutable {
        self->run();
        self.reset();
        --threads();
        Progress::instance().changed();
      }).detach();
      started_ = true;
    } catch (...) {
      --threads();
      pthread_sigmask(SIG_SETMASK, &previous, nullptr);
      throw;
    }
    pthread_sigmask(SIG_SETMASK, &previous, nullptr);
  }
  bool wake;
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back({sequence, std::move(work)});
    waiting_.store(true);
    wake = sleeping_;
  }
  if (wake) condition_.notify_one();
  return ++enqueued_;
}

void Stream::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  waiting_.store(true);
  condition_.notify_one();
}

std::vector<Stream::Item> Stream::take() {
  spin([this] { return waiting_.load(std::memory_order_relaxed); });
  std::unique_lock lock(mutex_);
  sleeping_ = true;
  condition_.wait(lock, [this] { return !queue_.empty() || closed_; });
  sleeping_ = false;
  waiting_.store(closed_);
  return std::exchange(queue_, {});
}

void Stream::run() {
  pthread_setname_np(pthread_self(), "xmig-stream");
  Worker worker(*context_);
  for (;;) {
    std::vector<Item> batch = take();
    if (batch.empty()) return;
    for (Item& item : batch) {
      t_sequence = item.sequence;
      worker.run(item.work);
      item.work = RecordWork{};  // what it held is free before the work counts as done
      completed_.fetch_add(1);
      Progress::instance().changed();
    }
  }
}

}  // namespace xmig::device::cpu
