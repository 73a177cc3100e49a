#include "server/faults/faults.h"

#include <unistd.h>

namespace xmig::server {

Faults::Faults(device::Runtime& device, Daemon& daemon)
    : device_(device), not_ready_(device.not_ready()), daemon_(daemon) {
  device_.on_fault(
      [](void* self) {
        auto& faults = *static_cast<Faults*>(self);
        faults.raise(faults.device_.fault());
      },
      this);
}

void Faults::check_slowly(int result) {
  device::Fault fault = device_.fault();
  if (fault.error == 0) {
    if (!device_.is_sticky(result)) return;
    fault = {result, 0, "the device reports a lost context"};
  }
  raise(std::move(fault));
}

void Faults::give_up(uint64_t sequence, const char* text) {
  device::Fault fault = device_.fault();
  if (fault.error == 0) fault = {device_.unknown(), sequence, text};
  raise(std::move(fault));
}

void Faults::raise(device::Fault fault) {
  // Several threads meet the same fault; one reports it, the others must not go on.
  if (raised_.exchange(true)) {
    for (;;) ::pause();
  }
  const Witness* const witness = witness_;
  Culprit culprit{fault.sequence};
  std::string op;
  if (witness) {
    if (culprit.sequence == 0) culprit = witness->culprit();
    if (culprit.sequence != 0) op = witness->operation(culprit.sequence);
  }
  daemon_.fault(culprit, op, fault.error, fault.text);
  daemon_.hang_up();
  ::_exit(kFaultExit);
}

}  // namespace xmig::server
