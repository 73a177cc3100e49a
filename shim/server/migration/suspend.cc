// Suspension: a job whose state is its shadow, in host memory or in files, and nobody else's (docs/decisions/0009).
//
// Most of the way is made while the program runs (relocation.cc). The last cut copies what has changed since, straight to
// where it stays.
#include "server/clock.h"
#include "server/executor/executor.h"

namespace xmig::server {

using journal::kGranule;

// --- from the thread that listens to the daemon

void Executor::keep_on_host(bool host) {
  if (host) {
    if (wanted_place_ == Place::kHost) return ask_for_cut();
    return start_relocation(Purpose::kMoveThroughHost, Place::kHost, 0, {});
  }
  end_relocation(true);
  wanted_place_ = Place::kDevice;
  shadow_returns_ = true;
  must_settle_ = true;
  ask_for_cut();
}

void Executor::prepare_suspend(PrepareSuspend prepare) {
  const Place to = prepare.to == SuspendTo::kFile ? Place::kFile : Place::kHost;
  end_relocation(true);
  if (to == Place::kFile) {
    const std::lock_guard lock(hosted_mutex_);
    physical_.keep_files_in(std::move(prepare.directory));
  }
  suspend_to_ = to;
  start_relocation(Purpose::kSuspension, to, prepare.bytes_hint, std::move(prepare.room));
}

void Executor::abort_suspend() {
  end_relocation(true);
  suspend_to_ = Place::kHost;
  must_settle_ = true;  // so that the room goes, too
  ask_for_cut();
}

// --- the executor

Place Executor::cut_place() const { return evict_shadow_ ? Place::kHost : place_; }

// A slot on the device, if there is room: for what may return there.
std::optional<uint64_t> Executor::returned(uint32_t ordinal, uint64_t& wanted) {
  const auto slot = shadow_.allocate(ordinal, Place::kDevice, wanted, true);
  if (slot) {
    --wanted;
  } else {
    shadow_returns_ = false;  // no room: not asked for once for every granule
  }
  return slot;
}

// Between two records, with an idle device.
void Executor::suspend(uint64_t stopped) {
  drain();
  if (redoing_) return fail_suspend("the job is being recovered");
  end_relocation(false);
  wanted_place_ = suspend_to_.load();
  if (!take_cut("suspend")) {
    return fail_suspend(cut_trouble_.empty() ? "work of the device waits for the program" : cut_trouble_);
  }
  end_relocation(true);
  // Now, not slab by slab nor with the next cut: the daemon keeps what it is not told of, and some of that is device memory.
  trim_shadow_at_ = now_ns();
  trim_shadow(true);
  uint64_t bytes = 0;
  for (const ChunkState& chunk : chunks_) {
    if (chunk.slot == 0) continue;
    bytes += kGranule;
    if (shadow_.place(chunk.slot) != suspend_to_.load()) return fail_suspend("a part of the shadow could not leave the device");
  }
  journal::JournalHeader& header = job_.header();
  header.state.store(static_cast<uint32_t>(journal::ServerState::kSuspended));
  header.server_pid.store(0);
  const double ms = static_cast<double>(now_ns() - stopped) / 1e6;
  park([=, this] { daemon_.suspended(cut_number_, position_, bytes, ms); });
  go_on();
  back_to_device();
  daemon_.continued(position_);
}

void Executor::back_to_device() {
  wanted_place_ = Place::kDevice;
  suspend_to_ = Place::kHost;
  shadow_returns_ = true;
  must_settle_ = true;
  requests_.fetch_or(kCut);
}

void Executor::fail_suspend(const std::string& why) {
  end_relocation(true);
  back_to_device();
  daemon_.suspend_failed(why);
}

}  // namespace xmig::server
