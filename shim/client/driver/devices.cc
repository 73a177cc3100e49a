// Device queries, from the descriptions that came with the handshake.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "client/bootstrap/process.h"
#include "client/memory/peers.h"
#include "local.h"

namespace xmig::client {
namespace {

struct Requested {
  const journal::DeviceDescription* device = nullptr;
  CUresult error = CUDA_SUCCESS;
};
Requested requested(CUdevice dev) {
  if (const CUresult error = initialized(); error != CUDA_SUCCESS) return {nullptr, error};
  const auto* const device = description(dev);
  return {device, device ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE};
}

}  // namespace

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  const Requested found = requested(ordinal);
  if (found.error != CUDA_SUCCESS) return found.error;
  if (!device) return CUDA_ERROR_INVALID_VALUE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  if (const CUresult error = initialized(); error != CUDA_SUCCESS) return error;
  if (!count) return CUDA_ERROR_INVALID_VALUE;
  *count = process.device_count;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* name, int len, CUdevice dev) {
  const Requested found = requested(dev);
  if (found.error != CUDA_SUCCESS) return found.error;
  if (!name || len <= 0) return CUDA_ERROR_INVALID_VALUE;
  std::snprintf(name, static_cast<size_t>(len), "%s", found.device->name);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice dev) {
  const Requested found = requested(dev);
  if (found.error != CUDA_SUCCESS) return found.error;
  if (!uuid) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(uuid->bytes, found.device->uuid, sizeof(uuid->bytes));
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice dev) { return client::cuDeviceGetUuid_v2(uuid, dev); }

CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice dev) {
  const Requested found = requested(dev);
  if (found.error != CUDA_SUCCESS) return found.error;
  if (!bytes) return CUDA_ERROR_INVALID_VALUE;
  *bytes = found.device->total_bytes;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* pi, CUdevice_attribute attrib, CUdevice dev) {
  const Requested found = requested(dev);
  if (found.error != CUDA_SUCCESS) return found.error;
  if (!pi || attrib <= 0 || attrib >= CU_DEVICE_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
  *pi = static_cast<uint32_t>(attrib) < found.device->attribute_count ? found.device->attributes[attrib] : 0;
  return CUDA_SUCCESS;
}

CUresult cuDeviceComputeCapability(int* major, int* minor, CUdevice dev) {
  const Requested found = requested(dev);
  if (found.error != CUDA_SUCCESS) return found.error;
  if (!major || !minor) return CUDA_ERROR_INVALID_VALUE;
  *major = attribute(dev, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  *minor = attribute(dev, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetProperties(CUdevprop* prop, CUdevice dev) {
  const Requested found = requested(dev);
  if (found.error != CUDA_SUCCESS) return found.error;
  if (!prop) return CUDA_ERROR_INVALID_VALUE;
  *prop = {
      .maxThreadsPerBlock = attribute(dev, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK),
      .maxThreadsDim = {attribute(dev, CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X),
                        attribute(dev, CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y),
                        attribute(dev, CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z)},
      .maxGridSize = {attribute(dev, CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X),
                      attribute(dev, CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y),
                      attribute(dev, CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z)},
      .sharedMemPerBlock = attribute(dev, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK),
      .totalConstantMemory = attribute(dev, CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY),
      .SIMDWidth = attribute(dev, CU_DEVICE_ATTRIBUTE_WARP_SIZE),
      .memPitch = attribute(dev, CU_DEVICE_ATTRIBUTE_MAX_PITCH),
      .regsPerBlock = attribute(dev, CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK),
      .clockRate = attribute(dev, CU_DEVICE_ATTRIBUTE_CLOCK_RATE),
      .textureAlign = attribute(dev, CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT),
  };
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetByPCIBusId(CUdevice* dev, const char* pciBusId) {
  if (const CUresult error = initialized(); error != CUDA_SUCCESS) return error;
  if (!dev || !pciBusId) return CUDA_ERROR_INVALID_VALUE;
  int domain = 0, bus = 0, device = 0, used = 0;
  // [domain]:[bus]:[device].[function], [domain]:[bus]:[device] or [bus]:[device].[function], hexadecimal
  if (std::sscanf(pciBusId, "%x:%x:%x%n", &domain, &bus, &device, &used) != 3) {
    domain = 0;
    if (std::sscanf(pciBusId, "%x:%x%n", &bus, &device, &used) != 2) return CUDA_ERROR_INVALID_VALUE;
  }
  for (int i = 0; i < process.device_count; ++i) {
    if (attribute(i, CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID) == domain &&
        attribute(i, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID) == bus &&
        attribute(i, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID) == device) {
      *dev = i;
      return CUDA_SUCCESS;
    }
  }
  return CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetPCIBusId(char* pciBusId, int len, CUdevice dev) {
  const Requested found = requested(dev);
  if (found.error != CUDA_SUCCESS) return found.error;
  if (!pciBusId || len <= 0) return CUDA_ERROR_INVALID_VALUE;
  std::snprintf(pciBusId, static_cast<size_t>(len), "%04x:%02x:%02x.0",
                attribute(dev, CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID), attribute(dev, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID),
                attribute(dev, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID));
  return CUDA_SUCCESS;
}

// How it is between the devices that the job runs on now. Once the program knows that a device reaches another one, that
// holds: the job moves to no others (JournalHeader::peers_promised).
CUresult cuDeviceCanAccessPeer(int* canAccessPeer, CUdevice dev, CUdevice peerDev) {
  const Requested found = requested(dev);
  if (found.error != CUDA_SUCCESS) return found.error;
  if (!canAccessPeer) return CUDA_ERROR_INVALID_VALUE;
  if (!description(peerDev)) return CUDA_ERROR_INVALID_DEVICE;
  *canAccessPeer = dev != peerDev && promise_peer(dev, peerDev);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetP2PAttribute(int* value, CUdevice_P2PAttribute attrib, CUdevice srcDevice, CUdevice dstDevice) {
  const Requested found = requested(srcDevice);
  if (found.error != CUDA_SUCCESS) return found.error;
  if (!value) return CUDA_ERROR_INVALID_VALUE;
  if (!description(dstDevice) || srcDevice == dstDevice) return CUDA_ERROR_INVALID_DEVICE;
  const uint32_t how = peer_access(srcDevice, dstDevice);
  switch (attrib) {
    case CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK: *value = static_cast<int>(how >> journal::kPeerRankShift); break;
    case CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED: *value = promise_peer(srcDevice, dstDevice); break;
    case CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED: *value = (how & journal::kPeerAtomics) != 0; break;
    case CU_DEVICE_P2P_ATTRIBUTE_ONLY_PARTIAL_NATIVE_ATOMIC_SUPPORTED:
      *value = (how & journal::kPeerSomeAtomics) != 0;
      break;
    case CU_DEVICE_P2P_ATTRIBUTE_CUDA_ARRAY_ACCESS_SUPPORTED: *value = 0; break;  // there are no arrays
    default: return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetLuid(char* luid, unsigned int* deviceNodeMask, CUdevice dev) {
  const Requested found = requested(dev);
  if (found.error != CUDA_SUCCESS) return found.error;
  return CUDA_ERROR_NOT_SUPPORTED;  // an identifier of Windows
}

}  // namespace xmig::client
