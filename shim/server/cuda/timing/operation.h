// What a record puts into a stream, as far as a profile or a trace says it.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>

#include "ops.h"
#include "server/profiling/pages.h"
#include "server/records/record.h"

namespace xmig::server {

struct Operation {
  profiling::Kind kind = profiling::Kind::kKernel;
  uint64_t stream = 0;  // the program's handle
  uint64_t what = 0;    // of a kernel its handle, of a collective its kind: with kind and shape, which entry it is
  uint64_t bytes = 0;
  uint32_t grid[3] = {0, 0, 0};
  uint32_t block[3] = {0, 0, 0};
  uint32_t shared_bytes = 0;

  // Is it one that a period of a program consists of? Copies come when data does.
  bool is_launch() const {
    return kind == profiling::Kind::kKernel || kind == profiling::Kind::kGraph || kind == profiling::Kind::kCollective;
  }
  uint64_t key() const;
};

// False: it is no such record, or what it says makes no sense.
bool operation_of(const Record& record, Operation& out);
// Of anything but a kernel.
const char* name_of(const Operation& operation);
// "void f<int>(float*)" of what compilers make of it, and at most so long.
std::string readable(const char* mangled, size_t longest);

}  // namespace xmig::server
