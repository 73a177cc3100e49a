// A device that faults as a GPU does: the cpu device, but its sticky error comes back from the next call that asks, and
// nobody says whose work it was. And it hashes and copies only where the program's last kernel was, and reaches no other device's
// memory. Linked into a server of its own in place of the real devices.
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>

#include "cpu_behind.h"
#include "device/cpu/cpu_device.h"

namespace xmig::device {
namespace {

std::atomic<int> g_injected{0};
DriverTable g_real;
CUstream g_kernels_in = nullptr;  // the stream of the last kernel; the server's executor alone launches

// These functions of the driver look at the context.
template <auto Member>
struct Looking;
template <typename... Args, CUresult (*DriverTable::*Member)(Args...)>
struct Looking<Member> {
  static CUresult call(Args... args) {
    const CUresult result = (g_real.*Member)(args...);
    const int injected = g_injected.load();
    return injected != 0 ? static_cast<CUresult>(injected) : result;
  }
};

CUresult launch(const CUlaunchConfig* config, CUfunction kernel, void** parameters, void** extra) {
  g_kernels_in = config->hStream;
  return Looking<&DriverTable::cuLaunchKernelEx>::call(config, kernel, parameters, extra);
}

CUresult destroy_stream(CUstream stream) {
  if (g_kernels_in == stream) g_kernels_in = nullptr;
  return g_real.cuStreamDestroy_v2(stream);
}

class BlindDevice final : public CpuBehind {
 public:
  explicit BlindDevice(std::unique_ptr<Device> cpu) : CpuBehind(std::move(cpu)) {
    g_real = table_;
    table_.cuStreamQuery = Looking<&DriverTable::cuStreamQuery>::call;
    table_.cuStreamSynchronize = Looking<&DriverTable::cuStreamSynchronize>::call;
    table_.cuEventQuery = Looking<&DriverTable::cuEventQuery>::call;
    table_.cuEventSynchronize = Looking<&DriverTable::cuEventSynchronize>::call;
    table_.cuCtxSynchronize = Looking<&DriverTable::cuCtxSynchronize>::call;
    table_.cuLaunchKernelEx = launch;
    table_.cuStreamDestroy_v2 = destroy_stream;
  }

  void set_sequence(uint64_t) override {}
  Fault fault() const override {
    const int error = g_injected.load() != 0 ? g_injected.load() : cpu_->fault().error;
    return {error, 0, error != 0 ? "the device reports a sticky error" : ""};
  }
  void on_fault(void (*)(void*), void*) override {}
  uint32_t peer(int, int) const override { return 0; }
  bool injects() const override { return true; }
  Status inject(StreamHandle where, uint32_t, InjectKind kind, int error) override {
    const auto stream = static_cast<CUstream>(where);
    if (kind == InjectKind::kHang) {
      return status_of(table_.cuLaunchHostFunc(stream, [](void*) { for (;;) ::pause(); }, nullptr));
    }
    const auto inject = [](void* what) { g_injected = static_cast<int>(reinterpret_cast<intptr_t>(what)); };
    return status_of(table_.cuLaunchHostFunc(stream, inject, reinterpret_cast<void*>(intptr_t{error})));
  }
  void arm(const Injection&, Notify, void*) override {}
  bool hash(std::span<const Chunk> chunks, std::span<uint64_t> hashes, Where where) override {
    return is_with_kernels(where) && CpuBehind::hash(chunks, hashes, where);
  }
  bool copy(std::span<const Move> moves, Where where) override {
    return is_with_kernels(where) && CpuBehind::copy(moves, where);
  }

 private:
  static bool is_with_kernels(Where where) {
    if (where == g_kernels_in) return true;
    std::fputs("the device hashes or copies in another stream than that of the last kernel\n", stderr);
    return false;
  }
};

}  // namespace

std::unique_ptr<Device> open(std::string_view, std::span<const int> ordinals, uint64_t memory_bytes) {
  return std::make_unique<BlindDevice>(open_cpu(ordinals, memory_bytes));
}

}  // namespace xmig::device
