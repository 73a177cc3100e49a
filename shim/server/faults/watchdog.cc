#include "server/faults/watchdog.h"

#include <pthread.h>

#include <algorithm>

namespace xmig::server {
namespace {

constexpr std::chrono::nanoseconds kShortestStep = std::chrono::milliseconds(5);
constexpr std::chrono::nanoseconds kLongestStep = std::chrono::seconds(1);

}  // namespace

Watchdog::Watchdog(std::chrono::nanoseconds patience, std::function<Look()> look, std::function<void()> bite)
    : patience_(patience), look_(std::move(look)), bite_(std::move(bite)), thread_([this] { run(); }) {}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  stop_.notify_all();
  thread_.join();
}

void Watchdog::run() {
  using Clock = std::chrono::steady_clock;
  ::pthread_setname_np(::pthread_self(), "watchdog");
  const std::chrono::nanoseconds step = std::clamp(patience_ / 8, kShortestStep, kLongestStep);
  std::chrono::nanoseconds same{0};
  uint64_t signature = 0;
  Clock::time_point before = Clock::now();
  std::unique_lock lock(mutex_);
  while (!stop_.wait_for(lock, step, [this] { return stopping_; })) {
    const Clock::time_point now = Clock::now();
    const auto passed = std::min<std::chrono::nanoseconds>(now - before, 2 * step);
    before = now;
    const Look look = look_();
    same = look.pending && look.signature == signature ? same + passed : std::chrono::nanoseconds{0};
    signature = look.signature;
    if (same < patience_) continue;
    bite_();
    same = std::chrono::nanoseconds{0};
  }
}

}  // namespace xmig::server
