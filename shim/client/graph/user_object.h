// Objects of the program whose destructor runs when the last graph that refers to them is gone.
#pragma once

#include <cuda.h>

namespace xmig::client {

struct UserObject {
  void* pointer;
  CUhostFn destroy;
  unsigned int references;
};

}  // namespace xmig::client
