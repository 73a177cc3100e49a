// The cpu device, but at first it has no memory for a context: as a GPU that others have filled, and then leave. Linked into a server
// of its own in place of the real devices.
#include <array>

#include "cpu_behind.h"
#include "device/cpu/cpu_device.h"

namespace xmig::device {
namespace {

constexpr int kRefused = 2;  // contexts of each device, before there is one

class FullDevice final : public CpuBehind {
 public:
  using CpuBehind::CpuBehind;

  Status open_context(uint32_t ordinal, ContextHandle& out) override {
    if (refused_.at(ordinal) == kRefused) return CpuBehind::open_context(ordinal, out);
    ++refused_[ordinal];
    return status_of(CUDA_ERROR_OUT_OF_MEMORY);
  }

 private:
  std::array<int, journal::kMaxDevices> refused_{};
};

}  // namespace

std::unique_ptr<Device> open(std::string_view, std::span<const int> ordinals, uint64_t memory_bytes) {
  return std::make_unique<FullDevice>(open_cpu(ordinals, memory_bytes));
}

}  // namespace xmig::device
