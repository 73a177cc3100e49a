// Whole jobs against the real xmig-server: modules, variables, limits, events and tensor maps.
#include <array>

#include "journal/tensor_map.h"
#include "server_jobs.h"

namespace {
namespace object_jobs {

using namespace harness;

// A launch whose answer is waited for: executed once, refused at the call without harm to anything, and replayed.
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

// What gives something back has nothing left that could be harmed: that it was not there is reported in the log, and the
// program's next call is not informed of it.
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
    if (round == 1) job.kill_server();  // a replay meets them again
    CHECK(job.read(address, got.data(), kWords * 8) == CUDA_SUCCESS);
    mix(x, 2);
    CHECK(got == x);
  }
  check_resumed(job);
  CHECK(job.counters().program_errors == 0 && job.counters().faults == 0);
}

// Each form of tensor map, requested of the device's driver; after a recovery the same bytes.
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

void globals() {
  Job job;
  const auto kernels = job.load_kernels();
  const uint64_t out = job.memory(8);
  uint64_t count = 0;
  for (uint64_t i = 1; i <= 30; ++i) {
    job.launch(kernels.kernels.at("count"), 0, out);
    if (i % 7 == 0) job.kill_server();
    if (i % 10 == 0) job.send({{"type", "snapshot"}});
    CHECK(job.read(out, &count, sizeof(count)) == CUDA_SUCCESS);
    CHECK(count == 5 + i);
  }
  check_resumed(job);
}

// A variable that a kernel counts in, and its twin: whichever is written, the other follows, across kills and snapshots.
void twins() {
  Job job;
  const auto kernels = job.load_kernels();
  const uint64_t twin = job.memory(9), out = job.memory(16);
  const std::string_view name = "launches";
  const auto payload = std::as_bytes(std::span(name));
  journal::GlobalSize size{};
  const uint64_t requested = job.append(Op::xmGlobal, Args_xmGlobal{kernels.module}, payload, sizeof(size));
  CHECK(job.finish(requested, &size, sizeof(size)) == CUDA_SUCCESS && size.bytes == 8);
  job.append(Op::xmTwin, Args_xmTwin{kernels.module, twin}, payload);
  uint64_t expected = 5, seen = 0;
  CHECK(job.read(twin, &seen, sizeof(seen)) == CUDA_SUCCESS);
  CHECK(seen == expected);
  for (int i = 1; i <= 40; ++i) {
    job.launch(kernels.kernels.at("count"), 0, out);
    ++expected;
    if (i % 7 == 0) job.kill_server();
    if (i % 10 == 0) job.send({{"type", "snapshot"}});
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
    // A kernel that is given the address, for itself and beside the one that knows the variable by its name.
    expected = 7000 + static_cast<uint64_t>(i);
    job.write(out, &expected, sizeof(expected));
    job.launch(kernels.kernels.at("copy_bytes"), 0, twin, out, uint64_t{8});
    job.launch(kernels.kernels.at("count"), 0, out);
    ++expected;
    if (i % 4 == 0) job.kill_server();
    job.launch(kernels.kernels.at("copy_bytes"), 0, out + 8, twin, uint64_t{8});
    for (const uint64_t at : {out, out + 8, twin}) {
      CHECK(job.read(at, &seen, sizeof(seen)) == CUDA_SUCCESS);
      CHECK(seen == expected);
    }
  }
  check_resumed(job);
}

// From the first moment of a snapshot the device's memory is the state: what kernels have written to variables is there.
void twin_when_a_snapshot_begins() {
  Job job;
  const auto kernels = job.load_kernels();
  const uint64_t twin = job.memory(8), out = job.memory(8);
  const std::string_view name = "launches";
  const auto payload = std::as_bytes(std::span(name));
  journal::GlobalSize size{};
  const uint64_t requested = job.append(Op::xmGlobal, Args_xmGlobal{kernels.module}, payload, sizeof(size));
  CHECK(job.finish(requested, &size, sizeof(size)) == CUDA_SUCCESS);
  job.append(Op::xmTwin, Args_xmTwin{kernels.module, twin}, payload);
  uint64_t seen = 0, launches = 0;
  for (uint64_t i = 1; i <= 5; ++i) {
    job.inject("snapshot", "kill", 0);
    while (job.counters().injected != i) {  // a snapshot that comes by itself may have been before it was armed
      job.launch(kernels.kernels.at("count"), 0, out);
      ++launches;
      CHECK(job.read(out, &seen, sizeof(seen)) == CUDA_SUCCESS);  // the variable has changed, the twin not yet
      job.snapshot_unless([&] { return job.counters().injected == i; });
    }
    Job::wait([&] { return job.counters().resumed == i; });
    CHECK(job.read(twin, &seen, sizeof(seen)) == CUDA_SUCCESS);
    CHECK(seen == 5 + launches);
  }
  check_resumed(job);
}

// A server that has loaded everything before it gets the job: what the last whole snapshot had, and the kernels used till
// then. The same as above, with such servers; there it is chance which of them comes when there is a snapshot.
void preloaded() {
  setup.preload = true;
  {
    Job job;
    const auto kernels = job.load_kernels();
    const uint64_t out = job.memory(8), kernel = kernels.kernels.at("count");
    std::array<std::byte, 4096> description;  // that it is requested tells that the kernel is used
    CHECK(job.call(Op::xmKernel, Args_xmKernel{kernel}, description.data(), description.size()) == CUDA_SUCCESS);
    uint64_t count = 0;
    for (uint64_t i = 1; i <= 3; ++i) {
      const uint64_t modules = preloaded_modules, used = preloaded_kernels;
      if (i > 1) {
        job.snapshot();
        job.kill_server();
      }
      job.launch(kernel, 0, out);
      CHECK(job.read(out, &count, sizeof(count)) == CUDA_SUCCESS && count == 5 + i);
      CHECK(preloaded_modules - modules == (i > 1) && preloaded_kernels - used == (i > 1));
    }
    check_resumed(job);
  }
  globals();
  twins();
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
  for (const bool snapshot : {false, true}) {
    if (snapshot) job.snapshot();
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

const Added kAdded("", {
    {"first_launches", first_launches}, {"failed_frees", failed_frees}, {"tensor_maps", tensor_maps}, {"globals", globals},
    {"twins", twins}, {"preloaded", preloaded},
    {"twin_when_a_snapshot_begins", twin_when_a_snapshot_begins}, {"limits", limits}, {"event_on_two_streams", event_on_two_streams},
});

}  // namespace object_jobs
}  // namespace
