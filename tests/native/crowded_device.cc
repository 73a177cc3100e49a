// One cpu device, but communicators take memory of it, whichever process has made them: as on a GPU, which has one memory for all. Linked
// into a server of its own in place of the real devices. What is taken is counted in a file beside the server.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "cpu_behind.h"
#include "device/cpu/cpu_device.h"

namespace xmig::device {
namespace {

constexpr uint64_t kEach = 64ull << 20;

// Of one communicator; `process` 0: of none.
struct Taken {
  std::atomic<pid_t> process;
  std::atomic<int> device;
};
using Ledger = std::array<Taken, 256>;

Ledger& ledger() {
  static Ledger& mapped = []() -> Ledger& {
    const std::string name = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "crowd";
    const int fd = ::open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ::ftruncate(fd, sizeof(Ledger)) != 0) std::abort();
    void* const at = ::mmap(nullptr, sizeof(Ledger), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) std::abort();
    return *static_cast<Ledger*>(at);
  }();
  return mapped;
}

Taken& take(int device) {
  for (Taken& one : ledger()) {
    pid_t nobody = one.process;
    const bool free = nobody == 0 || (::kill(nobody, 0) != 0 && errno == ESRCH);
    if (!free || !one.process.compare_exchange_strong(nobody, ::getpid())) continue;
    one.device = device;
    return one;
  }
  std::abort();
}

uint64_t taken(int device) {
  uint64_t bytes = 0;
  for (const Taken& one : ledger()) {
    const pid_t process = one.process;
    if (process != 0 && one.device == device && (::kill(process, 0) == 0 || errno != ESRCH)) bytes += kEach;
  }
  return bytes;
}

class Counted final : public Communicator {
 public:
  Counted(std::unique_ptr<Communicator> inner, int device) : inner_(std::move(inner)), taken_(take(device)) {}
  ~Counted() override { taken_.process = 0; }
  void abort() override { inner_->abort(); }
  bool unfinished() override { return inner_->unfinished(); }
  std::optional<Error> failure() override { return inner_->failure(); }
  Communicator* inner() const { return inner_.get(); }

 private:
  const std::unique_ptr<Communicator> inner_;
  Taken& taken_;
};

class CountedCollectives final : public Collectives {
 public:
  CountedCollectives(Collectives& inner, int device) : inner_(inner), device_(device) {}

  Result<std::unique_ptr<Communicator>> join(const Place& place, const Meeting& meet, std::function<void()> failed) override {
    Result<std::unique_ptr<Communicator>> joined = inner_.join(place, meet, std::move(failed));
    if (!joined) return joined;
    return std::unique_ptr<Communicator>(new Counted(std::move(*joined), device_));
  }
  Status run(std::span<Part> parts) override {
    for (Part& part : parts) part.communicator = static_cast<Counted*>(part.communicator)->inner();
    return inner_.run(parts);
  }
  Result<> warm(std::span<Part> parts, const std::function<bool()>& give_up) override {
    for (Part& part : parts) part.communicator = static_cast<Counted*>(part.communicator)->inner();
    return inner_.warm(parts, give_up);
  }

 private:
  Collectives& inner_;
  const int device_;
};

DriverTable g_real;
int g_device = 0;

CUresult get_info(size_t* free, size_t* total) {
  const CUresult result = g_real.cuMemGetInfo_v2(free, total);
  if (result == CUDA_SUCCESS) *free -= std::min<size_t>(*free, taken(g_device));
  return result;
}

CUresult create_memory(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* properties,
                       unsigned long long flags) {
  size_t free = 0, total = 0;
  if (get_info(&free, &total) == CUDA_SUCCESS && bytes > free) return CUDA_ERROR_OUT_OF_MEMORY;
  return g_real.cuMemCreate(handle, bytes, properties, flags);
}

class CrowdedDevice final : public CpuBehind {
 public:
  CrowdedDevice(std::unique_ptr<Device> cpu, int device) : CpuBehind(std::move(cpu)), collectives_(cpu_->collectives(), device) {
    g_device = device;
    g_real = table_;
    table_.cuMemGetInfo_v2 = get_info;
    table_.cuMemCreate = create_memory;
  }
  Collectives& collectives() override { return collectives_; }

 private:
  CountedCollectives collectives_;
};

}  // namespace

std::unique_ptr<Device> open(std::string_view, std::span<const int> ordinals, uint64_t memory_bytes) {
  return std::make_unique<CrowdedDevice>(open_cpu(ordinals, memory_bytes), ordinals.front());
}

}  // namespace xmig::device
