// What tests of whole jobs against the real xmig-server share: a program whose results are known.
#pragma once

#include <random>

#include "server_program.h"

namespace harness {

inline std::vector<uint64_t> numbers(uint64_t first) {
  std::vector<uint64_t> x(kWords);
  for (uint64_t i = 0; i < kWords; ++i) x[i] = first + i * i;
  return x;
}

inline void check_resumed(Job& job) {
  Job::wait([&] { return is_running(job) && job.counters().resumed != 0; });
  CHECK(job.counters().differing == 0);
  CHECK(job.counters().garbage == 0);
}

// Copies, kernels, memsets, events, two streams, allocations that come and go: compared word by word with the host.
inline void train(Job& job, int steps, const std::function<void(int)>& disturb = {}) {
  const auto kernels = job.load_kernels();
  const uint64_t mix_kernel = kernels.kernels.at("mix");
  const uint64_t address = job.memory(kWords * 8);
  const uint64_t bulk = job.memory(24 << 20);
  const uint64_t stream = job.make_stream();
  const uint64_t event = job.make_event();
  auto x = numbers(7);
  job.write(address, x.data(), kWords * 8, stream);
  job.append(Op::cuMemsetD8Async, Args_cuMemsetD8Async{bulk, 0x5a, 24 << 20, stream});
  uint64_t scratch_base = 0;
  for (int step = 0; step < steps; ++step) {
    if (disturb) disturb(step);
    for (int i = 0; i < 4; ++i) {
      job.launch(mix_kernel, stream, address, uint64_t{3} + i, kWords);
      mix(x, uint64_t{3} + i);
    }
    if (step % 3 == 0) {
      const uint64_t part = bulk + static_cast<uint64_t>(step % 12) * (2 << 20);
      job.append(Op::cuMemcpyDtoDAsync_v2, Args_cuMemcpyDtoDAsync_v2{part, address, kWords * 8, stream});
    }
    if (step % 7 == 0) {
      // Memory comes and goes: freed, given back, and now and then grown at the same place again.
      if (scratch_base) job.append(Op::xmFree, Args_xmFree{scratch_base, 0});
      if (step % 21 == 14) {
        job.append(Op::xmShrink, Args_xmShrink{scratch_base, 4 << 20});
        CHECK(job.grow(scratch_base, 4 << 20) == CUDA_SUCCESS);
      }
      if (scratch_base) job.alloc(scratch_base, 3 << 20);
      if (!scratch_base) scratch_base = job.memory(3 << 20);
      job.append(Op::cuMemsetD8Async, Args_cuMemsetD8Async{scratch_base, 1, 3 << 20, stream});
    }
    const uint64_t sequence = job.record_event(event, stream);
    job.append(Op::cuStreamWaitEvent, Args_cuStreamWaitEvent{0, event, 0});
    if (step % 5 == 0) {
      std::vector<uint64_t> got(kWords);
      CHECK(job.read(address, got.data(), kWords * 8, stream) == CUDA_SUCCESS);
      CHECK(got == x);
    } else if (step % 5 == 2) {
      CHECK(job.call(Op::cuEventSynchronize, Args_cuEventSynchronize{event}) == CUDA_SUCCESS);
      Job::wait([&] { return job.event_done(event, sequence); });
    }
  }
  std::vector<uint64_t> got(kWords);
  CHECK(job.read(address, got.data(), kWords * 8) == CUDA_SUCCESS);
  CHECK(got == x);
}

}  // namespace harness
