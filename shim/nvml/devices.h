// The devices that NVML shows, by CUDA ordinal, and where the answers come from:
//
//   1. This process uses CUDA: from its own driver.
//   2. It does not, or not yet: a child asks, which shakes hands, answers and ends (xmig-nvml-probe). Programs count
//      devices through NVML before they fork just because NVML, unlike cuInit, does not disable CUDA for the children;
//      a handshake of this process would. What the child reported is kept: only the first question costs a GPU server.
//      Its devices are those that the daemon would give this process now; a job without a fixed device may get others
//      later, and from then on 1. answers.
//      With $CUDA_VISIBLE_DEVICES a child asks in any case, for all that the variable could name: natively NVML counts
//      the machine's devices whatever the variable says, and programs look up the entries of the one in the other.
//   3. A forked child: what its parent knew. NVML works there natively, too, though CUDA does not.
#pragma once

#include <cstdint>

#include "nvml/driver.h"

namespace xmig::nvml {

// The driver of this process, loaded at the first question.
const Driver& driver();

CUresult list_devices(Devices& devices);

// Free memory now. Without CUDA in this process a child asks every time.
CUresult free_bytes(int ordinal, uint64_t& bytes);

// Once, before anything else: forked children must find the lock open.
void prepare_for_forks();

// What xmig-nvml-probe answers on its standard output.
struct ProbeReport {
  CUresult error;
  Devices devices;
  uint64_t free_bytes;
};

}  // namespace xmig::nvml
