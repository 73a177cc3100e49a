// Copies, reduced to one form: rows of bytes from one place to another.
//
// What lies in this folder: copy, the driver's functions that end there (copy_calls, copy_batches, copy_memset, copy_peers), and the
// way to memory that is not page-locked (copy_to_host, copy_pieces). It keeps no state.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace xmig::client {

struct Copy {
  uint64_t destination = 0;
  uint64_t destination_pitch = 0;
  uint64_t source = 0;
  uint64_t source_pitch = 0;
  uint64_t width = 0;
  uint64_t height = 1;
  CUstream stream = nullptr;
  bool blocking = false;  // the form without Async: returns when pinned memory has been read or written
};

// Appends what the copy needs, by where its pointers lie, and waits as CUDA's rules ask for it:
//   pageable to device   the bytes are in the journal on return: taken at the call, whatever the stream still has to do
//   pinned to device     read in stream order; the blocking form waits
//   device to pageable   always waits
//   device to pinned     written in stream order; the blocking form waits
//   device to device     never waits
//   host to host         waits for the stream, then copies here
CUresult copy(const Copy& request);

// From the device to where this thread can write, waiting for it (copy_to_host.cc). The copy has been checked.
CUresult copy_to_host(const Copy& checked);

}  // namespace xmig::client
