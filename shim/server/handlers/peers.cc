// Several devices in one job: whose memory work touches, and which devices reach each other's.
//
// Each device's memory is mapped for that device only, like any that the program gets natively. Another one reaches it once the
// program has requested that (cuCtxEnablePeerAccess, cuMemPoolSetAccess, cuMemSetAccess): then all of that device's memory is
// mapped for it, for memory made with cuMemMap knows no other way. So invariants:
//   A copy or a fill is put into a stream of the device whose memory it touches, or is a copy that names both contexts.
//   Where the program's stream is another device's, ours waits for it, and it for ours: the order is the stream's.
//   The calling thread's current context is that of the stream's device when work is enqueued (translate(), on_device_of()).
#include <algorithm>

#include "server/executor/executor.h"

namespace xmig::server {

uint32_t Executor::home_of(uint64_t address) const {
  const bool shadow = address >= kShadowBase && address - kShadowBase < journal::kMaxDevices * kShadowSpan;
  const uint32_t ordinal = shadow ? ordinal_of_address(address) : ordinal_of_device_address(address);
  return ordinal < contexts_.count() ? ordinal : stream_ordinal();
}

// --- another device's stream --------------------------------------------------------------------------------------

// An event to wait for at once: the next use records it again.
CUresult Executor::aside_mark(uint32_t ordinal, CUevent* mark) {
  CUevent& event = aside_marks_[ordinal];
  const CUresult result = event ? CUDA_SUCCESS : driver_.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
  *mark = event;
  return result;
}

// Each of the program's streams has one of its own on each device: two that share one could wait for each other.
CUresult Executor::step_aside(uint32_t ordinal, CUstream stream, CUstream* out) {
  const uint32_t home = stream_ordinal();
  CUevent before = nullptr;
  contexts_.use(home);
  CUresult result = aside_mark(home, &before);
  if (result == CUDA_SUCCESS) result = driver_.cuEventRecordWithFlags(before, stream, 0);
  if (result != CUDA_SUCCESS) return result;
  contexts_.use(ordinal);
  CUstream& aside = asides_[{home, stream, ordinal}];
  if (!aside) result = driver_.cuStreamCreateWithPriority(&aside, CU_STREAM_NON_BLOCKING, 0);
  if (result == CUDA_SUCCESS) result = driver_.cuStreamWaitEvent(aside, before, 0);
  if (result != CUDA_SUCCESS) {
    contexts_.use(home);
    return result;
  }
  working_.add(aside, ordinal);
  *out = aside;
  return CUDA_SUCCESS;
}

CUresult Executor::come_back(uint32_t ordinal, CUstream stream, CUstream aside) {
  CUevent after = nullptr;
  contexts_.use(ordinal);
  CUresult result = aside_mark(ordinal, &after);
  if (result == CUDA_SUCCESS) result = driver_.cuEventRecordWithFlags(after, aside, 0);
  contexts_.use(stream_ordinal());
  return result == CUDA_SUCCESS ? driver_.cuStreamWaitEvent(stream, after, 0) : result;
}

// Of a stream that is about to be destroyed. What they still have to do the stream itself waits for.
void Executor::drop_asides(CUstream gone) {
  std::erase_if(asides_, [&](const auto& entry) {
    if (std::get<1>(entry.first) != gone) return false;
    working_.forget(entry.second);
    driver_.cuStreamDestroy_v2(entry.second);
    return true;
  });
}

void Executor::close_asides() {
  for (const auto& [key, aside] : asides_) {
    contexts_.use(std::get<2>(key));
    driver_.cuStreamDestroy_v2(aside);
  }
  for (uint32_t ordinal = 0; ordinal < contexts_.count(); ++ordinal) {
    contexts_.use(ordinal);
    if (aside_marks_[ordinal]) driver_.cuEventDestroy_v2(aside_marks_[ordinal]);
  }
}

// --- which devices reach which memory -----------------------------------------------------------------------------

bool Executor::is_shared(uint32_t memory, uint32_t device) const {
  return lasting_shares_.contains({memory, device}) ||
         std::any_of(objects_.peers.begin(), objects_.peers.end(), [&](const auto& entry) {
           return entry.first.memory == memory && entry.first.device == device;
         });
}

CUresult Executor::share(uint32_t memory, uint32_t device, bool on) {
  const std::lock_guard lock(memory_.mutex);
  return memory_.hosting.share(memory, device, on);
}

CUresult Executor::on_xmPeer(Record& record) {
  Args_xmPeer args;
  if (!record.arguments(args) || args.device >= contexts_.count() || args.memory >= contexts_.count() ||
      args.device == args.memory || (args.peer != 0 && !journal::handle_is(args.peer, journal::Kind::kContext))) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const bool lasting = args.peer == 0;
  const PeerKey key{lasting ? 0 : record.header().context, lasting ? 0 : journal::handle_index(args.peer), args.device, args.memory};
  if (args.reaches == 0) {
    objects_.peers.erase(key);
    return is_shared(args.memory, args.device) ? CUDA_SUCCESS : share(args.memory, args.device, false);
  }
  if ((device_.peer(static_cast<int>(args.device), static_cast<int>(args.memory)) & journal::kPeerReaches) == 0) {
    return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  }
  const CUresult result = share(args.memory, args.device, true);
  if (result == CUDA_SUCCESS) objects_.peers.insert_or_assign(key, objects_.records.keep(record.sequence(), record.stored()));
  return result;
}

// What was requested in this context, or for memory of this context.
void Executor::reset_peers(uint32_t context) {
  std::set<std::pair<uint32_t, uint32_t>> dropped;
  std::erase_if(objects_.peers, [&](const auto& entry) {
    const bool gone = context != 0 && (entry.first.context == context || entry.first.peer == context);
    if (gone) dropped.insert({entry.first.memory, entry.first.device});
    return gone;
  });
  for (const auto& [memory, device] : dropped) {
    if (!is_shared(memory, device)) share(memory, device, false);
  }
}

}  // namespace xmig::server
