// The addresses of one device ordinal, and which of them have physical memory.
//
// Every granule is in one of four places: taken by a heap, cached (backed and free), bare (an address only), or
// reserved by the program for its own mappings (see vmm.cc). Only going from bare to backed waits for the server; it
// is done in steps larger than requested as long as memory is plentiful, larger the more there is already: every step
// is a descriptor in the daemon. No lock is held while waiting.
//
// A step is one piece of physical memory, which the device takes back only whole. So granules go back by whole steps:
// those of a step that is partly in use are worth more in the cache.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <map>
#include <mutex>

#include "client/memory/memory_ranges.h"
#include "journal/layout.h"

namespace xmig::client {

constexpr uint64_t round_to_granules(uint64_t bytes) {
  return (bytes + journal::kGranule - 1) & ~(journal::kGranule - 1);
}

class Backing {
 public:
  explicit Backing(int ordinal);

  // Backed granules, `bytes` a multiple of kGranule. CUDA_ERROR_OUT_OF_MEMORY: nothing has changed, but that the
  // cache was given back.
  CUresult take(uint64_t bytes, uint64_t* address);
  // Backed granules that nobody uses any more, not even work that is still queued.
  void give(uint64_t address, uint64_t bytes);
  // Give cached steps back to the server, as long as at least `keep` bytes stay.
  void trim(uint64_t keep);

  // Addresses only. `hint` is honoured if it is free, 0 is none.
  CUresult reserve(uint64_t bytes, uint64_t alignment, uint64_t hint, uint64_t* address);
  void unreserve(uint64_t address, uint64_t bytes);
  // Physical memory at reserved addresses, exactly; gives the cache back if there is too little.
  CUresult grow_at(uint64_t address, uint64_t bytes);
  void shrink_at(uint64_t address, uint64_t bytes);

  struct Bytes {
    uint64_t cached, bare, grown;
  };
  Bytes bytes();

 private:
  FreeRange choose(uint64_t bytes, FreeRange* prefix);
  uint64_t step() const;
  bool take_cached(uint64_t bytes, uint64_t* address);

  std::mutex lock_;
  FreeRanges cached_;
  FreeRanges bare_;
  std::map<uint64_t, uint64_t> steps_;  // address -> bytes of what one xmGrow made
  uint64_t grown_ = 0;                  // the sum of them
  bool tight_ = false;                  // a step was refused: ask for exactly what is needed
};

Backing& backing(int ordinal);

// The ordinal in whose range of device addresses this one lies, or -1.
int ordinal_of(uint64_t address);

}  // namespace xmig::client
