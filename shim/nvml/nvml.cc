// libnvidia-ml.so.1 for programs under xMIG: what PyTorch, NCCL and pynvml ask, answered from the driver interface. No
// device file is opened, which the genuine library does in nvmlInit: a client that holds one cannot be dumped.
//
// An index is a CUDA ordinal. What neither the driver interface nor the kernel shows is not supported; nothing is made up.
//
// Nothing here goes on to the genuine library. Where the shim itself hands over to the genuine driver
// (XMIG_WITHOUT_DAEMON=native) that driver's devices are shown, as CUDA numbers them; who preloads libcuda.so.1 by hand
// for that leaves this library out, and has all of NVML.
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

#include "nvml/devices.h"
#include "nvml/kernel.h"
#include "nvml/state.h"

#define XMIG_NVML extern "C" __attribute__((visibility("default")))

namespace xmig::nvml {

constinit std::atomic<int> users{0};

namespace {

// A handle is the address of its device's place here: the same in forked children, and never mistaken for a number.
char handles[kMaxDevices];

nvmlReturn_t translate(CUresult error) {
  switch (error) {
    case CUDA_SUCCESS:
      return NVML_SUCCESS;
    case CUDA_ERROR_INVALID_VALUE:
    case CUDA_ERROR_INVALID_DEVICE:
      return NVML_ERROR_INVALID_ARGUMENT;
    case CUDA_ERROR_NOT_SUPPORTED:
      return NVML_ERROR_NOT_SUPPORTED;
    case CUDA_ERROR_OUT_OF_MEMORY:
      return NVML_ERROR_MEMORY;
    case CUDA_ERROR_NOT_PERMITTED:
      return NVML_ERROR_NO_PERMISSION;
    case CUDA_ERROR_NO_DEVICE:
    case CUDA_ERROR_SYSTEM_NOT_READY:  // no daemon
      return NVML_ERROR_DRIVER_NOT_LOADED;
    case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
      return NVML_ERROR_LIB_RM_VERSION_MISMATCH;
    case CUDA_ERROR_SHARED_OBJECT_INIT_FAILED:
      return NVML_ERROR_LIBRARY_NOT_FOUND;
    case CUDA_ERROR_DEVICE_UNAVAILABLE:
      return NVML_ERROR_GPU_IS_LOST;
    default:
      return NVML_ERROR_UNKNOWN;
  }
}

nvmlReturn_t look(Devices& devices) {
  return in_use() ? translate(list_devices(devices)) : NVML_ERROR_UNINITIALIZED;
}

int ordinal_of(nvmlDevice_t handle) {
  const auto offset = reinterpret_cast<uintptr_t>(handle) - reinterpret_cast<uintptr_t>(handles);
  return offset < sizeof(handles) ? static_cast<int>(offset) : -1;
}

// `answer(device, ordinal)`, if there is such a device.
template <class Answer>
nvmlReturn_t about(nvmlDevice_t handle, Answer answer) {
  Devices devices;
  if (const nvmlReturn_t error = look(devices); error != NVML_SUCCESS) return error;
  const int ordinal = ordinal_of(handle);
  if (ordinal < 0 || ordinal >= devices.count) return NVML_ERROR_INVALID_ARGUMENT;
  return answer(devices.device[ordinal], ordinal);
}

// The handle of the first device that `fits(device)`.
template <class Fits>
nvmlReturn_t find(nvmlDevice_t* handle, Fits fits) {
  Devices devices;
  if (const nvmlReturn_t error = look(devices); error != NVML_SUCCESS) return error;
  for (int i = 0; i < devices.count; ++i) {
    if (!fits(devices.device[i])) continue;
    *handle = reinterpret_cast<nvmlDevice_t>(&handles[i]);
    return NVML_SUCCESS;
  }
  return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t give(std::string_view text, char* to, unsigned int length) {
  if (!to) return NVML_ERROR_INVALID_ARGUMENT;
  if (text.size() >= length) return NVML_ERROR_INSUFFICIENT_SIZE;
  std::memcpy(to, text.data(), text.size());
  to[text.size()] = 0;
  return NVML_SUCCESS;
}

std::string uuid_text(const Device& device) {
  std::string text = "GPU";
  for (int i = 0; i < 16; ++i) {
    char digits[4];
    const bool group = i == 0 || i == 4 || i == 6 || i == 8 || i == 10;
    std::snprintf(digits, sizeof(digits), "%s%02x", group ? "-" : "", device.uuid[i]);
    text += digits;
  }
  return text;
}

struct Memory {
  uint64_t total, free, used;
};
nvmlReturn_t memory_of(nvmlDevice_t handle, Memory& memory) {
  return about(handle, [&](const Device& device, int ordinal) {
    uint64_t bytes = 0;
    if (const CUresult error = free_bytes(ordinal, bytes); error != CUDA_SUCCESS) return translate(error);
    const uint64_t free = std::min(bytes, device.total_bytes);
    memory = {device.total_bytes, free, device.total_bytes - free};
    return NVML_SUCCESS;
  });
}

}  // namespace
}  // namespace xmig::nvml

using namespace xmig::nvml;

// --- the library ------------------------------------------------------------------------------------------------

// Only counts. The daemon is queried when something about a device is.
XMIG_NVML nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
  prepare_for_forks();
  users.fetch_add(1);
  return NVML_SUCCESS;
}
XMIG_NVML nvmlReturn_t nvmlInit_v2() { return nvmlInitWithFlags(0); }
XMIG_NVML nvmlReturn_t nvmlInit() { return nvmlInitWithFlags(0); }

XMIG_NVML nvmlReturn_t nvmlShutdown() {
  int now = users.load();
  while (now > 0 && !users.compare_exchange_weak(now, now - 1)) {
  }
  return now > 0 ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

XMIG_NVML const char* nvmlErrorString(nvmlReturn_t result) {
  switch (result) {
    case NVML_SUCCESS: return "Success";
    case NVML_ERROR_UNINITIALIZED: return "Uninitialized";
    case NVML_ERROR_INVALID_ARGUMENT: return "Invalid argument";
    case NVML_ERROR_NOT_SUPPORTED: return "Not supported";
    case NVML_ERROR_NO_PERMISSION: return "Insufficient permissions";
    case NVML_ERROR_ALREADY_INITIALIZED: return "Already initialized";
    case NVML_ERROR_NOT_FOUND: return "Not found";
    case NVML_ERROR_INSUFFICIENT_SIZE: return "Insufficient size";
    case NVML_ERROR_DRIVER_NOT_LOADED: return "Driver not loaded";
    case NVML_ERROR_TIMEOUT: return "Timeout";
    case NVML_ERROR_LIBRARY_NOT_FOUND: return "Library not found";
    case NVML_ERROR_FUNCTION_NOT_FOUND: return "Function not found";
    case NVML_ERROR_GPU_IS_LOST: return "GPU is lost";
    case NVML_ERROR_OPERATING_SYSTEM: return "Operating system error";
    case NVML_ERROR_LIB_RM_VERSION_MISMATCH: return "Driver and library versions differ";
    case NVML_ERROR_IN_USE: return "In use";
    case NVML_ERROR_MEMORY: return "Insufficient memory";
    case NVML_ERROR_NO_DATA: return "No data";
    case NVML_ERROR_ARGUMENT_VERSION_MISMATCH: return "Argument version mismatch";
    case NVML_ERROR_NOT_READY: return "Not ready";
    default: return "Unknown error";
  }
}

XMIG_NVML nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int* cudaDriverVersion) {
  if (!cudaDriverVersion) return NVML_ERROR_INVALID_ARGUMENT;
  if (!driver().loaded) return NVML_ERROR_LIBRARY_NOT_FOUND;
  return translate(driver().cuDriverGetVersion(cudaDriverVersion));
}
XMIG_NVML nvmlReturn_t nvmlSystemGetCudaDriverVersion(int* version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

XMIG_NVML nvmlReturn_t nvmlSystemGetDriverVersion(char* version, unsigned int length) {
  if (!in_use()) return NVML_ERROR_UNINITIALIZED;
  const std::optional<std::string> found = kernel_driver_version();
  return found ? give(*found, version, length) : NVML_ERROR_NOT_SUPPORTED;
}

// --- which devices ------------------------------------------------------------------------------------------------

XMIG_NVML nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int* deviceCount) {
  if (!deviceCount) return NVML_ERROR_INVALID_ARGUMENT;
  Devices devices;
  const nvmlReturn_t error = look(devices);
  if (error == NVML_SUCCESS) *deviceCount = static_cast<unsigned int>(devices.count);
  return error;
}
XMIG_NVML nvmlReturn_t nvmlDeviceGetCount(unsigned int* deviceCount) { return nvmlDeviceGetCount_v2(deviceCount); }

XMIG_NVML nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t* device) {
  if (!device) return NVML_ERROR_INVALID_ARGUMENT;
  const nvmlReturn_t error = find(device, [&](const Device&) { return index-- == 0; });
  return error == NVML_ERROR_NOT_FOUND ? NVML_ERROR_INVALID_ARGUMENT : error;
}
XMIG_NVML nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t* device) {
  return nvmlDeviceGetHandleByIndex_v2(index, device);
}

XMIG_NVML nvmlReturn_t nvmlDeviceGetHandleByUUID(const char* uuid, nvmlDevice_t* device) {
  if (!uuid || !device) return NVML_ERROR_INVALID_ARGUMENT;
  return find(device, [&](const Device& one) { return uuid_text(one) == uuid; });
}

XMIG_NVML nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char* pciBusId, nvmlDevice_t* device) {
  if (!pciBusId || !device) return NVML_ERROR_INVALID_ARGUMENT;
  unsigned int domain = 0, bus = 0, slot = 0;
  if (std::sscanf(pciBusId, "%x:%x:%x", &domain, &bus, &slot) != 3) {
    domain = 0;
    if (std::sscanf(pciBusId, "%x:%x", &bus, &slot) != 2) return NVML_ERROR_INVALID_ARGUMENT;
  }
  return find(device, [&](const Device& one) {
    return static_cast<unsigned int>(one.domain) == domain && static_cast<unsigned int>(one.bus) == bus &&
           static_cast<unsigned int>(one.slot) == slot;
  });
}
XMIG_NVML nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char* pciBusId, nvmlDevice_t* device) {
  return nvmlDeviceGetHandleByPciBusId_v2(pciBusId, device);
}

// --- what they are ------------------------------------------------------------------------------------------------

XMIG_NVML nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int* index) {
  return about(device, [&](const Device&, int ordinal) {
    if (!index) return NVML_ERROR_INVALID_ARGUMENT;
    *index = static_cast<unsigned int>(ordinal);
    return NVML_SUCCESS;
  });
}

XMIG_NVML nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char* name, unsigned int length) {
  return about(device, [&](const Device& one, int) { return give(one.name, name, length); });
}

XMIG_NVML nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char* uuid, unsigned int length) {
  return about(device, [&](const Device& one, int) { return give(uuid_text(one), uuid, length); });
}

// CUDA does not tell the identifiers of vendor, model and board: 0.
XMIG_NVML nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t* pci) {
  return about(device, [&](const Device& one, int) {
    if (!pci) return NVML_ERROR_INVALID_ARGUMENT;
    *pci = {};
    pci->domain = static_cast<unsigned int>(one.domain);
    pci->bus = static_cast<unsigned int>(one.bus);
    pci->device = static_cast<unsigned int>(one.slot);
    std::snprintf(pci->busIdLegacy, sizeof(pci->busIdLegacy), "%04X:%02X:%02X.0", pci->domain & 0xffff,
                  pci->bus & 0xff, pci->device & 0xff);
    std::snprintf(pci->busId, sizeof(pci->busId), "%08X:%02X:%02X.0", pci->domain, pci->bus, pci->device);
    return NVML_SUCCESS;
  });
}

XMIG_NVML nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int* major, int* minor) {
  return about(device, [&](const Device& one, int) {
    if (!major || !minor) return NVML_ERROR_INVALID_ARGUMENT;
    *major = one.major;
    *minor = one.minor;
    return NVML_SUCCESS;
  });
}

// JAX looks at the first two, and reports an error for each device of which they are not known.
#define XMIG_LINK(name, what)                                                        \
  XMIG_NVML nvmlReturn_t name(nvmlDevice_t device, unsigned int* value) {            \
    return about(device, [&](const Device& one, int) {                               \
      if (!value) return NVML_ERROR_INVALID_ARGUMENT;                                \
      const std::optional<unsigned int> found = link_of(one, Link::what);            \
      if (found) *value = *found;                                                    \
      return found ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;                        \
    });                                                                              \
  }
XMIG_LINK(nvmlDeviceGetCurrPcieLinkGeneration, kCurrentGeneration)
XMIG_LINK(nvmlDeviceGetCurrPcieLinkWidth, kCurrentWidth)
XMIG_LINK(nvmlDeviceGetMaxPcieLinkGeneration, kMostGeneration)
XMIG_LINK(nvmlDeviceGetMaxPcieLinkWidth, kMostWidth)

// The two enumerations have the same values.
XMIG_NVML nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, nvmlComputeMode_t* mode) {
  return about(device, [&](const Device& one, int) {
    if (!mode) return NVML_ERROR_INVALID_ARGUMENT;
    *mode = static_cast<nvmlComputeMode_t>(one.compute_mode);
    return NVML_SUCCESS;
  });
}

XMIG_NVML nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int* isMigDevice) {
  return about(device, [&](const Device&, int) {
    if (!isMigDevice) return NVML_ERROR_INVALID_ARGUMENT;
    *isMigDevice = 0;
    return NVML_SUCCESS;
  });
}

// --- their memory -------------------------------------------------------------------------------------------------

XMIG_NVML nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t* memory) {
  Memory now{};
  if (!memory) return NVML_ERROR_INVALID_ARGUMENT;
  const nvmlReturn_t error = memory_of(device, now);
  if (error == NVML_SUCCESS) *memory = {.total = now.total, .free = now.free, .used = now.used};
  return error;
}

// What the driver keeps for itself is not known, and counts as used.
XMIG_NVML nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t* memory) {
  Memory now{};
  if (!memory) return NVML_ERROR_INVALID_ARGUMENT;
  if (memory->version != nvmlMemory_v2) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  const nvmlReturn_t error = memory_of(device, now);
  if (error == NVML_SUCCESS) {
    *memory = {.version = nvmlMemory_v2, .total = now.total, .reserved = 0, .free = now.free, .used = now.used};
  }
  return error;
}

// --- who uses them ------------------------------------------------------------------------------------------------

// No program under xMIG has a context on a device; its server has, and that is not for the program to see. PyTorch takes
// anything but success for a defect, so this is not an error.
#define XMIG_NO_PROCESSES(name, info)                                                              \
  XMIG_NVML nvmlReturn_t name(nvmlDevice_t device, unsigned int* infoCount, info*) {               \
    return about(device, [&](const Device&, int) {                                                 \
      if (!infoCount) return NVML_ERROR_INVALID_ARGUMENT;                                          \
      *infoCount = 0;                                                                              \
      return NVML_SUCCESS;                                                                         \
    });                                                                                            \
  }
XMIG_NO_PROCESSES(nvmlDeviceGetComputeRunningProcesses, nvmlProcessInfo_v1_t)
XMIG_NO_PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, nvmlProcessInfo_v2_t)
XMIG_NO_PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, nvmlProcessInfo_t)
XMIG_NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t)
XMIG_NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_v2_t)
XMIG_NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t)

// --- what is between them -----------------------------------------------------------------------------------------

// NCCL asks for every pair, a device and itself as well, and gives up on an error.
XMIG_NVML nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t device1, nvmlDevice_t device2,
                                              nvmlGpuP2PCapsIndex_t p2pIndex, nvmlGpuP2PStatus_t* p2pStatus) {
  return about(device1, [&](const Device& one, int) {
    return about(device2, [&](const Device&, int other) {
      if (!p2pStatus || p2pIndex < 0 || p2pIndex >= NVML_P2P_CAPS_INDEX_UNKNOWN) return NVML_ERROR_INVALID_ARGUMENT;
      const bool asks_for_access = p2pIndex == NVML_P2P_CAPS_INDEX_READ || p2pIndex == NVML_P2P_CAPS_INDEX_WRITE;
      const bool can = asks_for_access && (one.peers >> other & 1);
      *p2pStatus = can ? NVML_P2P_STATUS_OK : NVML_P2P_STATUS_NOT_SUPPORTED;
      return NVML_SUCCESS;
    });
  });
}

// Every value has an error of its own.
XMIG_NVML nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int valuesCount, nvmlFieldValue_t* values) {
  return about(device, [&](const Device&, int) {
    if (!values || valuesCount <= 0) return NVML_ERROR_INVALID_ARGUMENT;
    for (int i = 0; i < valuesCount; ++i) values[i].nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
    return NVML_SUCCESS;
  });
}
