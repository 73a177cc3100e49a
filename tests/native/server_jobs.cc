// Whole jobs against the real xmig-server on the cpu device: what survives a lost server, and what a program sees.
#include <fcntl.h>
#include <sys/un.h>

#include <array>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <random>

#include "journal/tensor_map.h"
#include "server_harness.h"

namespace {

using namespace harness;

constexpr uint64_t kWords = 4096;

// The kernel `mix`, on the host.
void mix(std::vector<uint64_t>& x, uint64_t rounds) {
  for (uint64_t i = 0; i < x.size(); ++i) {
    uint64_t v = x[i] + i;
    for (uint64_t r = 0; r < rounds; ++r) v = (v ^ (v >> 29)) * 0xbf58476d1ce4e5b9u + r;
    x[i] = v;
  }
}

std::vector<uint64_t> numbers(uint64_t first) {
  std::vector<uint64_t> x(kWords);
  for (uint64_t i = 0; i < kWords; ++i) x[i] = first + i * i;
  return x;
}

bool is_running(Job& job) {
  return job.header().state.load() == static_cast<uint32_t>(journal::ServerState::kRunning);
}

void check_resumed(Job& job) {
  Job::wait([&] { return is_running(job) && job.counters().resumed != 0; });
  CHECK(job.counters().differing == 0);
  CHECK(job.counters().garbage == 0);
}

// Copies, kernels, memsets, events, two streams, allocations that come and go: compared word by word with the host.
void train(Job& job, int steps, const std::function<void(int)>& disturb = {}) {
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

void undisturbed() {
  Job job;
  train(job, 200);
  CHECK(job.counters().recoveries == 0);
  Job::wait([&] { return job.counters().cuts != 0; });
}

// Who is killed faster than it can get anywhere gets nowhere.
#if defined(__SANITIZE_THREAD__)
constexpr unsigned kLongestLife = 500'000;
#else
constexpr unsigned kLongestLife = 50'000;
#endif

void kills() {
  Job job;
  std::mt19937 random(1);
  std::atomic<bool> done{false};
  std::thread killer([&] {
    while (!done) {
      // Mostly while it works, sometimes while it recovers.
      if (random() % 5 != 0) Job::wait([&] { return is_running(job) || done; });
      ::usleep(random() % kLongestLife);
      job.kill_server();
      Job::wait([&] { return job.server() > 0; });
    }
  });
  train(job, 3000);
  done = true;
  killer.join();
  check_resumed(job);
  CHECK(job.counters().recoveries > 5);
}

// Lost in the middle of each kind of thing, and, while redoing, lost again.
void injections() {
  for (const char* kind : {"kill", "fault"}) {
    for (const char* point : {"record", "kernel", "copy", "cut"}) {
      Job job;
      train(job, 60, [&](int step) {
        if (step % 15 != 5) return;
        Job::wait([&] { return is_running(job) && job.counters().recoveries >= job.counters().injected; });
        job.inject(point, kind, std::string(point) == "cut" ? 1 : job.sequence() + 3);
        if (std::string(point) != "cut") {
          // The server reads its messages in order: it is armed when it answers the next one.
          const uint64_t paused = job.counters().paused;
          job.send({{"type", "pause"}});
          Job::wait([&] { return job.counters().paused != paused; });
          return job.send({{"type", "continue"}});
        }
        job.make_event();  // a cut of nothing is none
        const uint64_t before = job.counters().injected;
        job.send({{"type", "cut"}});
        Job::wait([&] { return job.counters().injected != before; });
      });
      check_resumed(job);
      Job::wait([&] { return job.counters().injected == 4; });
      Job::wait([&] { return job.counters().recoveries >= job.counters().injected; });
    }
  }
}

void lost_again_in_redo() {
  Job job;
  int lost = 0;
  job.on_message([&](const Json& message) {
    // The successor is lost twice, in the middle of its redo.
    if (message.at("type") == "phase" && message.at("name") == "mapped" && lost++ < 2) job.inject("redo", "kill", 5);
  });
  train(job, 60, [&](int step) {
    if (step == 30) job.kill_server();
  });
  check_resumed(job);
  CHECK(job.counters().recoveries >= 2);
}

// A fault that is the program's own comes back from the redo, and goes to the program; a reset clears it.
void program_error() {
  Job job;
  const auto kernels = job.load_kernels();
  const uint64_t address = job.memory(kWords * 8);
  auto x = numbers(1);
  job.write(address, x.data(), kWords * 8);
  job.launch(kernels.kernels.at("mix"), 0, address, 2, kWords);
  std::vector<uint64_t> got(kWords);
  CHECK(job.read(address, got.data(), kWords * 8) == CUDA_SUCCESS);
  job.launch(kernels.kernels.at("trap"), 0, 0);
  CHECK(job.synchronize() == CUDA_ERROR_LAUNCH_FAILED);
  CHECK(job.header().context_error.load() == CUDA_ERROR_LAUNCH_FAILED);
  CHECK(job.read(address, got.data(), kWords * 8) == CUDA_ERROR_LAUNCH_FAILED);
  Job::wait([&] { return job.counters().faults == 2 && job.counters().program_errors == 1; });
  // It stays across the loss of a server, until the context is reset.
  job.kill_server();
  CHECK(job.synchronize() == CUDA_ERROR_LAUNCH_FAILED);
  CHECK(job.call(Op::xmContextReset, Args_xmContextReset{1, 0, 0}) == CUDA_SUCCESS);
  CHECK(job.header().context_error.load() == 0);
  const auto again = job.load_kernels();
  const uint64_t other = job.memory(kWords * 8);
  job.write(other, x.data(), kWords * 8);
  job.launch(again.kernels.at("mix"), 0, other, 2, kWords);
  CHECK(job.read(other, got.data(), kWords * 8) == CUDA_SUCCESS);
  mix(x, 2);
  CHECK(got == x);
  job.kill_server();
  CHECK(job.read(other, got.data(), kWords * 8) == CUDA_SUCCESS);
  CHECK(got == x && job.counters().program_errors == 1);
}

// The culprit is one of many that were under way when its fault was seen, on two streams, and much that the program did
// before was not waited for. Exactly what came before it is done when the program is told.
void error_among_others() {
  Job job;
  const auto kernels = job.load_kernels();
  const uint64_t other = job.make_stream();
  const uint64_t address = job.memory(kWords * 8), beside = job.memory(kWords * 8);
  job.write(address, numbers(1).data(), kWords * 8);
  job.write(beside, numbers(2).data(), kWords * 8);
  CHECK(job.synchronize() == CUDA_SUCCESS);
  std::atomic<uint64_t> culprit{0};
  job.on_message([&](const Json& message) {
    if (message.at("type") == "program_error") culprit = message.at("sequence").get<uint64_t>();
  });
  for (int i = 0; i < 400; ++i) {
    job.launch(kernels.kernels.at("mix"), i % 3 ? 0 : other, i % 3 ? address : beside, 2, kWords);
  }
  job.launch(kernels.kernels.at("trap"), other, 0);
  const uint64_t trap = job.sequence();
  for (int i = 0; i < 400; ++i) {
    job.launch(kernels.kernels.at("mix"), i % 3 ? 0 : other, i % 3 ? address : beside, 2, kWords);
  }
  // Nobody asks: it is found out all the same.
  Job::wait([&] { return job.header().context_error.load() == CUDA_ERROR_LAUNCH_FAILED; });
  Job::wait([&] { return culprit != 0; });
  CHECK(culprit == trap);
  CHECK(job.counters().program_errors == 1);
  CHECK(job.counters().faults == 2);
  CHECK(job.synchronize() == CUDA_ERROR_LAUNCH_FAILED);
}

// A queued call that cannot be executed is not lost silently.
void queued_error() {
  Job job;
  job.append(Op::cuMemsetD8Async, Args_cuMemsetD8Async{journal::kDeviceBase, 1, 64, 0});
  CHECK(job.synchronize() == CUDA_ERROR_INVALID_VALUE);
  // The harness hears of it on its own thread.
  Job::wait([&] { return job.counters().program_errors == 1; });
}

// A launch whose answer is waited for: executed once, refused at the call without harm to anything, and redone.
void first_launches() {
  Job job;
  const auto kernels = job.load_kernels();
  const uint64_t address = job.memory(kWords * 8);
  const auto launch = [&](uint64_t function, uint32_t cooperative) {
    const uint64_t packed[] = {address, 2, kWords};
    const Args_xmFirstLaunch args{function, 1, 1, 1, 1, 1, 1, 0, 0, sizeof(packed), cooperative, 0};
    return job.finish(job.append(Op::xmFirstLaunch, args, std::as_bytes(std::span(packed))));
  };
  std::vector<uint64_t> x(kWords), got(kWords);
  job.write(address, x.data(), kWords * 8);
  for (int round = 0; round < 4; ++round) {
    CHECK(launch(kernels.kernels.at("mix"), 0) == CUDA_SUCCESS);
    CHECK(launch(kernels.kernels.at("mix"), 1) == CUDA_ERROR_NOT_SUPPORTED);  // the cpu device says so
    CHECK(launch(journal::make_handle(journal::Kind::kFunction, 4711), 0) == CUDA_ERROR_INVALID_HANDLE);
    mix(x, 2);
    if (round % 2) job.kill_server();
    CHECK(job.read(address, got.data(), kWords * 8) == CUDA_SUCCESS);
    CHECK(got == x);
  }
  check_resumed(job);
  CHECK(job.counters().program_errors == 0);
}

// What gives something back has nothing left that could be harmed: that it was not there is said in the log, and the
// program's next call is not told of it.
void failed_frees() {
  Job job;
  const auto kernels = job.load_kernels();
  const uint64_t address = job.memory(kWords * 8);
  const auto handle = [](journal::Kind kind) { return journal::make_handle(kind, 4711); };
  const auto free_all = [&] {
    job.append(Op::xmUnpin, Args_xmUnpin{journal::kPinnedBase + (1 << 20)});
    job.append(Op::xmGraphDestroy, Args_xmGraphDestroy{handle(journal::Kind::kGraphExec)});
    job.append(Op::cuStreamDestroy_v2, Args_cuStreamDestroy_v2{handle(journal::Kind::kStream)});
    job.append(Op::cuEventDestroy_v2, Args_cuEventDestroy_v2{handle(journal::Kind::kEvent)});
    job.append(Op::cuModuleUnload, Args_cuModuleUnload{handle(journal::Kind::kModule)});
  };
  std::vector<uint64_t> x(kWords), got(kWords);
  for (int round = 0; round < 3; ++round) {
    free_all();
    job.write(address, x.data(), kWords * 8);
    job.launch(kernels.kernels.at("mix"), 0, address, 2, kWords);
    free_all();
    CHECK(job.synchronize() == CUDA_SUCCESS);
    if (round == 1) job.kill_server();  // a redo meets them again
    CHECK(job.read(address, got.data(), kWords * 8) == CUDA_SUCCESS);
    mix(x, 2);
    CHECK(got == x);
  }
  check_resumed(job);
  CHECK(job.counters().program_errors == 0 && job.counters().faults == 0);
}

// Each form of tensor map, asked of the device's driver; after a recovery the same bytes.
void tensor_maps() {
  Job job({.device = "null:0"});
  const uint64_t address = job.memory(4 << 20);
  const auto args = [&](journal::TensorMapForm form) {
    Args_xmTensorMap args{};
    args.form = static_cast<uint32_t>(form);
    args.type = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    args.rank = 4;
    args.address = address;
    const uint64_t sizes[] = {64, 16, 16, 8}, strides[] = {128, 2048, 32768};
    std::copy(std::begin(sizes), std::end(sizes), args.sizes);
    std::copy(std::begin(strides), std::end(strides), args.strides);
    std::fill_n(args.box, 4, 8);
    std::fill_n(args.steps, 4, 1);
    args.channels = 8;
    args.pixels = 16;
    return args;
  };
  using Map = std::array<uint64_t, 16>;
  const auto made = [&](const Args_xmTensorMap& args) {
    Map map{};
    CHECK(job.call(Op::xmTensorMap, args, map.data(), sizeof(map)) == CUDA_SUCCESS);
    return map;
  };
  using enum journal::TensorMapForm;
  std::vector<Map> all;
  for (const auto form : {kTiled, kIm2col}) all.push_back(made(args(form)));
  auto replace = args(kReplace);
  std::copy(all[0].begin(), all[0].end(), replace.map);
  replace.address = address + 4096;
  all.push_back(made(replace));
  CHECK(all[2] != all[0]);
  // What the driver refuses is refused at the call, and nothing else is harmed.
  auto wrong = args(kTiled);
  wrong.address += 1;
  Map none{};
  CHECK(job.call(Op::xmTensorMap, wrong, none.data(), sizeof(none)) == CUDA_ERROR_INVALID_VALUE);
  wrong = args(kTiled);
  wrong.rank = 6;
  CHECK(job.call(Op::xmTensorMap, wrong, none.data(), sizeof(none)) == CUDA_ERROR_INVALID_VALUE);
  wrong = args(static_cast<journal::TensorMapForm>(77));
  CHECK(job.call(Op::xmTensorMap, wrong, none.data(), sizeof(none)) == CUDA_ERROR_INVALID_VALUE);
  // Of a later compute capability.
  CHECK(job.call(Op::xmTensorMap, args(kIm2colWide), none.data(), sizeof(none)) == CUDA_ERROR_NOT_SUPPORTED);
  job.kill_server();
  CHECK(made(args(kTiled)) == all[0] && made(args(kIm2col)) == all[1] && made(replace) == all[2]);
  check_resumed(job);
}

// The program uses its page-locked buffers again at once: a redo must neither read nor write them.
void pinned() {
  Job job;
  const auto kernels = job.load_kernels();
  const uint64_t mix_kernel = kernels.kernels.at("mix");
  const uint64_t address = job.memory(kWords * 8);
  auto* const in = reinterpret_cast<uint64_t*>(job.pin(2 << 20));
  auto* const out = reinterpret_cast<uint64_t*>(job.pinned() + (1 << 20));
  const auto in_address = reinterpret_cast<uint64_t>(in), out_address = reinterpret_cast<uint64_t>(out);
  const uint64_t event = job.make_event();
  for (int step = 0; step < 150; ++step) {
    auto x = numbers(static_cast<uint64_t>(step));
    std::memcpy(in, x.data(), kWords * 8);
    job.append(Op::xmCopyFromPinned,
               Args_xmCopyFromPinned{address, kWords * 8, kWords * 8, 1, 0, in_address, kWords * 8});
    job.launch(mix_kernel, 0, address, 5, kWords);
    job.append(Op::xmCopyToPinned, Args_xmCopyToPinned{address, 512, 512, kWords / 64, 0, out_address, 1024});
    const uint64_t sequence = job.record_event(event, 0);
    if (step % 10 == 3) job.kill_server();
    Job::wait([&] { return job.event_done(event, sequence); });
    mix(x, 5);
    for (uint64_t row = 0; row < kWords / 64; ++row) CHECK(std::memcmp(out + row * 128, x.data() + row * 64, 512) == 0);
    std::memset(in, 0xee, kWords * 8);
    std::memset(out, 0xdd, kWords * 16);
    if (step % 10 == 7) {
      job.kill_server();
      CHECK(job.synchronize() == CUDA_SUCCESS);
      for (uint64_t i = 0; i < kWords * 2; ++i) CHECK(out[i] == 0xddddddddddddddddu);
    }
  }
  check_resumed(job);
  CHECK(job.counters().compared > 0);
}

// A copy from page-locked memory does not wait for the work before it, unless that has yet to write the buffer.
void pinned_ahead() {
  Job job;
  const auto kernels = job.load_kernels();
  const uint64_t kernel = kernels.kernels.at("wait_for"), copy = kernels.kernels.at("copy_bytes");
  const uint64_t address = job.memory(2 << 20), gate = job.memory(8), own = job.memory(2 << 20);
  auto* const in = reinterpret_cast<uint64_t*>(job.pin(4 << 20));
  auto* const other = reinterpret_cast<uint64_t*>(job.pinned() + (2 << 20));
  const auto in_address = reinterpret_cast<uint64_t>(in), other_address = reinterpret_cast<uint64_t>(other);
  const uint64_t work = job.make_stream(), beside = job.make_stream();
  constexpr uint64_t kBytes = 64 << 10;
  const auto bring = [&](uint64_t from) {
    return job.append(Op::xmCopyFromPinned, Args_xmCopyFromPinned{address, kBytes, kBytes, 1, work, from, kBytes});
  };
  const auto is_copied = [&](uint64_t position) { return (job.record(position)->state.load() & 0xff) == journal::kCopied; };
  std::vector<uint64_t> got(kBytes / 8);
  for (uint64_t round = 1; round <= 12; ++round) {
    // What the device writes before the copy comes from `own`: by a copy, or by a kernel.
    const uint64_t late = 1000 + round;
    job.append(Op::cuMemsetD32Async, Args_cuMemsetD32Async{own, static_cast<uint32_t>(late), kBytes / 4, 0});
    job.append(Op::cuMemsetD8Async, Args_cuMemsetD8Async{gate, 0, 8, 0});
    CHECK(job.synchronize() == CUDA_SUCCESS);
    std::fill_n(in, kBytes / 8, round);
    std::fill_n(other, kBytes / 8, round);
    job.launch(kernel, work, gate);
    const bool by_kernel = round == 12;  // from then on, until a cut, everything takes its turn
    if (by_kernel) {
      job.launch(copy, work, other_address, own, kBytes);
    } else {
      job.append(Op::xmCopyToPinned, Args_xmCopyToPinned{own, kBytes, kBytes, 1, work, other_address, kBytes});
    }
    const uint64_t in_turn = bring(other_address);
    const uint64_t ahead = bring(in_address);
    if (!by_kernel) Job::wait([&] { return is_copied(ahead); });
    if (round % 3 == 2) job.kill_server();
    CHECK(!is_copied(in_turn));
    std::fill_n(in, by_kernel ? 0 : kBytes / 8, 0);  // the server has brought it; the program could not know yet
    job.append(Op::cuMemsetD8Async, Args_cuMemsetD8Async{gate, 1, 8, beside});
    CHECK(job.synchronize(beside) == CUDA_SUCCESS && job.synchronize(work) == CUDA_SUCCESS);
    CHECK(is_copied(in_turn) && is_copied(ahead));
    CHECK(job.read(address, got.data(), kBytes) == CUDA_SUCCESS);
    CHECK(std::all_of(got.begin(), got.end(), [&](uint64_t word) { return word == round; }));
    bring(other_address);
    CHECK(job.read(address, got.data(), kBytes, work) == CUDA_SUCCESS);
    CHECK(std::all_of(got.begin(), got.end(), [&](uint64_t word) { return word == (late << 32 | late); }));
  }
  check_resumed(job);
}

// Page-locked memory is an address like any other to a memset.
void sets_pinned() {
  Job job;
  auto* const words = reinterpret_cast<uint32_t*>(job.pin(4096));
  const auto address = reinterpret_cast<uint64_t>(words);
  for (uint32_t step = 1; step <= 20; ++step) {
    std::fill_n(words, 8, 0xdddddddd);
    job.append(Op::cuMemsetD32Async, Args_cuMemsetD32Async{address, step, 4, 0});
    if (step % 4 == 1) job.kill_server();
    CHECK(job.synchronize() == CUDA_SUCCESS);
    for (int i = 0; i < 8; ++i) CHECK(words[i] == (i < 4 ? step : 0xdddddddd));
  }
  check_resumed(job);
  job.append(Op::cuMemsetD32Async, Args_cuMemsetD32Async{journal::kPinnedBase + journal::kPinnedBytes - 8, 1, 4, 0});
  CHECK(job.synchronize() == CUDA_ERROR_INVALID_VALUE);
}

// More is copied from page-locked memory than the server can keep: a cut makes room, and none is lost.
void pinned_much() {
  Job job;
  constexpr uint64_t kBytes = journal::kGranule, kCopies = 300;
  const uint64_t address = job.memory(2 * kBytes);
  auto* const in = reinterpret_cast<uint64_t*>(job.pin(kBytes));
  const auto in_address = reinterpret_cast<uint64_t>(in);
  const uint64_t event = job.make_event();
  std::vector<uint64_t> got(1);
  for (uint64_t copy = 1; copy <= kCopies; ++copy) {
    in[0] = copy;
    job.append(Op::xmCopyFromPinned, Args_xmCopyFromPinned{address, kBytes, kBytes, 1, 0, in_address, kBytes});
    job.append(Op::xmCopyFromPinned, Args_xmCopyFromPinned{address + kBytes, kBytes, kBytes, 1, 0, in_address, kBytes});
    const uint64_t sequence = job.record_event(event, 0);
    Job::wait([&] { return job.event_done(event, sequence); });
    in[0] = 0;
    if (copy % 100 != 60) continue;
    job.kill_server();
    CHECK(job.read(address + kBytes, got.data(), 8) == CUDA_SUCCESS);
    CHECK(got[0] == copy);
  }
  check_resumed(job);
}

// A kernel that reads page-locked memory by address: nothing of it is in the journal, so a cut follows.
void kernel_reads_pinned() {
  Job job;
  const auto kernels = job.load_kernels();
  job.pin(kWords * 8);
  const uint64_t address = job.memory(kWords * 8);
  for (int step = 0; step < 20; ++step) {
    auto x = numbers(static_cast<uint64_t>(step));
    std::memcpy(job.pinned(), x.data(), kWords * 8);
    job.launch(kernels.kernels.at("copy_bytes"), 0, address, reinterpret_cast<uint64_t>(job.pinned()), kWords * 8);
    CHECK(job.synchronize() == CUDA_SUCCESS);
    std::memset(job.pinned(), 0, kWords * 8);
    if (step % 4 == 1) job.kill_server();
    std::vector<uint64_t> got(kWords);
    CHECK(job.read(address, got.data(), kWords * 8) == CUDA_SUCCESS);
    CHECK(got == x);
  }
  check_resumed(job);
}

// The program orders two streams by waiting itself. So must a redo, although nothing on the device says so.
void order_by_waiting() {
  Job job;
  const auto kernels = job.load_kernels();
  const uint64_t mix_kernel = kernels.kernels.at("mix");
  const uint64_t first = job.make_stream(), second = job.make_stream();
  const uint64_t event = job.make_event();
  const uint64_t address = job.memory(kWords * 8);
  auto x = numbers(1);
  job.write(address, x.data(), kWords * 8, first);
  CHECK(job.synchronize(first) == CUDA_SUCCESS);
  for (int step = 0; step < 40; ++step) {
    job.launch(mix_kernel, first, address, 40, kWords);
    mix(x, 40);
    if (step % 3 == 0) {
      CHECK(job.synchronize(first) == CUDA_SUCCESS);
    } else {
      // Seen in shared memory; the client library says so in the journal.
      const uint64_t sequence = job.record_event(event, first);
      Job::wait([&] { return job.event_done(event, sequence); });
      const uint64_t position = job.append(Op::cuEventSynchronize, Args_cuEventSynchronize{event});
      if (step % 3 == 1) job.kill_server();
      job.header().threads[0].waiting.store(journal::kNotWaiting);
      (void)position;
    }
    job.launch(mix_kernel, second, address, 1, kWords);
    mix(x, 1);
    if (step % 4 == 2) job.kill_server();
    CHECK(job.synchronize(second) == CUDA_SUCCESS);
  }
  std::vector<uint64_t> got(kWords);
  CHECK(job.read(address, got.data(), kWords * 8, second) == CUDA_SUCCESS);
  CHECK(got == x);
  check_resumed(job);
}

// The client's callback thread, as the library has one.
class Callbacks {
 public:
  Callbacks(Job& job, std::function<void()> function)
      : job_(job), function_(std::move(function)), thread_([this] { run(); }) {}
  ~Callbacks() {
    stop_ = true;
    job_.header().callback_doorbell.fetch_add(1);
    journal::futex_wake(job_.header().callback_doorbell);
    thread_.join();
  }
  std::atomic<uint64_t> runs{0};

 private:
  void run() {
    journal::JournalHeader& header = job_.header();
    while (!stop_) {
      const uint32_t rung = header.callback_doorbell.load();
      const uint64_t taken = header.callbacks_taken.load();
      if (taken == header.callbacks_posted.load()) {
        journal::futex_wait(header.callback_doorbell, rung, std::chrono::milliseconds(100));
        continue;
      }
      const uint64_t position = header.callbacks[taken % journal::kCallbackSlots].load();
      auto* const record = job_.record(position);
      uint32_t expected = journal::kPosted;
      const bool mine = record->state.compare_exchange_strong(expected, journal::kRunningCallback);
      header.callbacks_taken.store(taken + 1);
      if (!mine) continue;
      ++runs;
      function_();
      record->state.store(journal::kAcknowledged);
      journal::futex_wake(record->state);
    }
  }
  Job& job_;
  const std::function<void()> function_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

void host_functions() {
  Job job;
  Callbacks callbacks(job, [random = std::mt19937(4)]() mutable { ::usleep(random() % 2000); });
  const uint64_t stream = job.make_stream();
  const uint64_t address = job.memory(64);
  std::mt19937 random(3);
  constexpr int kCalls = 300;
  for (int i = 0; i < kCalls; ++i) {
    job.append(Op::cuMemsetD8Async, Args_cuMemsetD8Async{address, static_cast<unsigned char>(i), 64, stream});
    job.append(Op::xmHostFunc, Args_xmHostFunc{0, 0, stream, 0, 0});
    if (i % 30 == 11) {
      ::usleep(random() % 3000);
      job.kill_server();
    }
    if (i % 50 == 49) CHECK(job.synchronize(stream) == CUDA_SUCCESS);
  }
  CHECK(job.synchronize(stream) == CUDA_SUCCESS);
  CHECK(callbacks.runs == kCalls);
  check_resumed(job);
}

// The function waits for a call that comes later in the journal: a cut in between must not wait for the function.
void host_function_needs_the_program() {
  Job job;
  std::atomic<bool> go{false};
  Callbacks callbacks(job, [&] { Job::wait([&] { return go.load(); }); });
  const uint64_t stream = job.make_stream(), other = job.make_stream();
  const uint64_t address = job.memory(64);
  for (int i = 0; i < 20; ++i) {
    go = false;
    job.append(Op::xmHostFunc, Args_xmHostFunc{0, 0, stream, 0, 0});
    ::usleep(5000);
    job.send({{"type", "cut"}});
    if (i % 5 == 2) job.kill_server();
    uint64_t word;
    CHECK(job.read(address, &word, sizeof(word), other) == CUDA_SUCCESS);
    go = true;
    CHECK(job.synchronize(stream) == CUDA_SUCCESS);
  }
  CHECK(callbacks.runs == 20);
}

// More than the journal holds, and never a wait.
void never_synchronises() {
  Job::Options options;
  options.ring_bytes = 4 << 20;
  Job job(options);
  const auto kernels = job.load_kernels();
  const uint64_t address = job.memory(kWords * 8);
  auto x = numbers(9);
  job.write(address, x.data(), kWords * 8);
  for (int i = 0; i < 60'000; ++i) {
    job.launch(kernels.kernels.at("mix"), 0, address, 1, 8);
    if (i % 20'000 == 10'000) job.kill_server();
  }
  std::vector<uint64_t> first(x.begin(), x.begin() + 8), got(8);
  for (int i = 0; i < 60'000; ++i) mix(first, 1);
  CHECK(job.read(address, got.data(), 64) == CUDA_SUCCESS);
  CHECK(got == first);
  check_resumed(job);
}

void copies_more_than_the_journal() {
  Job::Options options;
  options.ring_bytes = 4 << 20;
  Job job(options);
  std::vector<uint64_t> x((40 << 20) / 8), got(x.size());
  for (size_t i = 0; i < x.size(); ++i) x[i] = i * 0x9e3779b97f4a7c15u;
  const uint64_t address = job.memory(40 << 20);
  std::thread killer([&] {
    for (int i = 0; i < 4; ++i) {
      ::usleep(30'000);
      job.kill_server();
    }
  });
  job.write(address, x.data(), 40 << 20);
  killer.join();
  CHECK(job.read(address, got.data(), 40 << 20) == CUDA_SUCCESS);
  CHECK(got == x);
  check_resumed(job);
}

// One thread waits for something long; another one's calls go on.
void waits_are_apart() {
  Job job;
  std::atomic<bool> go{false};
  Callbacks callbacks(job, [&] { Job::wait([&] { return go.load(); }); });
  const uint64_t slow = job.make_stream(), fast = job.make_stream();
  const uint64_t b = job.memory(64);
  job.append(Op::xmHostFunc, Args_xmHostFunc{0, 0, slow, 0, 0});
  std::atomic<bool> slow_done{false};
  std::thread waiter([&] {
    CHECK(job.synchronize(slow, 1) == CUDA_SUCCESS);
    slow_done = true;
  });
  uint64_t word = 0;
  for (int i = 0; i < 100; ++i) CHECK(job.read(b, &word, sizeof(word), fast) == CUDA_SUCCESS);
  CHECK(!slow_done);
  go = true;
  waiter.join();
}

void garbage() {
  for (int i = 0; i < 6; ++i) {
    Job job;
    uint64_t word = 0;
    const uint64_t address = job.memory(64);
    CHECK(job.read(address, &word, 8) == CUDA_SUCCESS);
    // A good record, then one that is none.
    const uint64_t position = job.header().tail.load();
    auto* const head = reinterpret_cast<journal::RecordHeader*>(job.at(position));
    std::memset(static_cast<void*>(head), 0, 256);
    head->size = i == 0 ? 8 : i == 1 ? 1 << 30 : i == 2 ? 61 : 128;
    head->op = i == 3 ? 60000 : static_cast<uint16_t>(Op::cuStreamSynchronize);
    head->flags = journal::kSynchronous;
    head->sequence = i == 4 ? 77 : job.sequence() + 1;
    if (i == 5) head->payload = 1 << 20;
    job.header().tail.store(position + 128);
    job.ring_doorbell();
    Job::wait([&] { return job.counters().garbage == 1; });
    CHECK(job.header().state.load() == static_cast<uint32_t>(journal::ServerState::kLost));
    CHECK(job.synchronize() != CUDA_SUCCESS);
  }
}

// The daemon dies and comes back: the server tells it all, and is still replaced when it is lost.
void daemon_comes_back() {
  Job::Options options;
  char directory[] = "/tmp/xmig-test-XXXXXX";
  CHECK(::mkdtemp(directory));
  Job job(options);
  job.runtime_dir = directory;
  job.kill_server();  // its successor knows the directory
  const uint64_t address = job.memory(kWords * 8);
  auto x = numbers(5);
  job.write(address, x.data(), kWords * 8);
  std::vector<uint64_t> got(kWords);
  CHECK(job.read(address, got.data(), kWords * 8) == CUDA_SUCCESS);
  job.lose_daemon();
  CHECK(job.read(address, got.data(), kWords * 8) == CUDA_SUCCESS);
  const uint64_t late = job.memory(kWords * 8);  // grown while there is no daemon
  job.write(late, x.data(), kWords * 8);
  CHECK(job.synchronize() == CUDA_SUCCESS);

  const std::string path = std::string(directory) + "/control.sock";
  ipc::UniqueFd listening(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  std::strcpy(name.sun_path, path.c_str());
  CHECK(::bind(listening.get(), reinterpret_cast<sockaddr*>(&name), sizeof(name)) == 0);
  CHECK(::listen(listening.get(), 4) == 0);
  job.adopt_connection(ipc::UniqueFd(::accept4(listening.get(), nullptr, nullptr, SOCK_CLOEXEC)));
  Job::wait([&] { return job.counters().announced == 1; });
  CHECK(job.held() >= 2);
  job.kill_server();
  CHECK(job.read(late, got.data(), kWords * 8) == CUDA_SUCCESS);
  CHECK(got == x);
  check_resumed(job);
  ::unlink(path.c_str());
  ::rmdir(directory);
}

void memory_is_full() {
  Job::Options options;
  options.memory = 256 << 20;
  Job job(options);
  const uint64_t base = journal::kDeviceBase + (1ull << 32);
  CHECK(job.grow(base, 128 << 20) == CUDA_SUCCESS);
  job.alloc(base, 128 << 20);
  job.append(Op::cuMemsetD8Async, Args_cuMemsetD8Async{base, 3, 128 << 20, 0});
  CHECK(job.synchronize() == CUDA_SUCCESS);
  job.send({{"type", "cut"}});
  // The shadow takes as much as it needs and nothing more, and that counts as free: the program comes first.
  Job::wait([&] { return job.counters().cuts != 0 && job.held_bytes("shadow") != 0; });
  Reply_cuMemGetInfo_v2 memory{};
  CHECK(job.call(Op::cuMemGetInfo_v2, Args_cuMemGetInfo_v2{}, &memory, sizeof(memory)) == CUDA_SUCCESS);
  CHECK(job.held_bytes("shadow") == 128 << 20);
  CHECK(memory.free == 128 << 20);
  CHECK(job.grow(base + (1ull << 30), 96 << 20) == CUDA_SUCCESS);
  CHECK(job.grow(base + (2ull << 30), 64 << 20) == CUDA_ERROR_OUT_OF_MEMORY);
  job.append(Op::xmShrink, Args_xmShrink{base + (1ull << 30), 96 << 20});
  CHECK(job.call(Op::cuMemGetInfo_v2, Args_cuMemGetInfo_v2{}, &memory, sizeof(memory)) == CUDA_SUCCESS);
  CHECK(memory.free == 128 << 20);
  CHECK(job.grow(base + (2ull << 30), 64 << 20) == CUDA_SUCCESS);
  job.kill_server();
  std::vector<uint8_t> got(1 << 20);
  CHECK(job.read(base + (100 << 20), got.data(), got.size()) == CUDA_SUCCESS);
  for (const uint8_t byte : got) CHECK(byte == 3);
  check_resumed(job);
}

// Programs take most of a device before they use it. A cut keeps nothing of zeros, and a recovery makes them again.
void zeros() {
  Job job;
  const auto kernels = job.load_kernels();
  constexpr uint64_t kBytes = 512 << 20, kUsed = 3 * journal::kGranule;
  const uint64_t base = journal::kDeviceBase + (1ull << 32);
  CHECK(job.grow(base, kBytes) == CUDA_SUCCESS);
  job.alloc(base, kBytes);
  const auto cut = [&] {
    const uint64_t before = job.counters().cuts;
    CHECK(job.synchronize() == CUDA_SUCCESS);
    job.send({{"type", "cut"}});
    Job::wait([&] { return job.counters().cuts != before; });
    return job.counters().cut_bytes.load();
  };
  std::vector<uint64_t> got(kWords), expected(kWords);
  for (int round = 0; round < 3; ++round) {
    const uint64_t used = base + round * kUsed;
    // Zeros, something, zeros: at each, a kernel that depends on what it finds is done again after a kill.
    for (int content = 0; content < 3; ++content) {
      std::fill(expected.begin(), expected.end(), 0);
      if (content == 1) expected = numbers(7);
      // Also at first: what nobody has written is undefined, and a redo need not find it again.
      job.append(Op::cuMemsetD8Async, Args_cuMemsetD8Async{used, 0, kUsed, 0});
      if (content == 1) job.write(used, expected.data(), kWords * 8);
      const uint64_t copied = cut();
      CHECK(copied <= 2 * journal::kGranule);  // this content and what the round before left
      job.launch(kernels.kernels.at("mix"), 0, used, 5, kWords);
      CHECK(job.synchronize() == CUDA_SUCCESS);
      job.kill_server();
      CHECK(job.read(used, got.data(), kWords * 8) == CUDA_SUCCESS);
      mix(expected, 5);
      CHECK(got == expected);
      CHECK(job.read(base + kBytes - kWords * 8, got.data(), kWords * 8) == CUDA_SUCCESS);
      CHECK(got == std::vector<uint64_t>(kWords));
    }
  }
  check_resumed(job);
}

void pauses() {
  Job job;
  const uint64_t address = job.memory(kWords * 8);
  auto x = numbers(5);
  job.write(address, x.data(), kWords * 8);
  job.send({{"type", "pause"}});
  Job::wait([&] { return job.counters().paused == 1; });
  const uint64_t executed = job.header().executed.load();
  job.append(Op::cuMemsetD8Async, Args_cuMemsetD8Async{address, 0, 8, 0});
  ::usleep(50'000);
  CHECK(job.header().executed.load() == executed);
  job.send({{"type", "continue"}});
  std::vector<uint64_t> got(kWords);
  CHECK(job.read(address, got.data(), kWords * 8) == CUDA_SUCCESS);
  CHECK(job.counters().continued == 1 && got[0] == 0 && got[1] == x[1]);
}

void globals() {
  Job job;
  const auto kernels = job.load_kernels();
  const uint64_t out = job.memory(8);
  uint64_t count = 0;
  for (uint64_t i = 1; i <= 30; ++i) {
    job.launch(kernels.kernels.at("count"), 0, out);
    if (i % 7 == 0) job.kill_server();
    if (i % 10 == 0) job.send({{"type", "cut"}});
    CHECK(job.read(out, &count, sizeof(count)) == CUDA_SUCCESS);
    CHECK(count == 5 + i);
  }
  check_resumed(job);
}

// A variable that a kernel counts in, and its twin: whichever is written, the other follows, across kills and cuts.
void twins() {
  Job job;
  const auto kernels = job.load_kernels();
  const uint64_t twin = job.memory(8), out = job.memory(8);
  const std::string_view name = "launches";
  const auto payload = std::as_bytes(std::span(name));
  journal::GlobalSize size{};
  const uint64_t asked = job.append(Op::xmGlobal, Args_xmGlobal{kernels.module}, payload, sizeof(size));
  CHECK(job.finish(asked, &size, sizeof(size)) == CUDA_SUCCESS && size.bytes == 8);
  job.append(Op::xmTwin, Args_xmTwin{kernels.module, twin}, payload);
  uint64_t expected = 5, seen = 0;
  CHECK(job.read(twin, &seen, sizeof(seen)) == CUDA_SUCCESS);
  CHECK(seen == expected);
  for (int i = 1; i <= 40; ++i) {
    job.launch(kernels.kernels.at("count"), 0, out);
    ++expected;
    if (i % 7 == 0) job.kill_server();
    if (i % 10 == 0) job.send({{"type", "cut"}});
    CHECK(job.read(twin, &seen, sizeof(seen)) == CUDA_SUCCESS);
    CHECK(seen == expected);
    if (i % 3 != 0) continue;
    expected = 1000 * static_cast<uint64_t>(i);
    job.write(twin, &expected, sizeof(expected));
    if (i % 9 == 0) job.kill_server();
    job.launch(kernels.kernels.at("count"), 0, out);
    ++expected;
    CHECK(job.read(out, &seen, sizeof(seen)) == CUDA_SUCCESS);
    CHECK(seen == expected);
  }
  check_resumed(job);
}

// What a program has set in its context is set again by every server, and gone with the context.
void limits() {
  Job job;
  const auto limit = [&](CUlimit which, std::optional<uint64_t> set = {}) {
    uint64_t value = 0;
    const Args_xmLimit args{static_cast<uint32_t>(which), set.has_value(), set.value_or(0)};
    const CUresult result = job.call(Op::xmLimit, args, &value, sizeof(value));
    return result == CUDA_SUCCESS ? value : ~uint64_t{static_cast<uint32_t>(result)};
  };
  const uint64_t stack = limit(CU_LIMIT_STACK_SIZE), heap = limit(CU_LIMIT_MALLOC_HEAP_SIZE);
  CHECK(limit(CU_LIMIT_STACK_SIZE, 5000) == 5008);
  CHECK(limit(CU_LIMIT_MALLOC_HEAP_SIZE, 64 << 20) == 64 << 20);
  CHECK(limit(CU_LIMIT_STACK_SIZE, 1 << 20) == ~uint64_t{CUDA_ERROR_INVALID_VALUE});
  CHECK(limit(CU_LIMIT_PRINTF_FIFO_SIZE, 1ull << 50) == ~uint64_t{CUDA_ERROR_OUT_OF_MEMORY});
  CHECK(limit(CU_LIMIT_MAX) == ~uint64_t{CUDA_ERROR_INVALID_VALUE});
  for (const bool cut : {false, true}) {
    if (cut) {
      const uint64_t before = job.counters().cuts;
      job.send({{"type", "cut"}});
      Job::wait([&] { return job.counters().cuts > before; });
    }
    job.kill_server();
    CHECK(limit(CU_LIMIT_STACK_SIZE) == 5008);
    CHECK(limit(CU_LIMIT_MALLOC_HEAP_SIZE) == 64 << 20);
  }
  CHECK(job.call(Op::xmContextReset, Args_xmContextReset{1, 0, 0}) == CUDA_SUCCESS);
  CHECK(limit(CU_LIMIT_STACK_SIZE) == stack && limit(CU_LIMIT_MALLOC_HEAP_SIZE) == heap);
  job.kill_server();
  CHECK(limit(CU_LIMIT_STACK_SIZE) == stack && limit(CU_LIMIT_MALLOC_HEAP_SIZE) == heap);
  check_resumed(job);
}

// One event recorded on a slow stream, then on a fast one: its completion must not go backwards.
void event_on_two_streams() {
  Job job;
  const auto kernels = job.load_kernels();
  const uint64_t slow = job.make_stream(), fast = job.make_stream();
  const uint64_t address = job.memory(kWords * 8);
  const uint64_t event = job.make_event();
  for (int i = 0; i < 20; ++i) {
    job.launch(kernels.kernels.at("mix"), slow, address, 500, kWords);
    job.record_event(event, slow);
    const uint64_t sequence = job.record_event(event, fast);
    CHECK(job.synchronize(slow) == CUDA_SUCCESS);
    Job::wait([&] { return job.event_done(event, sequence); });
    ::usleep(1000);
    CHECK(job.event_done(event, sequence));
  }
}

// Processor time of all threads, in ns.
uint64_t processor_time(pid_t pid) {
  uint64_t sum = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/task")) {
    uint64_t spent = 0;
    std::ifstream(task.path() / "schedstat") >> spent;
    sum += spent;
  }
  return sum;
}

// Once what was begun is done (a cut may be due first) nothing runs, and nothing polls.
void idle_uses_no_cpu() {
  Job job;
  train(job, 20);
  uint64_t least = ~0ull;
  for (int i = 0; i < 10 && least > 500'000; ++i) {
    const uint64_t before = processor_time(job.server());
    ::usleep(500'000);
    least = std::min(least, processor_time(job.server()) - before);
  }
  CHECK(least <= 500'000);
}

const std::map<std::string, void (*)()> kTests = {
    {"undisturbed", undisturbed},
    {"kills", kills},
    {"injections", injections},
    {"lost_again_in_redo", lost_again_in_redo},
    {"program_error", program_error},
    {"error_among_others", error_among_others},
    {"queued_error", queued_error},
    {"pinned", pinned},
    {"pinned_ahead", pinned_ahead},
    {"sets_pinned", sets_pinned},
    {"pinned_much", pinned_much},
    {"kernel_reads_pinned", kernel_reads_pinned},
    {"order_by_waiting", order_by_waiting},
    {"host_functions", host_functions},
    {"host_function_needs_the_program", host_function_needs_the_program},
    {"never_synchronises", never_synchronises},
    {"copies_more_than_the_journal", copies_more_than_the_journal},
    {"waits_are_apart", waits_are_apart},
    {"garbage", garbage},
    {"daemon_comes_back", daemon_comes_back},
    {"memory_is_full", memory_is_full},
    {"zeros", zeros},
    {"pauses", pauses},
    {"globals", globals},
    {"twins", twins},
    {"limits", limits},
    {"first_launches", first_launches},
    {"failed_frees", failed_frees},
    {"tensor_maps", tensor_maps},
    {"event_on_two_streams", event_on_two_streams},
    {"idle_uses_no_cpu", idle_uses_no_cpu},
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4 || !kTests.contains(argv[3])) {
    std::fprintf(stderr, "usage: server_jobs XMIG-SERVER KERNELS TEST\n");
    return 2;
  }
  harness::setup = {argv[1], argv[2]};
  kTests.at(argv[3])();
  return 0;
}
