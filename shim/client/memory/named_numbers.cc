#include "client/memory/named_numbers.h"

#include <cuda.h>

#include <cstddef>
#include <iterator>

#include "client/journal/append.h"
#include "client/memory/cached_blocks.h"
#include "client/memory/memory_map.h"
#include "ops.h"

namespace xmig::client {

NamedNumbers& named_numbers() {
  static auto& numbers = *new NamedNumbers;
  return numbers;
}

bool NamedNumbers::name(const journal::NamedNumbers& numbers) {
  const std::lock_guard guard(lock_);
  const auto same = named_.find(numbers.address);
  if (same != named_.end() && same->second.bytes == numbers.bytes && same->second.type == numbers.type) return true;
  end(numbers.address, numbers.bytes, false);
  if (named_.size() >= journal::kMostNamed) return false;
  const Args_xmNameNumbers args{.address = numbers.address, .bytes = numbers.bytes, .type = numbers.type, .reserved = 0};
  if (append(Op::xmNameNumbers, &args, sizeof(args)) != CUDA_SUCCESS) return false;
  named_.emplace(numbers.address, numbers);
  return true;
}

void NamedNumbers::forget(uint64_t address, uint64_t bytes, bool reported) {
  const std::lock_guard guard(lock_);
  end(address, bytes, reported);
}

// lock_ is held.
void NamedNumbers::end(uint64_t address, uint64_t bytes, bool reported) {
  if (named_.empty()) return;
  auto at = named_.upper_bound(address);
  if (at != named_.begin() && address - std::prev(at)->first < std::prev(at)->second.bytes) --at;
  bool found = false;
  while (at != named_.end() && (at->first <= address || at->first - address < bytes)) {
    at = named_.erase(at);
    found = true;
  }
  if (!found || reported) return;
  // One that fails belongs to a job that is lost, which the program hears from its next call.
  const Args_xmForgetNumbers args{.address = address, .bytes = bytes};
  append(Op::xmForgetNumbers, &args, sizeof(args));
}

void NamedNumbers::forget_all() {
  const std::lock_guard guard(lock_);
  for (const auto& [address, numbers] : named_) {
    const Args_xmForgetNumbers args{.address = address, .bytes = numbers.bytes};
    append(Op::xmForgetNumbers, &args, sizeof(args));
  }
  named_.clear();
}

}  // namespace xmig::client

// For frameworks. Names `count` ranges of device memory as numbers of optimizer state: addresses, bytes, and types (0 float16, 1 bfloat16,
// 2 float32, 3 float64). Their owner does not free them meanwhile. `blocks`: they are blocks of a caching allocator, so only those are
// named whose end that reports; without it, each lies in an allocation of the driver's, and is named until this is freed. Returns how many
// are named; the others stay exact.
extern "C" __attribute__((visibility("default"))) size_t xmigNameNumbers(const uint64_t* addresses, const uint64_t* bytes,
                                                                         const uint32_t* types, size_t count, int blocks) {
  using namespace xmig::client;
  if (enter() != CUDA_SUCCESS || (count != 0 && (!addresses || !bytes || !types))) return 0;
  size_t named = 0;
  for (size_t i = 0; i < count; ++i) {
    const xmig::journal::NamedNumbers numbers{addresses[i], bytes[i], types[i], 0};
    if (!numbers.sound()) continue;
    if (blocks) {
      named += cached_blocks().name(numbers);
    } else {
      const auto allocation = memory_map().find(numbers.address);
      const bool whole = allocation && allocation->on_device() && numbers.bytes <= allocation->end() - numbers.address;
      named += whole && named_numbers().name(numbers);
    }
  }
  return named;
}

// The same until here.
extern "C" __attribute__((visibility("default"))) void xmigForgetNumbers(uint64_t address, uint64_t bytes) {
  if (bytes > ~address) return;
  xmig::client::named_numbers().forget(address, bytes);
}
