#include "nvml/driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>

namespace xmig::nvml {

Driver::Driver(const char* library) {
  void* const handle = ::dlopen(library, RTLD_LAZY);
  if (!handle) return;
  loaded = true;
#define XMIG_NVML_FIND(name) \
  loaded &= (name = reinterpret_cast<decltype(name)>(::dlsym(handle, #name))) != nullptr;
  XMIG_NVML_USES(XMIG_NVML_FIND)
#undef XMIG_NVML_FIND
}

CUresult Driver::describe(Devices& devices) const {
  if (!loaded) return CUDA_ERROR_SHARED_OBJECT_INIT_FAILED;
  int count = 0;
  if (const CUresult error = cuDeviceGetCount(&count); error != CUDA_SUCCESS) return error;
  devices = {};
  devices.count = std::min(count, kMaxDevices);
  for (int i = 0; i < devices.count; ++i) {
    Device& device = devices.device[i];
    CUdevice own = 0;
    CUuuid uuid;
    size_t bytes = 0;
    CUresult error = cuDeviceGet(&own, i);
    if (error == CUDA_SUCCESS) error = cuDeviceGetName(device.name, sizeof(device.name), own);
    if (error == CUDA_SUCCESS) error = cuDeviceGetUuid_v2(&uuid, own);
    if (error == CUDA_SUCCESS) error = cuDeviceTotalMem_v2(&bytes, own);
    const auto attribute = [&](CUdevice_attribute which, int& value) {
      if (error == CUDA_SUCCESS) error = cuDeviceGetAttribute(&value, which, own);
    };
    attribute(CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, device.domain);
    attribute(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, device.bus);
    attribute(CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, device.slot);
    attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device.major);
    attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device.minor);
    attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, device.compute_mode);
    for (int other = 0; other < devices.count && error == CUDA_SUCCESS; ++other) {
      CUdevice peer = 0;
      int can = 0;
      error = cuDeviceGet(&peer, other);
      if (error == CUDA_SUCCESS && other != i) error = cuDeviceCanAccessPeer(&can, own, peer);
      if (can || other == i) device.peers |= 1u << other;
    }
    if (error != CUDA_SUCCESS) return error;
    std::memcpy(device.uuid, uuid.bytes, sizeof(device.uuid));
    device.total_bytes = bytes;
  }
  return CUDA_SUCCESS;
}

CUresult Driver::free_bytes(int ordinal, uint64_t& bytes) const {
  CUdevice wanted = 0, device = 0;
  CUcontext context = nullptr;
  size_t free = 0, total = 0;
  CUresult error = cuDeviceGet(&wanted, ordinal);
  if (error != CUDA_SUCCESS) return error;
  const bool here = cuCtxGetCurrent(&context) == CUDA_SUCCESS && context && cuCtxGetDevice(&device) == CUDA_SUCCESS &&
                    device == wanted;
  if (here) {
    error = cuMemGetInfo_v2(&free, &total);
  } else {
    error = cuDevicePrimaryCtxRetain(&context, wanted);
    if (error != CUDA_SUCCESS) return error;
    error = cuCtxPushCurrent_v2(context);
    if (error == CUDA_SUCCESS) {
      error = cuMemGetInfo_v2(&free, &total);
      cuCtxPopCurrent_v2(&context);
    }
    cuDevicePrimaryCtxRelease_v2(wanted);
  }
  bytes = free;
  return error;
}

}  // namespace xmig::nvml
