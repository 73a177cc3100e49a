// A device that faults as a GPU does: the cpu device, but its sticky error comes back from the next call that asks, and
// nobody says whose work it was. Linked into a server of its own in place of the real devices.
#include <signal.h>
#include <unistd.h>

#include <atomic>

#include "cpu_behind.h"
#include "device/cpu/cpu_device.h"

namespace xmig::device {
namespace {

std::atomic<int> g_spoiled{0};
DriverTable g_real;

// These functions of the driver look at the context.
template <auto Member>
struct Looking;
template <typename... Args, CUresult (*DriverTable::*Member)(Args...)>
struct Looking<Member> {
  static CUresult call(Args... args) {
    const CUresult result = (g_real.*Member)(args...);
    const int spoiled = g_spoiled.load();
    return spoiled != 0 ? static_cast<CUresult>(spoiled) : result;
  }
};

class BlindDevice final : public CpuBehind {
 public:
  explicit BlindDevice(std::unique_ptr<Device> cpu) : CpuBehind(std::move(cpu)) {
    g_real = table_;
    table_.cuStreamQuery = Looking<&DriverTable::cuStreamQuery>::call;
    table_.cuStreamSynchronize = Looking<&DriverTable::cuStreamSynchronize>::call;
    table_.cuEventQuery = Looking<&DriverTable::cuEventQuery>::call;
    table_.cuEventSynchronize = Looking<&DriverTable::cuEventSynchronize>::call;
    table_.cuCtxSynchronize = Looking<&DriverTable::cuCtxSynchronize>::call;
    table_.cuLaunchKernelEx = Looking<&DriverTable::cuLaunchKernelEx>::call;
  }

  void set_sequence(uint64_t) override {}
  Fault fault() const override {
    const int error = g_spoiled.load() != 0 ? g_spoiled.load() : cpu_->fault().error;
    return {error, 0, error != 0 ? "the device reports a sticky error" : ""};
  }
  void on_fault(void (*)(void*), void*) override {}
  bool spoils() const override { return true; }
  CUresult spoil(CUstream stream, uint32_t, InjectKind kind, int error) override {
    if (kind == InjectKind::kHang) return table_.cuLaunchHostFunc(stream, [](void*) { for (;;) ::pause(); }, nullptr);
    const auto strike = [](void* what) { g_spoiled = static_cast<int>(reinterpret_cast<intptr_t>(what)); };
    return table_.cuLaunchHostFunc(stream, strike, reinterpret_cast<void*>(intptr_t{error}));
  }
  void arm(const Injection&, Notify, void*) override {}
};

}  // namespace

std::unique_ptr<Device> open(std::string_view, std::span<const int> ordinals, uint64_t memory_bytes) {
  return std::make_unique<BlindDevice>(open_cpu(ordinals, memory_bytes));
}

}  // namespace xmig::device
