// Streams, events, and the order between them.
#include <sys/resource.h>

#include <algorithm>
#include <atomic>

#include "device_harness.h"

namespace {

// What was appended to a log by kernels, in order.
std::vector<uint64_t> entries(Rig& rig, CUdeviceptr log) {
  std::vector<uint64_t> out;
  for (uint64_t i = 1; i <= rig.peek<uint64_t>(log); ++i) out.push_back(rig.peek<uint64_t>(log + 8 * i));
  return out;
}

}  // namespace

TEST(stream_order) {
  Rig rig;
  rig.load();
  const CUdeviceptr log = rig.memory(1 << 20);
  const CUstream stream = rig.stream();
  CHECK_RESULT(CUDA_SUCCESS, rig.d().cuStreamQuery(stream));
  {
    Gate gate(rig, stream);
    for (uint64_t i = 0; i < 1000; ++i) rig.launch("append", {.stream = stream}, log, i);
    CHECK_RESULT(CUDA_ERROR_NOT_READY, rig.d().cuStreamQuery(stream));
    CHECK(rig.peek<uint64_t>(log) == 0);
    gate.open();
  }
  OK(rig.d().cuStreamSynchronize(stream));
  const auto got = entries(rig, log);
  CHECK(got.size() == 1000);
  for (uint64_t i = 0; i < 1000; ++i) CHECK(got[i] == i);
  OK(rig.d().cuStreamQuery(stream));
}

TEST(stream_destroyed_with_work) {
  Rig rig;
  rig.load();
  const CUdeviceptr log = rig.memory(1 << 20);
  const CUstream stream = rig.stream(CU_STREAM_DEFAULT);
  Gate gate(rig, stream);
  rig.launch("append", {.stream = stream}, log, uint64_t{5});
  OK(rig.d().cuStreamDestroy_v2(stream));
  CHECK_RESULT(CUDA_ERROR_INVALID_HANDLE, rig.d().cuStreamQuery(stream));
  CHECK_RESULT(CUDA_ERROR_INVALID_HANDLE, rig.d().cuStreamDestroy_v2(stream));
  const CUstream reused = rig.stream();
  CHECK(reused != stream);
  // Its work is still done, and the legacy stream and the context still wait for it.
  rig.launch("append", {}, log, uint64_t{6});
  CHECK_RESULT(CUDA_ERROR_NOT_READY, rig.d().cuStreamQuery(nullptr));
  gate.open();
  OK(rig.d().cuCtxSynchronize());
  CHECK((entries(rig, log) == std::vector<uint64_t>{5, 6}));
}

TEST(legacy_stream) {
  Rig rig;
  rig.load();
  const CUdeviceptr log = rig.memory(1 << 20), free_log = rig.memory(1 << 20);
  const CUstream blocking = rig.stream(CU_STREAM_DEFAULT), free = rig.stream(CU_STREAM_NON_BLOCKING);
  {
    // The legacy stream waits for blocking streams; they wait for it; others do neither.
    Gate gate(rig, blocking);
    rig.launch("append", {.stream = blocking}, log, uint64_t{1});
    rig.launch("append", {.stream = nullptr}, log, uint64_t{2});
    rig.launch("append", {.stream = CU_STREAM_PER_THREAD}, log, uint64_t{3});
    rig.launch("append", {.stream = CU_STREAM_LEGACY}, log, uint64_t{4});
    rig.launch("append", {.stream = blocking}, log, uint64_t{5});
    rig.launch("append", {.stream = free}, free_log, uint64_t{6});
    OK(rig.d().cuStreamSynchronize(free));
    CHECK(rig.peek<uint64_t>(log) == 0);
    CHECK_RESULT(CUDA_ERROR_NOT_READY, rig.d().cuStreamQuery(nullptr));
    CHECK_RESULT(CUDA_ERROR_NOT_READY, rig.d().cuStreamQuery(CU_STREAM_PER_THREAD));
    gate.open();
  }
  OK(rig.d().cuStreamSynchronize(nullptr));  // also waits for blocking streams
  CHECK((entries(rig, log) == std::vector<uint64_t>{1, 2, 3, 4, 5}));
}

TEST(legacy_stream_orders_by_waits) {
  // cuStreamWaitEvent in the legacy stream is an action there, though what it waits for is done, or was the stream's own.
  Rig rig;
  rig.load();
  const auto& d = rig.d();
  const CUstream before = rig.stream(CU_STREAM_DEFAULT), after = rig.stream(CU_STREAM_DEFAULT);
  const CUstream free = rig.stream(CU_STREAM_NON_BLOCKING);
  const CUevent done = rig.event(), own = rig.event();
  OK(d.cuEventRecordWithFlags(done, free, 0));
  OK(d.cuEventSynchronize(done));
  OK(d.cuEventRecordWithFlags(own, CU_STREAM_LEGACY, 0));
  for (const CUevent event : {done, own}) {
    for (const CUstream legacy : {CUstream{nullptr}, CU_STREAM_LEGACY}) {
      const CUdeviceptr log = rig.memory(1 << 20);
      Gate gate(rig, before);
      rig.launch("append", {.stream = before}, log, uint64_t{1});
      OK(d.cuStreamWaitEvent(legacy, event, 0));
      rig.launch("append", {.stream = after}, log, uint64_t{2});
      const CUevent ordered = rig.event();
      OK(d.cuEventRecordWithFlags(ordered, after, 0));
      OK(d.cuStreamWaitEvent(free, ordered, 0));
      rig.launch("append", {.stream = free}, log, uint64_t{3});
      CHECK_RESULT(CUDA_ERROR_NOT_READY, d.cuEventQuery(ordered));
      CHECK_RESULT(CUDA_ERROR_NOT_READY, d.cuStreamQuery(free));
      gate.open();
      OK(d.cuCtxSynchronize());
      CHECK((entries(rig, log) == std::vector<uint64_t>{1, 2, 3}));
    }
  }
}

TEST(events) {
  Rig rig;
  rig.load();
  const auto& d = rig.d();
  const CUdeviceptr log = rig.memory(1 << 20);
  const CUstream one = rig.stream(), two = rig.stream();
  const CUevent event = rig.event(), later = rig.event(CU_EVENT_BLOCKING_SYNC), timeless = rig.event(CU_EVENT_DISABLE_TIMING);
  OK(d.cuEventQuery(event));  // never recorded
  OK(d.cuStreamWaitEvent(one, event, 0));
  float ms = -1;
  CHECK_RESULT(CUDA_ERROR_INVALID_HANDLE, d.cuEventElapsedTime_v2(&ms, event, later));
  {
    Gate gate(rig, one);
    rig.launch("append", {.stream = one}, log, uint64_t{1});
    OK(d.cuEventRecordWithFlags(event, one, 0));
    OK(d.cuStreamWaitEvent(two, event, 0));
    rig.launch("append", {.stream = two}, log, uint64_t{2});
    // Recorded again, elsewhere: the wait above means the first record.
    const CUstream idle = rig.stream();
    const auto before = std::chrono::steady_clock::now();
    OK(d.cuEventRecordWithFlags(later, idle, 0));
    OK(d.cuEventQuery(later));
    CHECK_RESULT(CUDA_ERROR_NOT_READY, d.cuEventQuery(event));
    CHECK_RESULT(CUDA_ERROR_NOT_READY, d.cuEventElapsedTime_v2(&ms, later, event));
    std::thread opener([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      gate.open();
    });
    OK(d.cuEventSynchronize(event));
    opener.join();
    OK(d.cuEventElapsedTime_v2(&ms, later, event));
    const std::chrono::duration<float, std::milli> most = std::chrono::steady_clock::now() - before;
    CHECK(ms >= 9 && ms < most.count() + 1);
  }
  OK(d.cuEventRecordWithFlags(later, two, 0));
  OK(d.cuEventSynchronize(later));
  CHECK((entries(rig, log) == std::vector<uint64_t>{1, 2}));
  OK(d.cuEventRecordWithFlags(timeless, two, 0));
  CHECK_RESULT(CUDA_ERROR_INVALID_HANDLE, d.cuEventElapsedTime_v2(&ms, event, timeless));
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuEventRecordWithFlags(event, two, 8));
  CHECK_RESULT(CUDA_ERROR_ILLEGAL_STATE, d.cuEventRecordWithFlags(event, two, CU_EVENT_RECORD_EXTERNAL));
  CUevent none = nullptr;
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuEventCreate(&none, 64));
  OK(d.cuEventDestroy_v2(event));
  CHECK_RESULT(CUDA_ERROR_INVALID_HANDLE, d.cuEventQuery(event));
  CHECK_RESULT(CUDA_ERROR_INVALID_HANDLE, d.cuEventQuery(reinterpret_cast<CUevent>(one)));
}

TEST(memory_operations) {
  Rig rig;
  const auto& d = rig.d();
  const CUdeviceptr a = rig.memory(4096);
  const CUstream waiting = rig.stream(), writing = rig.stream();
  OK(d.cuStreamWriteValue32_v2(writing, a, 41, 0));
  OK(d.cuStreamSynchronize(writing));
  CHECK(rig.peek<uint32_t>(a) == 41);
  const struct {
    unsigned flags;
    uint64_t no, value, yes;
  } cases[] = {{CU_STREAM_WAIT_VALUE_GEQ, 9, 10, 11},
               {CU_STREAM_WAIT_VALUE_GEQ, ~0ull, 2, 3},  // cyclic: -1 is less than 2
               {CU_STREAM_WAIT_VALUE_EQ, 11, 10, 10},
               {CU_STREAM_WAIT_VALUE_AND, 3, 4, 6},
               {CU_STREAM_WAIT_VALUE_NOR, ~3ull, 3, 0}};
  for (const auto& c : cases) {
    rig.poke<uint64_t>(a, c.no);
    OK(d.cuStreamWaitValue64_v2(waiting, a, c.value, c.flags));
    OK(d.cuStreamWaitValue32_v2(waiting, a, static_cast<uint32_t>(c.value), c.flags));
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    CHECK_RESULT(CUDA_ERROR_NOT_READY, d.cuStreamQuery(waiting));
    OK(d.cuStreamWriteValue64_v2(writing, a, c.yes, 0));
    OK(d.cuStreamSynchronize(waiting));
  }
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuStreamWriteValue32_v2(writing, a + 2, 1, 0));
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuStreamWaitValue64_v2(writing, a + 4, 1, 0));
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuStreamWaitValue64_v2(writing, a, 1, 4));
}

TEST(host_functions) {
  Rig rig;
  const CUstream stream = rig.stream();
  static std::atomic<int> calls;
  static std::thread::id thread;
  calls = 0;
  Gate gate(rig, stream);
  for (int i = 0; i < 3; ++i)
    OK(rig.d().cuLaunchHostFunc(
        stream,
        [](void* user) {
          CHECK(user == &calls);
          thread = std::this_thread::get_id();
          ++calls;
        },
        &calls));
  CHECK(calls == 0);
  gate.open();
  OK(rig.d().cuStreamSynchronize(stream));
  CHECK(calls == 3 && thread != std::this_thread::get_id());
}

TEST(many_threads) {
  Rig rig;
  rig.load();
  const CUdeviceptr sums = rig.memory(1 << 20);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      OK(rig.d().cuCtxSetCurrent(rig.context));
      const CUstream stream = rig.stream(t % 2 ? CU_STREAM_DEFAULT : CU_STREAM_NON_BLOCKING);
      const CUevent event = rig.event();
      for (int i = 0; i < 200; ++i) {
        rig.launch("add", {.block = 32, .stream = stream}, sums + 4096 * static_cast<uint64_t>(t), uint64_t{8}, uint64_t{1});
        OK(rig.d().cuEventRecordWithFlags(event, stream, 0));
        OK(rig.d().cuStreamWaitEvent(nullptr, event, 0));
        if (i % 50 == 0) OK(rig.d().cuEventSynchronize(event));
      }
      OK(rig.d().cuStreamSynchronize(stream));
      OK(rig.d().cuStreamDestroy_v2(stream));
      OK(rig.d().cuEventDestroy_v2(event));
    });
  for (auto& thread : threads) thread.join();
  OK(rig.d().cuCtxSynchronize());
  for (int t = 0; t < 4; ++t) CHECK(rig.peek<uint64_t>(sums + 4096 * static_cast<uint64_t>(t) + 56) == 200);
}

TEST(idle_uses_no_cpu) {
  Rig rig;
  rig.load();
  const CUdeviceptr log = rig.memory(4096);
  for (int i = 0; i < 4; ++i) rig.launch("append", {.stream = rig.stream()}, log, uint64_t{1});
  OK(rig.d().cuCtxSynchronize());
  auto used = [] {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_utime.tv_sec * 1e3 + usage.ru_utime.tv_usec / 1e3 + usage.ru_stime.tv_sec * 1e3 +
           usage.ru_stime.tv_usec / 1e3;
  };
  // They may spin for a moment first, which on a busy machine is a long time.
  double least = 500;
  for (int i = 0; i < 10 && least >= 5; ++i) {
    const double before = used();
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    least = std::min(least, used() - before);
  }
  CHECK(least < 5);
}

TEST(contexts) {
  Rig rig;
  rig.load();
  const auto& d = rig.d();
  OK(d.cuCtxSetCurrent(nullptr));
  CHECK_RESULT(CUDA_ERROR_INVALID_CONTEXT, d.cuStreamSynchronize(nullptr));
  CUstream stream = nullptr;
  CHECK_RESULT(CUDA_ERROR_INVALID_CONTEXT, d.cuStreamCreateWithPriority(&stream, 0, 0));
  CHECK_RESULT(CUDA_ERROR_INVALID_CONTEXT, d.cuCtxSetCurrent(reinterpret_cast<CUcontext>(0x1234)));
  OK(d.cuCtxSetCurrent(rig.context));
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuStreamCreateWithPriority(&stream, 4, 0));
  OK(d.cuStreamCreateWithPriority(&stream, 0, -100));
  OK(d.cuDevicePrimaryCtxReset_v2(0));
  CHECK_RESULT(CUDA_ERROR_INVALID_HANDLE, d.cuStreamQuery(stream));
  CHECK_RESULT(CUDA_ERROR_INVALID_HANDLE, rig.try_launch("nothing", {}));
  OK(d.cuStreamSynchronize(nullptr));
  OK(d.cuDevicePrimaryCtxRelease_v2(0));
  CHECK_RESULT(CUDA_ERROR_INVALID_CONTEXT, d.cuDevicePrimaryCtxRelease_v2(0));
}
