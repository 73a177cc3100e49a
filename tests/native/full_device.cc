// The cpu device, but at first it has no memory for a context: as a GPU that others have filled, and then leave. Linked into a server
// of its own in place of the real devices.
#include "cpu_behind.h"
#include "device/cpu/cpu_device.h"

namespace xmig::device {
namespace {

constexpr int kRefused = 2;  // contexts, before there is one

class FullDevice final : public CpuBehind {
 public:
  using CpuBehind::CpuBehind;

  Status open_context(uint32_t ordinal, ContextHandle& out) override {
    if (refused_ == kRefused) return CpuBehind::open_context(ordinal, out);
    ++refused_;
    return status_of(CUDA_ERROR_OUT_OF_MEMORY);
  }

 private:
  int refused_ = 0;
};

}  // namespace

std::unique_ptr<Device> open(std::string_view, std::span<const int> ordinals, uint64_t memory_bytes) {
  return std::make_unique<FullDevice>(open_cpu(ordinals, memory_bytes));
}

}  // namespace xmig::device
