// What NVML's questions are answered from: the driver interface, of whichever libcuda.so.1 this process has.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

namespace xmig::nvml {

inline constexpr int kMaxDevices = 16;

// What stays the same for the life of a process.
struct Device {
  char name[96];
  uint8_t uuid[16];
  uint64_t total_bytes;
  int domain, bus, slot;  // on PCI
  int major, minor;       // compute capability
  int compute_mode;
  uint32_t peers;  // bit i: device i's memory can be accessed
};
struct Devices {
  int count;
  Device device[kMaxDevices];
};

struct Driver {
#define XMIG_NVML_USES(_)                                                                                            \
  _(cuInit) _(cuDriverGetVersion) _(cuDeviceGet) _(cuDeviceGetCount) _(cuDeviceGetName) _(cuDeviceGetUuid_v2)        \
  _(cuDeviceTotalMem_v2) _(cuDeviceGetAttribute) _(cuDeviceCanAccessPeer) _(cuCtxGetCurrent) _(cuCtxGetDevice)       \
  _(cuDevicePrimaryCtxRetain) _(cuDevicePrimaryCtxRelease_v2) _(cuCtxPushCurrent_v2) _(cuCtxPopCurrent_v2)           \
  _(cuMemGetInfo_v2)
#define XMIG_NVML_MEMBER(name) decltype(&::name) name = nullptr;
  XMIG_NVML_USES(XMIG_NVML_MEMBER)
#undef XMIG_NVML_MEMBER
  bool loaded = false;

  // `library`: a path, or a SONAME, which finds what is preloaded. Loading initialises nothing.
  explicit Driver(const char* library);

  // CUDA_ERROR_NOT_INITIALIZED where this process has not called cuInit, or is a child of one that had.
  CUresult describe(Devices& devices) const;

  // Free memory of a device, in the context of the calling thread if it belongs to that device, or in the primary one;
  // both stay what they were. A primary context that is not active is made for the moment.
  CUresult free_bytes(int ordinal, uint64_t& bytes) const;
};

}  // namespace xmig::nvml
