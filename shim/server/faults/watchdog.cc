#include "server/faults/watchdog.h"

#include <pthread.h>

#include <algorithm>

namespace xmig::server {
namespace {

constexpr std::chrono::nanoseconds kShortestStep = std::chrono::milliseconds(5);
constexpr std::chrono::nanoseconds kLongestStep = std::chrono::seconds(1);

}  // namespace

Watchdog::Watchdog(std::chrono::nanoseconds patience, std::function<Look()> look, std::function<void()> bite,
                   std::function<void(bool)> stuck)
    : patience_(patience), look_(std::move(look)), bite_(std::move(bite)), stuck_(std::move(stuck)), thread_([this] { run(); }) {}

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
  Look last{On::kNothing, 0};
  bool stuck = false;
  Clock::time_point before = Clock::now();
  std::unique_lock lock(mutex_);
  while (!stop_.wait_for(lock, step, [this] { return stopping_; })) {
    const Clock::time_point now = Clock::now();
    const auto passed = std::min<std::chrono::nanoseconds>(now - before, 2 * step);
    before = now;
    const Look look = look_();
    const bool is_same = look.on != On::kNothing && look.on == last.on && look.signature == last.signature;
    same = is_same ? same + passed : std::chrono::nanoseconds{0};
    last = look;
    const bool over = same >= patience_;
    if (stuck != (over && look.on == On::kRanks)) {
      stuck = !stuck;
      stuck_(stuck);
    }
    if (!over || look.on != On::kDevice) continue;
    bite_();
    same = std::chrono::nanoseconds{0};
  }
}

}  // namespace xmig::server
