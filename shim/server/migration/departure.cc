#include "server/migration/departure.h"

#include <utility>

#include "server/clock.h"

namespace xmig::server {

using journal::kGranule;

void Departure::request(Step step) {
  {
    const std::lock_guard lock(mutex_);
    steps_.push_back(std::move(step));
    requested_ = true;
  }
  execution_.wake();
}

void Departure::act() {
  while (requested_) {
    std::unique_lock lock(mutex_);
    Step step = std::move(steps_.front());
    steps_.pop_front();
    requested_ = !steps_.empty();
    lock.unlock();
    std::visit([this](auto& one) { make(std::move(one)); }, step);
  }
}

void Departure::make(KeepOnHost step) {
  if (!step.host) {
    relocation_.end(true);
    wishes_.place = Place::kDevice;
    wishes_.returns = true;
    wishes_.must_settle = true;
  } else if (wishes_.place != Place::kHost) {
    return relocation_.start(Relocation::Purpose::kMoveThroughHost, Place::kHost, 0, {});
  }
  interrupts_.request(Interrupts::kSnapshot | Interrupts::kAnswer);
}

void Departure::make(PrepareSuspend prepare) {
  const Place to = prepare.to == SuspendTo::kFile ? Place::kFile : Place::kHost;
  relocation_.end(true);
  if (to == Place::kFile) {
    const std::lock_guard lock(memory_.mutex);
    memory_.physical.keep_files_in(std::move(prepare.directory));
  }
  suspend_to_ = to;
  relocation_.start(Relocation::Purpose::kSuspension, to, prepare.bytes_hint, std::move(prepare.room));
}

void Departure::make(AbortSuspend) {
  relocation_.end(true);
  suspend_to_ = Place::kHost;
  wishes_.must_settle = true;  // so that the room goes, too
  interrupts_.request(Interrupts::kSnapshot | Interrupts::kAnswer);
}

void Departure::hand_over(uint64_t stopped) {
  execution_.come_to_rest();
  const uint64_t drained = now_ns();
  if (execution_.replaying()) return services_.daemon.handover_failed("the job is being recovered");
  // Nothing was executed since the last snapshot: then that one will do.
  const bool due = execution_.position() != snapshots_.position() || snapshots_.number() == 0 || wishes_.must_settle;
  if (due) {
    if (const Result<> taken = execution_.take_snapshot("handover"); !taken) {
      return services_.daemon.handover_failed(taken.why());
    }
  }
  if (snapshots_.trim_shadow_at() != 0) snapshots_.trim_shadow_at_once();  // nobody is to import what is empty
  const double snapshot_ms = static_cast<double>(now_ns() - drained) / 1e6;
  execution_.park([=, this] {
    services_.daemon.handed_over(snapshots_.number(), execution_.position(), stopped, drained, snapshot_ms);
  });
  execution_.go_on();
  services_.daemon.continued(execution_.position());
}

void Departure::suspend(uint64_t stopped) {
  execution_.come_to_rest();
  const Result<uint64_t> bytes = leave_device();
  if (!bytes) return fail_suspend(bytes.why());
  services_.job.header().round_suspended.store(0);
  rest(*bytes, stopped);
}

void Departure::choose_place() {
  relocation_.end(false);
  wishes_.place = suspend_to_;
}

void Departure::suspend_with_the_group(uint64_t stopped) {
  const Result<uint64_t> bytes = has_left();
  // It is decided, and the other ranks stand still. They are recovered with this one, whose memory has everything.
  if (!bytes) services_.faults.give_up(0, bytes.why().c_str());
  rest(*bytes, stopped);
}

// Until somebody lets the job go on here.
void Departure::rest(uint64_t bytes, uint64_t stopped) {
  journal::JournalHeader& header = services_.job.header();
  header.state.store(static_cast<uint32_t>(journal::ServerState::kSuspended));
  header.server_pid.store(0);
  const double ms = static_cast<double>(now_ns() - stopped) / 1e6;
  execution_.park([=, this] {
    services_.daemon.suspended(snapshots_.number(), execution_.position(), bytes, ms);
  });
  header.round_suspended.store(0);
  execution_.go_on();
  back_to_device();
  services_.daemon.continued(execution_.position());
}

// The last snapshot, to where it stays. How much that is.
Result<uint64_t> Departure::leave_device() {
  if (execution_.replaying()) return Error{"the job is being recovered"};
  choose_place();
  if (const Result<> taken = execution_.take_snapshot("suspend"); !taken) return taken.error();
  return has_left();
}

Result<uint64_t> Departure::has_left() {
  relocation_.end(true);
  // Now, not slab by slab nor with the next snapshot: the daemon keeps what it is not informed of, and some of that is device memory.
  snapshots_.trim_shadow_at_once();
  uint64_t bytes = 0;
  for (const ChunkState& chunk : snapshots_.chunks()) {
    if (chunk.slot == 0) continue;
    bytes += kGranule;
    if (memory_.shadow.place(chunk.slot) != suspend_to_) {
      return Error{"a part of the shadow could not leave the device"};
    }
  }
  return bytes;
}

void Departure::back_to_device() {
  wishes_.place = Place::kDevice;
  suspend_to_ = Place::kHost;
  wishes_.returns = true;
  wishes_.must_settle = true;
  interrupts_.add(Interrupts::kSnapshot);
}

void Departure::fail_suspend(const std::string& why) {
  relocation_.end(true);
  back_to_device();
  services_.daemon.suspend_failed(why);
}

}  // namespace xmig::server
