#include "server/executor/waits.h"

#include <pthread.h>

#include <algorithm>

namespace xmig::server {

Waits::Waits(const DriverTable& driver, Replies& replies, Faults& faults, std::function<void(uint32_t)> use_ordinal)
    : driver_(driver), replies_(replies), faults_(faults), use_ordinal_(std::move(use_ordinal)) {}

Waits::~Waits() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  for (std::thread& waiter : waiters_) waiter.join();
  for (const Pool& pool : pools_) {
    for (const CUevent mark : pool.marks) driver_.cuEventDestroy_v2(mark);
    for (const CUstream helper : pool.helpers) driver_.cuStreamDestroy_v2(helper);
  }
}

void Waits::start(std::unique_ptr<Wait> wait) {
  if (wait->answer.replied) replies_.expect();
  barriers_ += wait->barrier;
  watched_.push_back(std::move(wait));
}

void Waits::arm() {
  for (; armed_ < watched_.size(); ++armed_) {
    Wait& wait = *watched_[armed_];
    use_ordinal_(wait.ordinal);
    const auto mark = [&](CUstream stream) {
      CUevent event = nullptr;
      {
        const std::lock_guard lock(mutex_);
        auto& marks = pools_[wait.ordinal].marks;
        if (!marks.empty()) {
          event = marks.back();
          marks.pop_back();
        }
      }
      if (!event) faults_.check(driver_.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC));
      faults_.check(driver_.cuEventRecordWithFlags(event, stream, 0));
      wait.marks.push_back(event);
    };
    for (; wait.done < wait.streams.size(); ++wait.done) mark(wait.streams[wait.done]);
    wait.streams.clear();
    wait.done = 0;
    if (!wait.event) continue;
    // The program may record or destroy its event while this goes on: a stream of ours waits for what it means now.
    {
      const std::lock_guard lock(mutex_);
      auto& helpers = pools_[wait.ordinal].helpers;
      if (!helpers.empty()) {
        wait.helper = helpers.back();
        helpers.pop_back();
      }
    }
    if (!wait.helper) {
      faults_.check(driver_.cuStreamCreateWithPriority(&wait.helper, CU_STREAM_NON_BLOCKING, 0));
    }
    faults_.check(driver_.cuStreamWaitEvent(wait.helper, wait.event, 0));
    mark(wait.helper);
    wait.event = nullptr;
  }
}

// One question at a look: what was found done stays done, since nothing else is executed before the wait is armed.
CUresult Waits::query(Wait& wait) const {
  for (; wait.done < wait.streams.size(); ++wait.done) {
    if (const CUresult result = driver_.cuStreamQuery(wait.streams[wait.done]); result != CUDA_SUCCESS) return result;
  }
  if (wait.event) {
    if (const CUresult result = driver_.cuEventQuery(wait.event); result != CUDA_SUCCESS) return result;
  }
  for (; wait.done < wait.marks.size(); ++wait.done) {  // of one that is armed
    if (const CUresult result = driver_.cuEventQuery(wait.marks[wait.done]); result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

bool Waits::poll() {
  // A replay watches hundreds at a time, most of them for the same stream: that one is queried once.
  const Wait* unready = nullptr;
  const auto is_ready = [&](const std::unique_ptr<Wait>& wait) {
    if (unready && wait->ordinal == unready->ordinal && wait->streams == unready->streams && wait->event == unready->event &&
        wait->marks.empty() && unready->marks.empty()) {
      return false;
    }
    use_ordinal_(wait->ordinal);
    const CUresult result = query(*wait);
    if (result == CUDA_ERROR_NOT_READY) {
      unready = wait.get();
      return false;
    }
    barriers_ -= wait->barrier;
    complete(*wait, result);
    return true;
  };
  size_t kept = 0, kept_armed = 0;
  for (size_t i = 0; i < watched_.size(); ++i) {
    if (is_ready(watched_[i])) continue;
    kept_armed += i < armed_;
    if (kept != i) watched_[kept] = std::move(watched_[i]);
    ++kept;
  }
  const bool any = kept != watched_.size();
  watched_.resize(kept);
  armed_ = kept_armed;
  return any;
}

void Waits::complete(Wait& wait, CUresult result) {
  faults_.check(result);
  wait.answer.result = result;
  if (wait.data && result == CUDA_SUCCESS) {
    wait.answer.hash = XXH3_64bits(wait.data, wait.bytes);
    if (wait.inline_reply) wait.answer.bytes = static_cast<uint32_t>(wait.bytes);
  }
  if (wait.answer.shared) replies_.give(wait.answer);
  if (wait.answer.replied) replies_.met();
  if (wait.marks.empty() && !wait.helper) return;
  const std::lock_guard lock(mutex_);
  Pool& pool = pools_[wait.ordinal];
  pool.marks.insert(pool.marks.end(), wait.marks.begin(), wait.marks.end());
  if (wait.helper) pool.helpers.push_back(wait.helper);
}

void Waits::hand_over() {
  if (watched_.empty()) return;
  arm();
  const std::lock_guard lock(mutex_);
  // Nobody waits for those that a replay compares.
  std::erase_if(watched_, [&](std::unique_ptr<Wait>& wait) {
    if (wait->answer.replied || wait->barrier) return false;
    queue_.push_back(std::move(wait));
    return true;
  });
  armed_ = watched_.size();
  for (size_t have = idle_; have < queue_.size(); ++have) {
    waiters_.emplace_back([this] { run_waiter(); });
    ++idle_;
  }
  work_.notify_all();
}

void Waits::run_waiter() {
  ::pthread_setname_np(::pthread_self(), "waiter");
  std::unique_lock lock(mutex_);
  while (true) {
    work_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const std::unique_ptr<Wait> wait = std::move(queue_.front());
    queue_.pop_front();
    --idle_;
    ++busy_;
    lock.unlock();
    use_ordinal_(wait->ordinal);
    CUresult result = CUDA_SUCCESS;
    for (const CUevent event : wait->marks) {
      if (result == CUDA_SUCCESS) result = driver_.cuEventSynchronize(event);
    }
    complete(*wait, result);
    lock.lock();
    --busy_;
    ++idle_;
    if (busy_ == 0 && queue_.empty()) done_.notify_all();
  }
}

void Waits::lift_barriers() {
  for (const auto& wait : watched_) wait->barrier = false;
  barriers_ = 0;
}

void Waits::finish_all() {
  while (!watched_.empty()) poll();
  std::unique_lock lock(mutex_);
  done_.wait(lock, [&] { return busy_ == 0 && queue_.empty(); });
}

}  // namespace xmig::server
