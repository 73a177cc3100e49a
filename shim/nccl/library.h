// libnccl.so.2 for programs under xMIG: the functions are stubs (generated), their content is the shim's, libcuda.so.1. A
// process that runs natively gets the genuine library's.
#pragma once

#include "api/nccl.h"
#include "nccl_calls.h"

namespace xmig::nccl {

// Generated: the exported functions, in the order of their slots.
extern const char* const kNames[];
extern const int kCount;

// nullptr: no shim of this build is loaded.
const NcclCalls* calls();
// The genuine function of a slot, in a process that runs natively; else nullptr.
void* native_function(int slot);
void refuse(const char* name);

}  // namespace xmig::nccl
