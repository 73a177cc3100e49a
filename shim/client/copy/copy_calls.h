// What the driver's copy functions have in common: the checks of each, and the way to copy().
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

namespace xmig::client {

enum Sides : unsigned {
  kAnywhere = 0,
  kSourceIsDevice = 1,
  kDestinationIsDevice = 2,
  kBothAreDevice = 3,
};

CUresult copy_bytes(uint64_t destination, uint64_t source, size_t bytes, CUstream stream, bool blocking, Sides sides);

// One side of a two- or three-dimensional copy.
struct Side {
  CUmemorytype type;
  const void* host;
  CUdeviceptr device;
  size_t x, y, z;
  size_t pitch, rows;  // rows: of one slice

  // Its first byte, in *start.
  CUresult resolve(const char* function, uint64_t* start) const;
};

struct Box {
  Side source, destination;
  size_t width, height, depth;
};

CUresult copy_box(const char* function, Box box, CUstream stream, bool blocking);

}  // namespace xmig::client
