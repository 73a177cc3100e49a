#include "server/faults.h"

#include <unistd.h>

namespace xmig::server {
namespace {

// Errors after which a context answers nothing else.
bool is_sticky(CUresult result) {
  switch (result) {
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_CONTEXT_IS_DESTROYED:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_EXTERNAL_DEVICE: return true;
    default: return false;
  }
}

}  // namespace

Faults::Faults(device::Device& device, Daemon& daemon) : device_(device), daemon_(daemon) {
  device_.on_fault(
      [](void* self) {
        auto& faults = *static_cast<Faults*>(self);
        faults.strike(faults.device_.fault());
      },
      this);
}

void Faults::name_operations(std::function<std::string(uint64_t)> name) { operation_ = std::move(name); }

void Faults::check_slowly(CUresult result) {
  device::Fault fault = device_.fault();
  if (fault.error == 0) {
    if (!is_sticky(result)) return;
    fault = {static_cast<int>(result), 0, "the device reports a lost context"};
  }
  strike(fault);
}

void Faults::strike(const device::Fault& fault) {
  // Several threads meet the same fault; one reports it, the others must not go on.
  if (struck_.exchange(true)) {
    for (;;) ::pause();
  }
  const std::string op = operation_ ? operation_(fault.sequence) : std::string();
  daemon_.fault(fault.sequence, op, fault.error, fault.text);
  ::_exit(kFaultExit);
}

}  // namespace xmig::server
