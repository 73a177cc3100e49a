// The program's memory: what is backed, what is live, and what is left when a context goes.
#include <algorithm>
#include <chrono>
#include <thread>

#include "server/executor/executor.h"

namespace xmig::server {
namespace {

// How long others take to let go of memory that was released, at most, ns.
constexpr uint64_t kLetGo = 1'000'000'000;

}  // namespace

// Of this device's memory. Others may be making some at the same time.
uint64_t Executor::shadow_bytes(uint32_t ordinal) {
  const std::lock_guard lock(memory_.mutex);
  return memory_.shadow.device_bytes(ordinal);
}

CUresult Executor::on_xmGrow(Record& record) {
  Args_xmGrow args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  // The program was informed that there was no memory and went another way: a replay must not find some after all.
  if (record.replied() && record.header().result != CUDA_SUCCESS) return static_cast<CUresult>(record.header().result);
  // The address says which device is meant: the calling thread's current one may be another.
  const uint32_t ordinal = ordinal_of_device_address(args.address);
  if (ordinal >= contexts_.count()) return CUDA_ERROR_INVALID_VALUE;
  const auto grow = [&] {
    contexts_.use(ordinal);
    const std::lock_guard lock(memory_.mutex);
    return memory_.hosting.grow(ordinal, args.address, args.bytes);
  };
  CUresult result = grow();
  if (result != CUDA_ERROR_OUT_OF_MEMORY || mode_ != Mode::kRun || replay_.running()) return result;
  // What the program gave back is released by a snapshot, and what the shadow takes belongs to the program first.
  relocation_.end_settling();
  const uint64_t shadow = shadow_bytes(ordinal), dead = memory_.hosting.dead_bytes(ordinal);
  snapshots_.evict(shadow != 0);
  if (memory_.hosting.has_dead() || shadow != 0) {
    const uint64_t before = free_bytes(ordinal);
    if (take_snapshot("the device's memory is full")) {
      const uint64_t now = shadow_bytes(ordinal);
      wait_for_room(ordinal, args.bytes, before + dead + shadow - std::min(shadow, now));
      result = grow();
    }
  }
  snapshots_.evict(false);
  return result;
}

uint64_t Executor::free_bytes(uint32_t ordinal) {
  contexts_.use(ordinal);
  size_t free = 0, total = 0;
  return driver_.cuMemGetInfo_v2(&free, &total) == CUDA_SUCCESS ? free : 0;
}

// What was released here is free when the daemon, the descriptor store and the standby have let go of it, too. Who else uses
// the device may take it first: it is waited for, but not for long.
void Executor::wait_for_room(uint32_t ordinal, uint64_t wanted, uint64_t coming) {
  if (wanted > coming) return;
  const uint64_t until = now_ns() + kLetGo;
  while (free_bytes(ordinal) < wanted && now_ns() < until) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

CUresult Executor::on_xmShrink(Record& record) {
  Args_xmShrink args;
  if (!record.arguments(args) || !whole_granules(args.address, args.bytes) ||
      !memory_.hosting.backed(args.address, args.bytes)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (memory_.live.overlaps(args.address, args.bytes)) return CUDA_ERROR_INVALID_VALUE;
  const std::lock_guard lock(memory_.mutex);
  memory_.hosting.shrink(args.address, args.bytes);
  return CUDA_SUCCESS;
}

CUresult Executor::on_xmAlloc(Record& record) {
  Args_xmAlloc args;
  if (!record.arguments(args) || !memory_.hosting.backed(args.address, args.bytes)) return CUDA_ERROR_INVALID_VALUE;
  const bool added = memory_.live.add({args.address, args.bytes, record.header().context});
  return added ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult Executor::on_xmFree(Record& record) {
  Args_xmFree args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  return memory_.live.remove(args.address) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult Executor::on_xmDiscard(Record& record) {
  Args_xmDiscard args;
  if (!record.arguments(args) || !whole_granules(args.address, args.bytes)) return CUDA_ERROR_INVALID_VALUE;
  return memory_.live.discard(args.address, args.bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult Executor::on_xmReuse(Record& record) {
  Args_xmReuse args;
  if (!record.arguments(args) || !whole_granules(args.address, args.bytes)) return CUDA_ERROR_INVALID_VALUE;
  memory_.live.reuse(args.address, args.bytes);
  return CUDA_SUCCESS;
}

CUresult Executor::on_cuMemGetInfo_v2(Record& record) {
  Reply_cuMemGetInfo_v2 reply{};
  const CUresult result = driver_.cuMemGetInfo_v2(&reply.free, &reply.total);
  // A snapshot releases what the program gave back, and moves the shadow out of the way, when the program needs the room.
  const uint32_t ordinal = record.header().ordinal;
  reply.free = std::min(reply.total, reply.free + shadow_bytes(ordinal) + memory_.hosting.dead_bytes(ordinal));
  if (result == CUDA_SUCCESS) record.set_reply(&reply, sizeof(reply));
  return result;
}

CUresult Executor::on_xmLimit(Record& record) {
  Args_xmLimit args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  const auto limit = static_cast<CUlimit>(args.limit);
  size_t value = 0;
  if (const CUresult unread = driver_.cuCtxGetLimit(&value, limit); unread != CUDA_SUCCESS) {
    // One that does not exist: the driver may answer differently to who sets it.
    const CUresult unset = args.set ? driver_.cuCtxSetLimit(limit, args.value) : unread;
    return unset != CUDA_SUCCESS ? unset : unread;
  }
  if (args.set) {
    const journal::RecordHeader& header = record.header();
    const auto [entry, first] = objects_.limits.try_emplace({header.ordinal, args.limit}, Limit{.before = value});
    const CUresult result = driver_.cuCtxSetLimit(limit, args.value);
    if (result == CUDA_SUCCESS) {
      entry->second.owner = {header.context, header.ordinal};
      entry->second.creation = objects_.records.keep(record.sequence(), record.stored());
      driver_.cuCtxGetLimit(&value, limit);
    } else {
      if (first) objects_.limits.erase(entry);
      return result;
    }
  }
  const uint64_t reply = value;
  record.set_reply(&reply, sizeof(reply));
  return CUDA_SUCCESS;
}

CUresult Executor::on_xmContextReset(Record& record) {
  Args_xmContextReset args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  const uint32_t ordinal = record.header().ordinal;
  if (mode_ == Mode::kRun) {
    // The one call that waits: nothing of the context may run while its modules go.
    const CUresult result = driver_.cuCtxSynchronize();
    if (result != CUDA_SUCCESS) return result;
  }
  reset_context(journal::handle_is(args.context, journal::Kind::kContext) ? journal::handle_index(args.context)
                                                                        : static_cast<uint32_t>(args.context));
  if (failures_[ordinal].error == 0) return CUDA_SUCCESS;
  failures_[ordinal] = {};
  any_failure_ = false;
  for (const Failure& failure : failures_) any_failure_ |= failure.error != 0;
  journal::JournalHeader& header = job_.header();
  // A replay may pass a reset that lies before the fault that the program has been informed of since.
  const bool earlier = header.context_error_sequence.load() < record.sequence();
  if (earlier && header.context_error_ordinal.load() == ordinal) {
    header.context_error.store(0, std::memory_order_release);
  }
  return CUDA_SUCCESS;
}

// What is instructed to the devices is what the program has: they cannot take the whole range, which has no pages yet.
CUresult Executor::on_xmPin(Record& record) {
  Args_xmPin args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (args.bytes == 0 || (args.address | args.bytes) % kPage != 0 || !job_.is_pinned(args.address, args.bytes)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const auto next = objects_.pins.lower_bound(args.address);
  const bool before = next != objects_.pins.begin() &&
                      std::prev(next)->first + std::prev(next)->second.bytes > args.address;
  if (before || (next != objects_.pins.end() && next->first - args.address < args.bytes)) {
    return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  }
  const CUresult result = driver_.cuMemHostRegister_v2(reinterpret_cast<void*>(args.address), args.bytes, kPinFlags);
  if (result != CUDA_SUCCESS) return result;
  objects_.pins.emplace(args.address, Pin{args.bytes,
                                          {record.header().context, record.header().ordinal},
                                          objects_.records.keep(record.sequence(), record.stored())});
  return CUDA_SUCCESS;
}

CUresult Executor::on_xmUnpin(Record& record) {
  Args_xmUnpin args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (objects_.pins.erase(args.address) == 0) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  return driver_.cuMemHostUnregister(reinterpret_cast<void*>(args.address));
}

void Executor::reset_context(uint32_t context) {
  std::erase_if(objects_.pins, [&](const auto& entry) {
    if (entry.second.owner.context != context) return false;
    driver_.cuMemHostUnregister(reinterpret_cast<void*>(entry.first));
    return true;
  });
  objects_.streams.for_each([&](uint32_t index, const Stream& stream) {
    if (stream.owner.context != context) return;
    leave_work(stream.real);
    driver_.cuStreamDestroy_v2(stream.real);
    objects_.streams.erase(index);
  });
  objects_.events.for_each([&](uint32_t index, const Event& event) {
    if (event.owner.context != context) return;
    driver_.cuEventDestroy_v2(event.real);
    objects_.events.erase(index);
  });
  objects_.modules.for_each([&](uint32_t index, const Module& module) {
    if (module.owner.context == context) unload(index);
  });
  objects_.graphs.for_each([&](uint32_t index, const GraphExec& graph) {
    if (graph.owner.context != context) return;
    destroy(graph);
    objects_.graphs.erase(index);
  });
  std::erase_if(objects_.limits, [&](const auto& entry) {
    if (entry.second.owner.context != context) return false;
    driver_.cuCtxSetLimit(static_cast<CUlimit>(entry.first.second), entry.second.before);
    return true;
  });
  reset_peers(context);
  memory_.live.remove_context(context);
}

}  // namespace xmig::server
