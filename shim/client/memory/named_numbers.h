// Numbers of optimizer state, as the program's framework names them (docs/decisions/0096): only these may a lossy checkpoint round.
//
// A name ends with the memory: when an allocation is freed, when a caching allocator has its block back (cached_blocks.h), or when it
// is not known any more what that has given out. So what lies at the address next is never taken for what was named.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>

#include "journal/numbers.h"

namespace xmig::client {

class NamedNumbers {
 public:
  // All of it is in use, and its owner does not free it meanwhile. What is named so already costs nothing. False: there are too many, or
  // the job is lost.
  bool name(const journal::NamedNumbers& numbers);
  // Whatever of it has bytes of this. `reported`: the server hears of that by another record.
  void forget(uint64_t address, uint64_t bytes, bool reported = false);
  void forget_all();

 private:
  void end(uint64_t address, uint64_t bytes, bool reported);

  std::mutex lock_;  // over what follows, and over the records
  std::map<uint64_t, journal::NamedNumbers> named_;  // by address; no two overlap
};

NamedNumbers& named_numbers();

}  // namespace xmig::client
