#include "device/cuda/used_memory.h"

#include <dlfcn.h>

#include <cstdio>

namespace xmig::device {
namespace {

// Of nvml.h, which is not needed for more.
struct Memory {
  unsigned long long total, free, used;
};
using NvmlDevice = struct nvmlDevice_st*;

template <typename F>
F find(void* library, const char* name) {
  return library ? reinterpret_cast<F>(dlsym(library, name)) : nullptr;
}

std::string name_of(const char* uuid) {
  std::string name = "GPU-";
  for (int i = 0; i < 16; ++i) {
    char digits[4];
    std::snprintf(digits, sizeof(digits), "%02x", static_cast<unsigned char>(uuid[i]));
    name += digits;
    if (i == 3 || i == 5 || i == 7 || i == 9) name += '-';
  }
  return name;
}

}  // namespace

UsedMemory::UsedMemory() : library_(dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL)) {
  const auto start = find<int (*)()>(library_, "nvmlInit_v2");
  if (start && start() == 0) return;
  if (library_) dlclose(library_);
  library_ = nullptr;
}

UsedMemory::~UsedMemory() {
  if (const auto stop = find<int (*)()>(library_, "nvmlShutdown")) stop();
  if (library_) dlclose(library_);
}

uint64_t UsedMemory::of(const char* uuid) const {
  const auto get = find<int (*)(const char*, NvmlDevice*)>(library_, "nvmlDeviceGetHandleByUUID");
  const auto ask = find<int (*)(NvmlDevice, Memory*)>(library_, "nvmlDeviceGetMemoryInfo");
  NvmlDevice device = nullptr;
  Memory memory{};
  if (!get || !ask || get(name_of(uuid).c_str(), &device) != 0 || ask(device, &memory) != 0) return 0;
  return memory.used;
}

}  // namespace xmig::device
