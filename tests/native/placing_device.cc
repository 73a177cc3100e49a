// A device that places modules' variables itself, as a GPU's driver does: the cpu device, but they lie in memory of the server
// that dies with it, at other addresses in each server, and have addresses in them. Linked into a server of its own in place of
// the real devices.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>

#include "cpu_behind.h"
#include "device/cpu/cpu_device.h"

namespace xmig::device {
namespace {

constexpr uint64_t kAddresses = 3;  // words at the beginning of `addresses`

struct Placed {
  void* memory;
  size_t bytes;
};
std::mutex g_mutex;
std::map<CUmodule, std::vector<Placed>> g_placed;
DriverTable g_real;

CUresult unload(CUmodule module) {
  const CUresult result = g_real.cuModuleUnload(module);
  const std::lock_guard lock(g_mutex);
  for (const Placed& placed : g_placed[module]) {
    g_real.cuMemHostUnregister(placed.memory);
    ::munmap(placed.memory, placed.bytes);
  }
  g_placed.erase(module);
  return result;
}

class PlacingDevice final : public CpuBehind {
 public:
  explicit PlacingDevice(std::unique_ptr<Device> cpu) : CpuBehind(std::move(cpu)) {
    g_real = table_;
    table_.cuModuleUnload = unload;
  }

  std::vector<Global> globals(CUmodule) override { return {}; }
  bool bind_global(CUmodule, uint32_t, uint64_t) override { return false; }

  Result<> placed_variables(uint32_t, std::span<const std::byte> image, std::vector<ImageVariable>& out) override {
    const Result<Image> read = read_shared_object(image);
    if (!read) return read.error();
    for (const ImageGlobal& global : read->globals) out.push_back({global.name, global.name == "addresses"});
    return {};
  }

  CUresult load_image(CUmodule* module, std::span<const std::byte> image) override {
    if (const CUresult result = cpu_->load_image(module, image); result != CUDA_SUCCESS) return result;
    const std::lock_guard lock(g_mutex);
    std::vector<Placed>& placed = g_placed[*module];
    const std::vector<Global> globals = cpu_->globals(*module);
    uint64_t counter = 0, *addresses = nullptr;
    for (uint32_t i = 0; i < globals.size(); ++i) {
      const size_t bytes = globals[i].bytes + kOdd;
      void* const hint = reinterpret_cast<void*>(0x1000'0000'0000 + (static_cast<uint64_t>(::getpid()) << 28) + (placed.size() << 24));
      void* const memory = ::mmap(hint, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
      placed.push_back({memory, bytes});
      // The cpu device binds to no other memory than what it knows.
      if (g_real.cuMemHostRegister_v2(memory, bytes, 0) != CUDA_SUCCESS) return CUDA_ERROR_OUT_OF_MEMORY;
      const uint64_t address = reinterpret_cast<uintptr_t>(memory) + (globals[i].name == "odd" ? kOdd : 0);
      if (!cpu_->bind_global(*module, i, address)) return CUDA_ERROR_INVALID_IMAGE;
      if (globals[i].name == "counter") counter = address;
      if (globals[i].name == "addresses") addresses = reinterpret_cast<uint64_t*>(address);
    }
    if (addresses) std::fill_n(addresses, kAddresses, counter);
    return CUDA_SUCCESS;
  }

 private:
  static constexpr size_t kOdd = 5;  // where the one of three bytes lies
};

}  // namespace

std::unique_ptr<Device> open(std::string_view, std::span<const int> ordinals, uint64_t memory_bytes) {
  return std::make_unique<PlacingDevice>(open_cpu(ordinals, memory_bytes));
}

}  // namespace xmig::device
