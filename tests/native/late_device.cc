// The cpu device, but memory is free only a while after it was unmapped: other processes hold it, too, and let go of it when
// they have heard. Linked into a server of its own in place of the real devices.
#include <algorithm>
#include <chrono>
#include <deque>
#include <mutex>

#include "cpu_behind.h"
#include "device/cpu/cpu_device.h"

namespace xmig::device {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kLate{150};

struct Unmapped {
  Clock::time_point free_at;
  uint64_t bytes;
};

DriverTable g_real;
std::mutex g_mutex;
std::deque<Unmapped> g_unmapped;  // guarded by g_mutex

uint64_t held_elsewhere() {
  const std::lock_guard lock(g_mutex);
  while (!g_unmapped.empty() && g_unmapped.front().free_at <= Clock::now()) g_unmapped.pop_front();
  uint64_t bytes = 0;
  for (const Unmapped& memory : g_unmapped) bytes += memory.bytes;
  return bytes;
}

CUresult get_info(size_t* free, size_t* total) {
  const CUresult result = g_real.cuMemGetInfo_v2(free, total);
  *free -= std::min<size_t>(*free, held_elsewhere());
  return result;
}

CUresult create_memory(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* properties,
                       unsigned long long flags) {
  size_t free = 0, total = 0;
  get_info(&free, &total);
  return bytes > free ? CUDA_ERROR_OUT_OF_MEMORY : g_real.cuMemCreate(handle, bytes, properties, flags);
}

CUresult unmap_memory(CUdeviceptr address, size_t bytes) {
  const CUresult result = g_real.cuMemUnmap(address, bytes);
  const std::lock_guard lock(g_mutex);
  g_unmapped.push_back({Clock::now() + kLate, bytes});
  return result;
}

class LateDevice final : public CpuBehind {
 public:
  explicit LateDevice(std::unique_ptr<Device> cpu) : CpuBehind(std::move(cpu)) {
    g_real = table_;
    table_.cuMemGetInfo_v2 = get_info;
    table_.cuMemCreate = create_memory;
    table_.cuMemUnmap = unmap_memory;
  }
};

}  // namespace

std::unique_ptr<Device> open(std::string_view, std::span<const int> ordinals, uint64_t memory_bytes) {
  return std::make_unique<LateDevice>(open_cpu(ordinals, memory_bytes));
}

}  // namespace xmig::device
