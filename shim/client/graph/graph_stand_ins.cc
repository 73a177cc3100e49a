#include "client/graph/graph_stand_ins.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "client/copy/copy.h"
#include "client/graph/capture.h"
#include "client/graph/graph_play.h"
#include "client/journal/context.h"
#include "client/journal/streams.h"
#include "client/journal/thread.h"
#include "client/memory/memory.h"
#include "client/memory/memory_backing.h"
#include "client/memory/memory_map.h"
#include "client/memory/pinned.h"
#include "client/memory/pool.h"
#include "local.h"
#include "records.h"

namespace xmig::client {

// What the copies in bodies have written, as it has come to `copies_`: whether each was made, and its rows without gaps.
struct StandIns::Returned {
  struct One {
    Rows host;
    const uint32_t* made;
    const std::byte* rows;
  };
  std::vector<One> all;

  static void CUDA_CB look(void* self) {
    const std::unique_ptr<std::shared_ptr<const Returned>> returned(static_cast<std::shared_ptr<const Returned>*>(self));
    for (const One& one : (*returned)->all) {
      if (!*one.made) continue;
      for (uint64_t row = 0; row < one.host.height; ++row) {
        std::memcpy(reinterpret_cast<void*>(one.host.address + row * one.host.pitch), one.rows + row * one.host.width,
                    one.host.width);
      }
    }
  }
};

namespace {

constexpr uint64_t kAlignment = 256;  // copies are as fast as between the program's own addresses

uint64_t aligned(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

struct StandIns::Leftover {
  std::vector<Allocation> memory;
  std::vector<Use> uses;
};

std::vector<StandIns::Leftover>& StandIns::leftovers() {
  static auto& all = *new std::vector<Leftover>;
  return all;
}

uint64_t& StandIns::resets_of(const Context& context) {
  static auto& all = *new std::map<const Context*, uint64_t>;
  return all[&context];
}

void StandIns::context_reset(const Context& context) { ++resets_of(context); }

bool StandIns::Use::over() const {
  return resets != resets_of(*context) || client::cuEventQuery(event) != CUDA_ERROR_NOT_READY;
}

void StandIns::Use::forget() const {
  if (resets == resets_of(*context)) client::cuEventDestroy_v2(event);
}

void StandIns::give_back() {
  if (diverting()) return;  // to ask for an event may end a capture
  std::erase_if(leftovers(), [](const Leftover& one) {
    if (!std::all_of(one.uses.begin(), one.uses.end(), [](const Use& use) { return use.over(); })) return false;
    for (const Use& use : one.uses) use.forget();
    for (const Allocation& allocation : one.memory) {
      const auto now = memory_map().find(allocation.address);
      if (!now || now->id != allocation.id) continue;
      if (allocation.on_device()) {
        free_idle_global(allocation.address);
      } else {
        free_idle_pinned(allocation.address);
      }
    }
    return true;
  });
}

StandIns::~StandIns() {
  Leftover left{.memory = {}, .uses = std::move(uses_)};
  const auto leave = [&](uint64_t address) {
    if (auto allocation = address ? memory_map().find(address) : std::nullopt) left.memory.push_back(std::move(*allocation));
  };
  for (const auto& [ordinal, memory] : memory_) leave(memory.address);
  leave(reinterpret_cast<uint64_t>(copies_));
  if (!left.memory.empty() || !left.uses.empty()) leftovers().push_back(std::move(left));
  give_back();
}

void StandIns::take(Node& node, bool sure) {
  if (!node.enabled) return;
  for (const Operation& operation : node.operations) {
    if (operation.op == Op::xmCopyFromPinned) {
      const auto args = operation.as<Args_xmCopyFromPinned>();
      taken_.push_back({&node, sure, false, {args.source, args.source_pitch, args.width, args.height},
                        {args.destination, args.pitch, args.width, args.height}});
    } else if (operation.op == Op::xmCopyToPinned) {
      const auto args = operation.as<Args_xmCopyToPinned>();
      taken_.push_back({&node, sure, true, {args.destination, args.destination_pitch, args.width, args.height},
                        {args.source, args.pitch, args.width, args.height}});
    }
  }
}

bool StandIns::has_taken(uint64_t address) const {
  if (taken_.empty() || memory_map().place(address, 1) != Place::kPinned) return false;
  const auto whole = memory_map().find(address);
  return whole && std::any_of(taken_.begin(), taken_.end(), [&](const Taken& one) {
    return one.host.address >= whole->address && one.host.address < whole->end();
  });
}

CUresult StandIns::settle() {
  std::vector<Taken> taken = std::exchange(taken_, {});
  std::vector<Written> written;
  if (taken.empty()) return CUDA_SUCCESS;
  give_back();
  CUresult result = allocate(taken, written);
  if (result == CUDA_SUCCESS) result = bring(taken);
  if (result == CUDA_SUCCESS && !written.empty()) result = take_back(written);
  return result;
}

// A piece for each stretch of page-locked memory: what overlaps is one, so that a copy finds what another one has written.
CUresult StandIns::allocate(std::vector<Taken>& taken, std::vector<Written>& written) {
  std::vector<Range> all, ranges;
  for (const Taken& one : taken) all.push_back({one.host.address, one.host.end(), ordinal_of(one.device.address)});
  std::sort(all.begin(), all.end(), [](const Range& a, const Range& b) { return a.start < b.start; });
  for (const Range& one : all) {
    if (ranges.empty() || one.start >= ranges.back().end) {
      ranges.push_back(one);
    } else {
      ranges.back().end = std::max(ranges.back().end, one.end);
    }
  }
  const auto range_of = [&](const Taken& one) -> Range& {
    return *std::prev(std::upper_bound(ranges.begin(), ranges.end(), one.host.address,
                                       [](uint64_t address, const Range& range) { return address < range.start; }));
  };
  for (Range& range : ranges) {
    Memory& memory = memory_[range.ordinal];
    range.at = memory.bytes + range.start % kAlignment;
    memory.bytes = aligned(range.at + (range.end - range.start));
  }
  const auto known = [&](const Taken& one) {
    return std::find_if(written.begin(), written.end(), [&](const Written& w) { return w.host == one.host; });
  };
  for (const Taken& one : taken) {
    if (!one.to_host || one.sure || known(one) != written.end()) continue;
    const Range& range = range_of(one);
    written.push_back({one.host, range.ordinal, 0, memory_[range.ordinal].words++});
  }
  for (auto& [ordinal, memory] : memory_) {
    if (ordinal < 0) return CUDA_ERROR_INVALID_VALUE;
    memory.words_at = std::exchange(memory.bytes, memory.bytes + memory.words * sizeof(uint32_t));
    const CUresult result =
        client::allocate(plain_pool(ordinal), MemoryKind::kGlobal, memory.bytes, nullptr, 0, &memory.address);
    if (result != CUDA_SUCCESS) return result;
  }
  for (Taken& one : taken) {
    const Range& range = range_of(one);
    const Memory& memory = memory_.at(range.ordinal);
    one.stand_in = memory.address + range.at + (one.host.address - range.start);
    if (!one.to_host || one.sure) continue;
    Written& piece = *known(one);
    piece.stand_in = one.stand_in;
    one.word = memory.address + memory.words_at + piece.word * sizeof(uint32_t);
  }
  return CUDA_SUCCESS;
}

// The copies between the stand-ins and the device, and those between page-locked memory and the stand-ins that are sure.
CUresult StandIns::bring(const std::vector<Taken>& taken) {
  for (const auto& [ordinal, memory] : memory_) {
    if (!memory.words) continue;
    const Collect collect(before_);
    // What no body writes is copied to the program, too, which does not look at it. But a replay has to find there what was there
    // before, and memory that nobody has written may hold anything.
    const CUresult result = record::cuMemsetD32Async(memory.address, 0, memory.bytes / sizeof(uint32_t), nullptr);
    if (result != CUDA_SUCCESS) return result;
  }
  for (const Taken& one : taken) one.node->operations.clear();
  for (size_t i = 0; i < taken.size(); ++i) {
    const Taken& one = taken[i];
    const auto between = [&](std::vector<Operation>& into, uint64_t to, uint64_t to_pitch, uint64_t from,
                             uint64_t from_pitch) {
      const Collect collect(into);
      return copy({to, to_pitch, from, from_pitch, one.host.width, one.host.height});
    };
    CUresult result = one.to_host ? between(one.node->operations, one.stand_in, one.host.pitch, one.device.address,
                                            one.device.pitch)
                                  : between(one.node->operations, one.device.address, one.device.pitch, one.stand_in,
                                            one.host.pitch);
    if (result == CUDA_SUCCESS && one.word) {
      const Collect collect(one.node->operations);
      result = record::cuMemsetD32Async(one.word, 1, 1, nullptr);
    }
    const bool again = std::any_of(taken.begin(), taken.begin() + static_cast<ptrdiff_t>(i), [&](const Taken& other) {
      return other.to_host == one.to_host && other.sure == one.sure && other.host == one.host;
    });
    if (result == CUDA_SUCCESS && !again && !one.to_host) {
      result = between(before_, one.stand_in, one.host.pitch, one.host.address, one.host.pitch);
    }
    if (result == CUDA_SUCCESS && !again && one.to_host && one.sure) {
      result = between(after_, one.host.address, one.host.pitch, one.stand_in, one.host.pitch);
    }
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

CUresult StandIns::take_back(const std::vector<Written>& written) {
  uint64_t bytes = 0;
  for (const Written& one : written) bytes += aligned(one.host.width * one.host.height) + sizeof(uint32_t);
  if (const CUresult result = client::cuMemHostAlloc(&copies_, bytes, CU_MEMHOSTALLOC_PORTABLE); result != CUDA_SUCCESS) {
    return result;
  }
  const auto start = reinterpret_cast<uint64_t>(copies_);
  auto returned = std::make_shared<Returned>();
  uint64_t at = start;
  const Collect collect(after_);
  for (const Written& one : written) {
    returned->all.push_back({one.host, nullptr, reinterpret_cast<const std::byte*>(at)});
    const CUresult result =
        copy({at, one.host.width, one.stand_in, one.host.pitch, one.host.width, one.host.height});
    if (result != CUDA_SUCCESS) return result;
    at += aligned(one.host.width * one.host.height);
  }
  for (const auto& [ordinal, memory] : memory_) {
    if (!memory.words) continue;
    const uint64_t size = memory.words * sizeof(uint32_t);
    const CUresult result = copy({at, size, memory.address + memory.words_at, size, size, 1});
    if (result != CUDA_SUCCESS) return result;
    for (size_t i = 0; i < written.size(); ++i) {
      if (written[i].ordinal != ordinal) continue;
      returned->all[i].made = reinterpret_cast<const uint32_t*>(at) + written[i].word;
    }
    at += size;
  }
  returned_ = std::move(returned);
  return CUDA_SUCCESS;
}

CUresult StandIns::before(CUstream stream) {
  for (const Operation& operation : before_) {
    if (const CUresult result = play(operation, stream); result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

CUresult StandIns::after(CUstream stream) {
  for (const Operation& operation : after_) {
    if (const CUresult result = play(operation, stream); result != CUDA_SUCCESS) return result;
  }
  if (memory_.empty()) return CUDA_SUCCESS;
  if (!returned_) return note_use(stream);
  auto with = std::make_unique<std::shared_ptr<const Returned>>(returned_);
  const CUresult result = client::cuLaunchHostFunc(stream, &Returned::look, with.get());
  if (result != CUDA_SUCCESS) return result;
  with.release();
  return note_use(stream);
}

CUresult StandIns::note_use(CUstream stream) {
  const Stream* const known = find_stream(stream);
  Context& context = known ? *known->context : *this_thread().context;
  const WithContext own(context);
  std::erase_if(uses_, [&](const Use& use) { return use.resets != resets_of(*use.context); });
  auto use = std::find_if(uses_.begin(), uses_.end(), [&](const Use& one) { return one.context == &context; });
  if (use == uses_.end()) {
    CUevent event = nullptr;
    const CUresult result = client::cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
    if (result != CUDA_SUCCESS) return result;
    use = uses_.insert(uses_.end(), {&context, resets_of(context), event});
  }
  return client::cuEventRecordWithFlags(use->event, stream, CU_EVENT_RECORD_DEFAULT);
}

}  // namespace xmig::client
