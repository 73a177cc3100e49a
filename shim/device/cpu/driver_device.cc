// Initialisation, devices and contexts.
#include <cstdio>
#include <cstring>

#include "device/cpu/api.h"
#include "device/cpu/driver.h"

namespace xmig::device::cpu {
namespace {

Ordinal* find_device(CpuDevice& device, CUdevice ordinal) {
  return ordinal >= 0 && static_cast<size_t>(ordinal) < device.ordinals.size() ? &device.ordinals[ordinal] : nullptr;
}

template <typename Body>
CUresult of_device(CUdevice ordinal, Body&& body) {
  return api([&](CpuDevice& device, Lock&) -> CUresult {
    Ordinal* found = find_device(device, ordinal);
    return found ? body(device, *found) : CUDA_ERROR_INVALID_DEVICE;
  });
}

CUresult init(unsigned flags) {
  CpuDevice* device = CpuDevice::opened();
  if (!device) return CUDA_ERROR_NO_DEVICE;
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  const std::lock_guard lock(device->mutex);
  device->initialised = true;
  return CUDA_SUCCESS;
}

CUresult driver_version(int* version) {
  if (!version) return CUDA_ERROR_INVALID_VALUE;
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult device_count(int* count) {
  if (!count) return CUDA_ERROR_INVALID_VALUE;
  return api([&](CpuDevice& device, Lock&) {
    *count = static_cast<int>(device.ordinals.size());
    return CUDA_SUCCESS;
  });
}

CUresult device_get(CUdevice* out, int ordinal) {
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  return of_device(ordinal, [&](CpuDevice&, Ordinal&) {
    *out = ordinal;
    return CUDA_SUCCESS;
  });
}

CUresult device_name(char* name, int bytes, CUdevice dev) {
  if (!name || bytes <= 0) return CUDA_ERROR_INVALID_VALUE;
  return of_device(dev, [&](CpuDevice&, Ordinal& ordinal) {
    std::snprintf(name, static_cast<size_t>(bytes), "%s", ordinal.description.name);
    return CUDA_SUCCESS;
  });
}

CUresult device_attribute(int* value, CUdevice_attribute attribute, CUdevice dev) {
  if (!value || attribute <= 0 || attribute >= CU_DEVICE_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
  return of_device(dev, [&](CpuDevice&, Ordinal& ordinal) {
    *value = ordinal.description.attributes[attribute];
    return CUDA_SUCCESS;
  });
}

CUresult device_total(size_t* bytes, CUdevice dev) {
  if (!bytes) return CUDA_ERROR_INVALID_VALUE;
  return of_device(dev, [&](CpuDevice&, Ordinal& ordinal) {
    *bytes = ordinal.description.total_bytes;
    return CUDA_SUCCESS;
  });
}

CUresult device_uuid(CUuuid* uuid, CUdevice dev) {
  if (!uuid) return CUDA_ERROR_INVALID_VALUE;
  return of_device(dev, [&](CpuDevice&, Ordinal& ordinal) {
    std::memcpy(uuid->bytes, ordinal.description.uuid, sizeof(uuid->bytes));
    return CUDA_SUCCESS;
  });
}

CUresult can_access_peer(int* reaches, CUdevice dev, CUdevice peer) {
  if (!reaches) return CUDA_ERROR_INVALID_VALUE;
  return of_device(dev, [&](CpuDevice& device, Ordinal&) {
    if (!find_device(device, peer)) return CUDA_ERROR_INVALID_DEVICE;
    *reaches = (device.peer(dev, peer) & journal::kPeerReaches) != 0;
    return CUDA_SUCCESS;
  });
}

CUresult p2p_attribute(int* value, CUdevice_P2PAttribute attribute, CUdevice dev, CUdevice peer) {
  if (!value) return CUDA_ERROR_INVALID_VALUE;
  return of_device(dev, [&](CpuDevice& device, Ordinal&) {
    if (!find_device(device, peer) || dev == peer) return CUDA_ERROR_INVALID_DEVICE;
    *value = attribute == CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED ||
             attribute == CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED;
    return CUDA_SUCCESS;
  });
}

CUresult retain(CUcontext* context, CUdevice dev) {
  if (!context) return CUDA_ERROR_INVALID_VALUE;
  return of_device(dev, [&](CpuDevice&, Ordinal& ordinal) {
    ++ordinal.retained;
    *context = as_handle<CUcontext>(kContextHandle | static_cast<uint64_t>(dev + 1));
    return CUDA_SUCCESS;
  });
}

CUresult release(CUdevice dev) {
  return of_device(dev, [&](CpuDevice& device, Ordinal& ordinal) {
    if (ordinal.retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
    if (--ordinal.retained == 0) device.reset(ordinal);
    return CUDA_SUCCESS;
  });
}

CUresult reset(CUdevice dev) {
  return of_device(dev, [&](CpuDevice& device, Ordinal& ordinal) {
    device.reset(ordinal);
    return CUDA_SUCCESS;
  });
}

CUresult set_current(CUcontext context) {
  return api([&](CpuDevice& device, Lock&) -> CUresult {
    if (!context) {
      t_ordinal = -1;
      return CUDA_SUCCESS;
    }
    const int ordinal = device.ordinal_of(context);
    if (ordinal < 0) return CUDA_ERROR_INVALID_CONTEXT;
    t_ordinal = ordinal;
    return CUDA_SUCCESS;
  });
}

CUresult synchronize() {
  return in_context([](CpuDevice&, Context& context, Lock& lock) {
    const std::shared_ptr<Context> keep = context.shared_from_this();
    return wait_for(context.reach_all(), context, lock);
  });
}

CUresult get_limit(size_t* value, CUlimit limit) {
  return in_context([&](CpuDevice&, Context& context, Lock&) { return context.limits.get(value, limit); });
}

CUresult set_limit(CUlimit limit, size_t value) {
  return in_context([&](CpuDevice&, Context& context, Lock&) { return context.limits.set(limit, value); });
}

}  // namespace

void add_device_functions(DriverTable& table) {
  table.cuInit = init;
  table.cuDriverGetVersion = driver_version;
  table.cuDeviceGetCount = device_count;
  table.cuDeviceGet = device_get;
  table.cuDeviceGetName = device_name;
  table.cuDeviceGetAttribute = device_attribute;
  table.cuDeviceTotalMem_v2 = device_total;
  table.cuDeviceGetUuid_v2 = device_uuid;
  table.cuDeviceCanAccessPeer = can_access_peer;
  table.cuDeviceGetP2PAttribute = p2p_attribute;
  table.cuDevicePrimaryCtxRetain = retain;
  table.cuDevicePrimaryCtxRelease_v2 = release;
  table.cuDevicePrimaryCtxReset_v2 = reset;
  table.cuCtxSetCurrent = set_current;
  table.cuCtxSynchronize = synchronize;
  table.cuCtxGetLimit = get_limit;
  table.cuCtxSetLimit = set_limit;
}

}  // namespace xmig::device::cpu
