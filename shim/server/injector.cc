#include "server/injector.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>

namespace xmig::server {

void Injector::arm(const device::Injection& injection) {
  Place place;
  switch (injection.point) {
    case device::InjectPoint::kRecord: place = kRecord; break;
    case device::InjectPoint::kRedo: place = kRedo; break;
    case device::InjectPoint::kCut: place = kCut; break;
    default:
      device_.arm(
          injection, [](void* daemon, uint64_t id) { static_cast<Daemon*>(daemon)->injected(id); }, &daemon_);
      return;
  }
  const std::lock_guard lock(mutex_);
  armed_[place].push_back(injection);
  next_[place] = std::min(next_[place].load(), injection.sequence);
}

void Injector::strike(Place place, uint64_t count, uint64_t sequence) {
  device::Injection chosen{};
  {
    const std::lock_guard lock(mutex_);
    auto& armed = armed_[place];
    const auto found =
        std::find_if(armed.begin(), armed.end(), [&](const auto& one) { return one.sequence <= count; });
    if (found == armed.end()) return;
    chosen = *found;
    armed.erase(found);
    uint64_t next = ~0ull;
    for (const auto& one : armed) next = std::min(next, one.sequence);
    next_[place] = next;
  }
  daemon_.injected(chosen.id);
  switch (chosen.kind) {
    case device::InjectKind::kKill: ::kill(::getpid(), SIGKILL); break;
    case device::InjectKind::kFault: faults_.strike({chosen.error, sequence, "an injected fault"});
    case device::InjectKind::kHang: break;
  }
  for (;;) ::pause();
}

}  // namespace xmig::server
