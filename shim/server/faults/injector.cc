#include "server/faults/injector.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>

#include "server/clock.h"

namespace xmig::server {
namespace {

constexpr uint64_t kStartPatience = 1'000'000'000;  // for the work in which a kill is to come

}  // namespace

void Injector::arm(const device::Injection& injection) {
  using device::InjectKind;
  if (injection.kind == InjectKind::kFault || injection.kind == InjectKind::kHang) device_.prepare_to_inject();
  Place place = kWork;
  switch (injection.point) {
    case device::InjectPoint::kRecord: break;
    case device::InjectPoint::kReplay: place = kReplay; break;
    case device::InjectPoint::kSnapshot: place = kSnapshot; break;
    case device::InjectPoint::kImport: place = kImport; break;
    case device::InjectPoint::kKernel:
    case device::InjectPoint::kCopy:
      if (device_.injects()) break;
      device_.arm(
          injection, [](void* daemon, uint64_t id) { static_cast<Daemon*>(daemon)->injected(id); }, &daemon_);
      return;
  }
  const std::lock_guard lock(mutex_);
  armed_[place].push_back(injection);
  next_[place] = std::min(next_[place].load(), injection.sequence);
}

std::optional<device::Injection> Injector::take(Place place, device::InjectPoint point, uint64_t count) {
  const std::lock_guard lock(mutex_);
  auto& armed = armed_[place];
  const auto found = std::find_if(armed.begin(), armed.end(),
                                  [&](const auto& one) { return one.point == point && one.sequence <= count; });
  if (found == armed.end()) return std::nullopt;
  const device::Injection taken = *found;
  armed.erase(found);
  uint64_t next = ~0ull;
  for (const auto& one : armed) next = std::min(next, one.sequence);
  next_[place] = next;
  daemon_.injected(taken.id);
  return taken;
}

void Injector::at_record(uint64_t sequence, Stream stream, const std::function<bool(uint64_t)>& allocated) {
  const auto injection = take(kWork, device::InjectPoint::kRecord, sequence);
  if (!injection) return;
  if (injection->kind != device::InjectKind::kFlip) return hit(*injection, sequence, stream);
  if (allocated(injection->address)) flip(injection->address, stream);
}

// Behind what the stream has so far. Nobody gets an error.
void Injector::flip(uint64_t address, Stream stream) {
  uint8_t byte = 0;
  faults_.check(device_.copy_to_host(&byte, address, 1, stream.real));
  faults_.check(device_.synchronize(stream.real));
  byte ^= 1;
  faults_.check(device_.copy_from_host(address, &byte, 1, stream.real));
  faults_.check(device_.synchronize(stream.real));
}

void Injector::inject_at(Place place, uint64_t count, uint64_t sequence) {
  const auto point = place == kReplay ? device::InjectPoint::kReplay : device::InjectPoint::kSnapshot;
  if (const auto injection = take(place, point, count)) hit(*injection, sequence, {});
}

device::Status Injector::at_import(uint64_t imports) {
  if (imports < next_[kImport].load(std::memory_order_relaxed)) return {};
  const auto injection = take(kImport, device::InjectPoint::kImport, imports);
  if (!injection) return {};
  if (injection->kind == device::InjectKind::kKill) die();
  if (injection->kind == device::InjectKind::kFault) return device_.status(injection->error);
  for (;;) ::pause();
}

void Injector::hit(const device::Injection& injection, uint64_t sequence, Stream stream) {
  if (injection.kind == device::InjectKind::kKill) die();
  const device::Status injected = device_.inject(stream.real, stream.ordinal, injection.kind, injection.error);
  faults_.check(injected);
  if (injected) return;
  if (injection.kind == device::InjectKind::kFault) faults_.raise({injection.error, sequence, "an injected fault"});
  for (;;) ::pause();
}

std::optional<Injector::Beside> Injector::beside(device::InjectPoint point, uint64_t sequence, Stream stream) {
  const auto injection = take(kWork, point, sequence);
  if (!injection) return std::nullopt;
  Beside beside{*injection, sequence, stream, {nullptr, stream.ordinal}, nullptr};
  faults_.check(device_.create_stream(beside.own.real));
  faults_.check(device_.create_event(beside.started));
  faults_.check(device_.record(beside.started, stream.real));
  faults_.check(device_.wait(beside.own.real, beside.started));
  return beside;
}

void Injector::inject(const Beside& beside) {
  switch (beside.injection.kind) {
    case device::InjectKind::kKill: {
      const uint64_t until = now_ns() + kStartPatience;
      while (device_.query(beside.started).problem() == device::Problem::kNotReady && now_ns() < until) continue;
      die();
    }
    case device::InjectKind::kFault: hit(beside.injection, beside.sequence, beside.own); break;
    // What hangs holds up what comes after it, as a kernel of the program would.
    case device::InjectKind::kHang: hit(beside.injection, beside.sequence, beside.stream); break;
    case device::InjectKind::kFlip: break;  // has no work to be beside
  }
}

void Injector::die() {
  ::kill(::getpid(), SIGKILL);
  for (;;) ::pause();
}

}  // namespace xmig::server
