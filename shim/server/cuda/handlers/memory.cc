#include "server/cuda/handlers/memory.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <thread>

#include "journal/numbers.h"
#include "server/clock.h"

namespace xmig::server {
namespace {

// How long others take to let go of memory that was released, at most, ns.
constexpr uint64_t kLetGo = 1'000'000'000;

static_assert(sizeof(Args_xmNameNumbers) == sizeof(journal::NamedNumbers));
static_assert(offsetof(Args_xmNameNumbers, type) == offsetof(journal::NamedNumbers, type));

}  // namespace

Memory::Memory(const Session& session, Snapshots& snapshots, Relocation& relocation)
    : driver_(session.device.driver()),
      contexts_(session.services.contexts),
      job_(session.services.job),
      standby_memory_(session.services.standby_memory),
      quota_(session.services.sharing.quota()),
      memory_(session.memory),
      objects_(session.objects),
      current_(session.current),
      execution_(session.execution),
      snapshots_(snapshots),
      relocation_(relocation) {}

// Of this device's memory. Others may be making some at the same time.
uint64_t Memory::shadow_bytes(uint32_t ordinal) {
  const std::lock_guard lock(memory_.mutex);
  return memory_.shadow.device_bytes(ordinal);
}

CUresult Memory::on_xmGrow(Record& record) {
  Args_xmGrow args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  // The program was informed that there was no memory and went another way: a replay must not find some after all.
  if (record.replied() && record.header().result != CUDA_SUCCESS) return static_cast<CUresult>(record.header().result);
  // The address says which device is meant: the calling thread's current one may be another.
  const uint32_t ordinal = ordinal_of_device_address(args.address);
  if (ordinal >= contexts_.count()) return CUDA_ERROR_INVALID_VALUE;
  // There the memory is the state, and what is not there any more was lost with a device.
  if (current_.mode == Mode::kObjects && record.replied() && !memory_.hosting.exists(args.address, args.bytes)) {
    current_.over(kStateIsGone);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  const uint64_t sequence = record.sequence();
  if (!within_quota(sequence, ordinal, args.address, args.bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  // Memory can be placed on a device that the program uses for nothing else.
  if (const device::Status opened = contexts_.try_open(ordinal); !opened) return device::result_of(opened);
  const CUresult result = grow(ordinal, args.address, args.bytes);
  // The claim is as before the record again, so that a server which repeats it claims it again.
  if (result != CUDA_SUCCESS && quota_.there_is() && !quota_.counted(ordinal, sequence + 1)) {
    quota_.set(ordinal, memory_.hosting.alive_bytes(ordinal), sequence - 1);
  }
  return result;
}

// If there is no room at once, everything that can make some is done.
CUresult Memory::grow(uint32_t ordinal, uint64_t address, uint64_t bytes) {
  const auto grow = [&] {
    contexts_.use(ordinal);
    const std::lock_guard lock(memory_.mutex);
    return device::result_of(memory_.hosting.grow(ordinal, address, bytes));
  };
  CUresult result = grow();
  if (result != CUDA_ERROR_OUT_OF_MEMORY || current_.mode != Mode::kRun || execution_.replaying()) return result;
  if (gives_up_standbys(ordinal, bytes)) result = grow();
  if (result != CUDA_ERROR_OUT_OF_MEMORY) return result;
  // What the program gave back is released by a snapshot, and what the shadow takes belongs to the program first.
  relocation_.end_settling();
  const uint64_t shadow = shadow_bytes(ordinal), dead = memory_.hosting.dead_bytes(ordinal);
  snapshots_.evict(shadow != 0);
  if (memory_.hosting.has_dead() || shadow != 0) {
    const uint64_t before = free_bytes(ordinal);
    if (execution_.take_snapshot("the device's memory is full")) {
      const uint64_t now = shadow_bytes(ordinal);
      wait_for_room(ordinal, bytes, before + dead + shadow - std::min(shadow, now));
      result = grow();
    }
  }
  snapshots_.evict(false);
  // Together, that and this may be enough.
  if (result == CUDA_ERROR_OUT_OF_MEMORY && gives_up_standbys(ordinal, bytes)) result = grow();
  return result;
}

// Only what programs have counts: snapshots, and what was given back, are the device's matter. What the server before this one has counted
// is not claimed again, whatever the program says of it.
bool Memory::within_quota(uint64_t sequence, uint32_t ordinal, uint64_t address, uint64_t bytes) {
  if (!quota_.there_is()) return true;
  if (!whole_granules(address, bytes) || !in_device_range(ordinal, address, bytes)) return true;  // it fails
  const uint64_t more = memory_.hosting.lacking(address, bytes), all = memory_.hosting.alive_bytes(ordinal) + more;
  if (quota_.counted(ordinal, sequence)) return all <= quota_.bytes();
  return more == 0 || quota_.claim(ordinal, all, sequence);
}

bool Memory::quota_repeated(uint64_t sequence) const {
  for (uint32_t ordinal = 0; quota_.there_is() && ordinal < contexts_.count(); ++ordinal) {
    if (quota_.counted(ordinal, sequence + 1)) return false;
  }
  return true;
}

// The program could have written larger records for those that its server had counted.
bool Memory::keep_to_quota(uint64_t sequence) {
  if (!quota_.there_is()) return true;
  for (uint32_t ordinal = 0; ordinal < contexts_.count(); ++ordinal) {
    const uint64_t all = memory_.hosting.alive_bytes(ordinal);
    if (all > quota_.claimed(ordinal) && !quota_.claim(ordinal, all, sequence)) return false;
  }
  return true;
}

// Communicators that were made ahead, if that is enough. They are made again only after a while.
bool Memory::gives_up_standbys(uint32_t ordinal, uint64_t wanted) {
  const uint64_t free = free_bytes(ordinal);
  const uint64_t coming = standby_memory_.give_up(ordinal, wanted - std::min(wanted, free));
  if (coming == 0) return false;
  wait_for_room(ordinal, wanted, free + coming);
  return true;
}

uint64_t Memory::free_bytes(uint32_t ordinal) {
  contexts_.use(ordinal);
  size_t free = 0, total = 0;
  return driver_.cuMemGetInfo_v2(&free, &total) == CUDA_SUCCESS ? free : 0;
}

// What was released here is free when the daemon, the descriptor store and the standby have let go of it, too. Who else uses
// the device may take it first: it is waited for, but not for long.
void Memory::wait_for_room(uint32_t ordinal, uint64_t wanted, uint64_t coming) {
  if (wanted > coming) return;
  const uint64_t until = now_ns() + kLetGo;
  while (free_bytes(ordinal) < wanted && now_ns() < until) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

CUresult Memory::on_xmShrink(Record& record) {
  Args_xmShrink args;
  if (!record.arguments(args) || !whole_granules(args.address, args.bytes) ||
      !memory_.hosting.backed(args.address, args.bytes)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (memory_.live.overlaps(args.address, args.bytes)) return CUDA_ERROR_INVALID_VALUE;
  const uint32_t ordinal = ordinal_of_device_address(args.address);
  const std::lock_guard lock(memory_.mutex);
  memory_.hosting.shrink(args.address, args.bytes);
  if (quota_.there_is() && !quota_.counted(ordinal, record.sequence())) {
    quota_.set(ordinal, memory_.hosting.alive_bytes(ordinal), record.sequence());
  }
  return CUDA_SUCCESS;
}

CUresult Memory::on_xmAlloc(Record& record) {
  Args_xmAlloc args;
  if (!record.arguments(args) || !memory_.hosting.backed(args.address, args.bytes)) return CUDA_ERROR_INVALID_VALUE;
  const bool added = memory_.live.add({args.address, args.bytes, record.header().context});
  return added ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult Memory::on_xmFree(Record& record) {
  Args_xmFree args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  const LiveRange* const range = memory_.live.around(args.address);
  if (range) objects_.forget_numbers(range->address, range->bytes);
  return memory_.live.remove(args.address) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult Memory::on_xmDiscard(Record& record) {
  Args_xmDiscard args;
  if (!record.arguments(args) || !whole_granules(args.address, args.bytes)) return CUDA_ERROR_INVALID_VALUE;
  objects_.forget_numbers(args.address, args.bytes);
  return memory_.live.discard(args.address, args.bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult Memory::on_xmReuse(Record& record) {
  Args_xmReuse args;
  if (!record.arguments(args) || !whole_granules(args.address, args.bytes)) return CUDA_ERROR_INVALID_VALUE;
  memory_.live.reuse(args.address, args.bytes);
  return CUDA_SUCCESS;
}

CUresult Memory::on_cuMemGetInfo_v2(Record& record) {
  Reply_cuMemGetInfo_v2 reply{};
  const uint32_t ordinal = record.header().ordinal;
  const std::atomic<uint64_t>& counted = job_.header().standby_bytes[ordinal];
  const uint64_t before = counted.load();
  const CUresult result = driver_.cuMemGetInfo_v2(&reply.free, &reply.total);
  const uint64_t standbys = std::min(before, counted.load());  // what comes or goes in this moment is counted as used
  // When the program needs the room, a snapshot releases what the program gave back, and moves the shadow out of the way; and who
  // has made communicators ahead gives them up.
  reply.free = std::min(reply.total, reply.free + shadow_bytes(ordinal) + memory_.hosting.dead_bytes(ordinal) + standbys);
  if (quota_.there_is()) {
    reply.total = std::min<uint64_t>(reply.total, quota_.bytes());
    reply.free = std::min<uint64_t>(reply.free, quota_.left(ordinal));
  }
  if (result == CUDA_SUCCESS) record.set_reply(&reply, sizeof(reply));
  return result;
}

// What is instructed to the devices is what the program has: they cannot take the whole range, which has no pages yet.
CUresult Memory::on_xmPin(Record& record) {
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

CUresult Memory::on_xmUnpin(Record& record) {
  Args_xmUnpin args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (objects_.pins.erase(args.address) == 0) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  return driver_.cuMemHostUnregister(reinterpret_cast<void*>(args.address));
}

CUresult Memory::on_xmNameNumbers(Record& record) {
  Args_xmNameNumbers args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  const journal::NamedNumbers named{args.address, args.bytes, args.type, 0};
  if (!named.sound() || !memory_.live.contains(args.address, args.bytes)) return CUDA_ERROR_INVALID_VALUE;
  objects_.forget_numbers(args.address, args.bytes);
  if (objects_.numbers.size() >= journal::kMostNamed) return CUDA_ERROR_OUT_OF_MEMORY;
  objects_.numbers.emplace(args.address, Named{args.bytes, objects_.records.keep(record.sequence(), record.stored())});
  return CUDA_SUCCESS;
}

CUresult Memory::on_xmForgetNumbers(Record& record) {
  Args_xmForgetNumbers args;
  if (!record.arguments(args) || args.address + args.bytes < args.address) return CUDA_ERROR_INVALID_VALUE;
  objects_.forget_numbers(args.address, args.bytes);
  return CUDA_SUCCESS;
}

}  // namespace xmig::server
