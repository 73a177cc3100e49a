// The client's contract for appending records, and a server behind it that does at once what a record says: enough of
// both to test the memory half of the client in one process, with real bytes at the real addresses.
//
// The server checks what it is sent: allocations must be backed and must not overlap, what is freed must be live, what
// is given back must hold nothing.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace fake {

#define CHECK(condition)                                                                  \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);        \
      std::abort();                                                                       \
    }                                                                                     \
  } while (false)

struct Server {
  uint64_t capacity = 1ull << 30;        // of physical memory
  std::map<uint64_t, uint64_t> backed;   // what each xmGrow made
  std::map<uint64_t, uint64_t> live;     // what each xmAlloc made
  std::set<uint64_t> discarded;          // granules: by xmDiscard, until their xmReuse
  std::map<uint64_t, uint64_t> named;    // numbers: bytes by address, until they are forgotten or freed
  std::vector<std::string> records;      // names, in order
  std::string fail_next;                 // the next record of this name fails with CUDA_ERROR_UNKNOWN
  uint64_t backed_bytes() const;
  uint64_t live_bytes() const;
  size_t count(const std::string& name) const;
};
extern Server server;

// What the calling thread's current context is.
extern thread_local int ordinal;
CUstream stream(uint32_t index);

}  // namespace fake
