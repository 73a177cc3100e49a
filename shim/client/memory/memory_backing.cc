#include "client/memory/memory_backing.h"

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "client/bootstrap/process.h"
#include "client/journal/append.h"

namespace xmig::client {

namespace {

using journal::kGranule;

// How much is queried of the server at once, at least and at most, and how much free backed memory is kept.
constexpr uint64_t kSmallestStep = 32ull << 20;
constexpr uint64_t kLargestStep = 512ull << 20;
constexpr uint64_t kKeep = 256ull << 20;

CUresult grow(uint64_t address, uint64_t bytes) {
  const Args_xmGrow args{.address = address, .bytes = bytes};
  return call(Op::xmGrow, &args, sizeof(args), nullptr, 0);
}

CUresult shrink(uint64_t address, uint64_t bytes) {
  const Args_xmShrink args{.address = address, .bytes = bytes};
  return append(Op::xmShrink, &args, sizeof(args));
}

// Then the job's other processes may need what this one does not: it grows by what it needs, and caches nothing.
bool shares_quota() { return process.header && process.header->memory_quota != 0; }

}  // namespace

Backing::Backing(int ordinal) {
  bare_.add({journal::kDeviceBase + static_cast<uint64_t>(ordinal) * journal::kDeviceSpan, journal::kDeviceSpan, {}});
}

bool Backing::take_cached(uint64_t bytes, uint64_t* address) {
  const auto range = cached_.take(bytes, kGranule);
  if (range) *address = range->address;
  return range.has_value();
}

uint64_t Backing::step() const {
  return tight_ || shares_quota() ? 0 : std::clamp(round_to_granules(grown_ / 16), kSmallestStep, kLargestStep);
}

// Bare addresses to grow at, so that together with `prefix` (cached memory that lies directly before them, maybe
// none) there are `bytes` in a row. Both are taken. No bytes: there are no such addresses.
FreeRange Backing::choose(uint64_t bytes, FreeRange* prefix) {
  *prefix = {};
  for (const auto& [start, range] : cached_.all()) {
    if (range.bytes <= prefix->bytes) continue;
    const auto after = bare_.starting_at(range.end());
    if (after && after->bytes >= bytes - range.bytes) *prefix = range;
  }
  const uint64_t rest = bytes - prefix->bytes;
  const uint64_t wanted = std::max(rest, step());
  if (prefix->bytes) {
    cached_.take_at(prefix->address, prefix->bytes);
    const uint64_t taken = std::min(wanted, bare_.starting_at(prefix->end())->bytes);
    bare_.take_at(prefix->end(), taken);
    return {prefix->end(), taken, {}};
  }
  if (const auto range = bare_.take(wanted, kGranule)) return *range;
  return bare_.take(rest, kGranule).value_or(FreeRange{});
}

CUresult Backing::take(uint64_t bytes, uint64_t* address) {
  if (bytes > journal::kDeviceSpan) return CUDA_ERROR_OUT_OF_MEMORY;
  FreeRange prefix, fresh;
  {
    const std::lock_guard guard(lock_);
    if (take_cached(bytes, address)) return CUDA_SUCCESS;
    fresh = choose(bytes, &prefix);
  }
  if (!fresh.bytes) return CUDA_ERROR_OUT_OF_MEMORY;
  const uint64_t needed = bytes - prefix.bytes;
  uint64_t backed = fresh.bytes;
  CUresult result = grow(fresh.address, backed);
  const bool refused = result == CUDA_ERROR_OUT_OF_MEMORY;
  if (refused && backed > needed) {
    backed = needed;
    result = grow(fresh.address, backed);
  }
  if (result == CUDA_ERROR_OUT_OF_MEMORY && this->bytes().cached) {
    trim(0);  // `prefix` is not among what goes: it is as good as new memory
    result = grow(fresh.address, backed);
  }
  const std::lock_guard guard(lock_);
  tight_ = refused;
  if (result != CUDA_SUCCESS) {
    bare_.add(fresh);
    if (prefix.bytes) cached_.add(prefix);
    return result;
  }
  steps_.emplace(fresh.address, backed);
  grown_ += backed;
  *address = prefix.bytes ? prefix.address : fresh.address;
  const uint64_t extra = backed - needed;
  if (extra) cached_.add({fresh.address + needed, extra, {}});
  if (backed < fresh.bytes) bare_.add({fresh.address + backed, fresh.bytes - backed, {}});
  return CUDA_SUCCESS;
}

void Backing::give(uint64_t address, uint64_t bytes) {
  uint64_t cached;
  {
    const std::lock_guard guard(lock_);
    cached_.add({address, bytes, {}});
    cached = cached_.bytes();
  }
  if (const uint64_t keep = shares_quota() ? 0 : kKeep; cached > keep) trim(keep);
}

void Backing::trim(uint64_t keep) {
  std::vector<FreeRange> steps;
  {
    const std::lock_guard guard(lock_);
    for (auto it = steps_.begin(); it != steps_.end();) {
      const FreeRange step{it->first, it->second, {}};
      if (cached_.bytes() >= keep + step.bytes && cached_.take_at(step.address, step.bytes)) {
        steps.push_back(step);
        it = steps_.erase(it);
        grown_ -= step.bytes;
      } else {
        ++it;
      }
    }
    tight_ = tight_ && steps.empty();
  }
  for (const FreeRange& step : steps) {
    const CUresult result = shrink(step.address, step.bytes);
    const std::lock_guard guard(lock_);
    if (result == CUDA_SUCCESS) {
      bare_.add(step);
    } else {
      cached_.add(step);
      steps_.emplace(step.address, step.bytes);
      grown_ += step.bytes;
    }
  }
}

CUresult Backing::reserve(uint64_t bytes, uint64_t alignment, uint64_t hint, uint64_t* address) {
  const std::lock_guard guard(lock_);
  if (hint && bare_.take_at(hint, bytes)) {
    *address = hint;
    return CUDA_SUCCESS;
  }
  const auto range = bare_.take(bytes, std::max(alignment, kGranule));
  if (!range) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = range->address;
  return CUDA_SUCCESS;
}

void Backing::unreserve(uint64_t address, uint64_t bytes) {
  const std::lock_guard guard(lock_);
  bare_.add({address, bytes, {}});
}

CUresult Backing::grow_at(uint64_t address, uint64_t bytes) {
  CUresult result = grow(address, bytes);
  if (result == CUDA_ERROR_OUT_OF_MEMORY && this->bytes().cached) {
    trim(0);
    result = grow(address, bytes);
  }
  return result;
}

void Backing::shrink_at(uint64_t address, uint64_t bytes) { shrink(address, bytes); }

Backing::Bytes Backing::bytes() {
  const std::lock_guard guard(lock_);
  return {cached_.bytes(), bare_.bytes(), grown_};
}

Backing& backing(int ordinal) {
  // Never destroyed: programs free memory from their exit handlers.
  static auto& all = *new auto([] {
    std::array<std::unique_ptr<Backing>, journal::kMaxDevices> made;
    for (uint32_t i = 0; i < journal::kMaxDevices; ++i) made[i] = std::make_unique<Backing>(static_cast<int>(i));
    return made;
  }());
  return *all[static_cast<size_t>(ordinal)];
}

int ordinal_of(uint64_t address) {
  const uint64_t offset = address - journal::kDeviceBase;
  return offset < journal::kMaxDevices * journal::kDeviceSpan ? static_cast<int>(offset / journal::kDeviceSpan) : -1;
}

}  // namespace xmig::client
