// Sticky faults, and injected ones.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>

#include "device_harness.h"

namespace {

// What comes of a launch that goes wrong: the error sticks to everything until the context is reset.
void expect_fault(CUresult error, const char* text, const std::function<void(Rig&)>& cause) {
  Rig rig;
  rig.load();
  static std::atomic<int> called;
  called = 0;
  rig.device->on_fault([](void* user) { ++*static_cast<std::atomic<int>*>(user); }, &called);
  const CUevent event = rig.event();
  const CUstream bystander = rig.stream();
  const CUdeviceptr log = rig.memory(4096);
  rig.device->set_sequence(41);
  rig.launch("nothing", {});
  rig.device->set_sequence(42);
  cause(rig);
  rig.device->set_sequence(43);
  CHECK_RESULT(error, rig.d().cuCtxSynchronize());
  const device::Fault fault = rig.device->fault();
  CHECK(fault.error == error && fault.sequence == 42);
  while (called == 0) std::this_thread::yield();
  if (fault.text.find(text) == fault.text.npos) std::fprintf(stderr, "%s\n", fault.text.c_str());
  CHECK(fault.text.find(text) != fault.text.npos);

  size_t free = 0;
  CUstream stream = nullptr;
  CHECK_RESULT(error, rig.try_launch("append", {}, log, uint64_t{1}));
  CHECK_RESULT(error, rig.try_launch("append", {.stream = bystander}, log, uint64_t{1}));
  CHECK_RESULT(error, rig.d().cuMemcpyDtoDAsync_v2(log, log + 8, 8, nullptr));
  CHECK_RESULT(error, rig.d().cuMemsetD8Async(log, 0, 8, nullptr));
  CHECK_RESULT(error, rig.d().cuMemGetInfo_v2(&free, nullptr));
  CHECK_RESULT(error, rig.d().cuStreamCreateWithPriority(&stream, 0, 0));
  CHECK_RESULT(error, rig.d().cuStreamQuery(bystander));
  CHECK_RESULT(error, rig.d().cuStreamSynchronize(bystander));
  CHECK_RESULT(error, rig.d().cuEventRecordWithFlags(event, nullptr, 0));
  CHECK_RESULT(error, rig.d().cuEventQuery(event));
  CHECK_RESULT(error, rig.d().cuEventSynchronize(event));
  CHECK_RESULT(error, rig.d().cuLaunchHostFunc(nullptr, [](void*) { CHECK(false); }, nullptr));

  CHECK(called == 1);
  OK(rig.d().cuDevicePrimaryCtxReset_v2(0));
  CHECK(rig.device->fault().error == 0);
  OK(rig.d().cuCtxSynchronize());
  rig.load();
  rig.launch("append", {}, log, uint64_t{1});
  OK(rig.d().cuCtxSynchronize());
  CHECK(rig.peek<uint64_t>(log) == 1);
}

// Runs `body` in a child and returns how it ended.
int in_child(const std::function<void()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    body();
    std::_Exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  return status;
}

}  // namespace

TEST(fault_address) {
  expect_fault(CUDA_ERROR_ILLEGAL_ADDRESS, "kernel store_in_block: SIGSEGV at 0x", [](Rig& rig) {
    rig.launch("store_in_block", {.grid = 8}, uint32_t{3}, rig.hole());
  });
  expect_fault(CUDA_ERROR_ILLEGAL_ADDRESS, "block (3,0,0)", [](Rig& rig) {
    rig.launch("store_in_block", {.grid = 8}, uint32_t{3}, rig.hole());
  });
  expect_fault(CUDA_ERROR_ILLEGAL_ADDRESS, "kernel store: SIGSEGV at 0x0,", [](Rig& rig) {
    rig.launch("store", {}, uint64_t{0});
  });
}
TEST(fault_kinds) {
  expect_fault(CUDA_ERROR_LAUNCH_FAILED, "kernel divide: SIGFPE", [](Rig& rig) {
    rig.launch("divide", {}, rig.memory(4096));
  });
  expect_fault(CUDA_ERROR_ILLEGAL_INSTRUCTION, "kernel illegal: SIGILL", [](Rig& rig) {
    rig.launch("illegal", {}, uint64_t{0});
  });
  expect_fault(CUDA_ERROR_ASSERT, "assertion failed: *x < 100", [](Rig& rig) {
    const CUdeviceptr x = rig.memory(4096);
    rig.poke<uint64_t>(x, 100);
    rig.launch("assert_small", {}, x);
  });
  expect_fault(CUDA_ERROR_LAUNCH_FAILED, "kernel trap: trap", [](Rig& rig) { rig.launch("trap", {}, uint64_t{0}); });
  expect_fault(CUDA_ERROR_MISALIGNED_ADDRESS, "misaligned: x", [](Rig& rig) {
    rig.launch("aligned", {}, rig.memory(4096) + 4);
  });
  expect_fault(CUDA_ERROR_ASSERT, "kernel libc_abort: SIGABRT", [](Rig& rig) {
    rig.launch("libc_abort", {}, uint64_t{0});
  });
}
TEST(fault_stack) {
  expect_fault(CUDA_ERROR_ILLEGAL_ADDRESS, "kernel overflow: SIGSEGV", [](Rig& rig) {
    rig.launch("overflow", {}, rig.memory(4096));
  });
}
TEST(fault_copy) {
  expect_fault(CUDA_ERROR_ILLEGAL_ADDRESS, "copy of 64 bytes", [](Rig& rig) {
    OK(rig.d().cuMemcpyDtoDAsync_v2(rig.memory(4096), rig.hole(), 64, nullptr));
  });
  expect_fault(CUDA_ERROR_ILLEGAL_ADDRESS, "memset at 0x", [](Rig& rig) {
    OK(rig.d().cuMemsetD32Async(rig.hole(), 1, 64, nullptr));
  });
  expect_fault(CUDA_ERROR_ILLEGAL_ADDRESS, "wait value at 0x", [](Rig& rig) {
    OK(rig.d().cuStreamWaitValue32_v2(nullptr, rig.hole(), 1, 0));
  });
}

// Work behind the fault is dropped, in every stream; waits for it come back.
TEST(fault_drops_work) {
  Rig rig;
  rig.load();
  const CUdeviceptr log = rig.memory(4096), never = rig.memory(4096);
  const CUstream one = rig.stream(), two = rig.stream(), stuck = rig.stream();
  OK(rig.d().cuStreamWaitValue64_v2(stuck, never, 1, CU_STREAM_WAIT_VALUE_EQ));
  const CUevent event = rig.event();
  Gate gate(rig, one);
  rig.launch("store", {.stream = one}, rig.hole());
  rig.launch("append", {.stream = one}, log, uint64_t{1});
  OK(rig.d().cuEventRecordWithFlags(event, one, 0));
  OK(rig.d().cuStreamWaitEvent(two, event, 0));
  rig.launch("append", {.stream = two}, log, uint64_t{2});
  OK(rig.d().cuLaunchHostFunc(two, [](void*) { CHECK(false); }, nullptr));
  std::thread waiter([&] {
    OK(rig.d().cuCtxSetCurrent(rig.context));
    CHECK_RESULT(CUDA_ERROR_ILLEGAL_ADDRESS, rig.d().cuStreamSynchronize(stuck));
  });
  gate.open();
  CHECK_RESULT(CUDA_ERROR_ILLEGAL_ADDRESS, rig.d().cuStreamSynchronize(two));
  waiter.join();
  CHECK(rig.peek<uint64_t>(log) == 0);
}

// Outside of kernels a crash is a crash, as before.
TEST(crash_elsewhere) {
  const int status = in_child([] {
    Rig rig;
    rig.load();
    rig.launch("nothing", {});
    OK(rig.d().cuCtxSynchronize());
    raise(SIGFPE);
  });
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  CHECK(status != 0);
#else
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGFPE);
#endif
}

// --- injected ----------------------------------------------------------------------------------------------------

namespace {

struct Injected {
  std::atomic<int> count{0};
  std::atomic<uint64_t> id{0};
  static void notify(void* user, uint64_t id) {
    auto* self = static_cast<Injected*>(user);
    self->id = id;
    ++self->count;
  }
};

}  // namespace

TEST(inject_fault_in_kernel) {
  Rig rig;
  rig.load();
  Injected injected;
  const CUdeviceptr x = rig.memory(4096);
  rig.device->arm({7, device::InjectPoint::kKernel, device::InjectKind::kFault, 5, CUDA_ERROR_LAUNCH_FAILED}, Injected::notify,
                  &injected);
  rig.device->set_sequence(4);
  rig.launch("mark_blocks", {.grid = 100}, x + 2048);
  OK(rig.d().cuCtxSynchronize());
  rig.device->set_sequence(6);  // the first record at 5 or later
  rig.launch("mark_blocks", {.grid = 100}, x);
  CHECK_RESULT(CUDA_ERROR_LAUNCH_FAILED, rig.d().cuCtxSynchronize());
  CHECK(injected.count == 1 && injected.id == 7);
  CHECK(rig.peek<uint32_t>(x + 49 * 4) == 50 && rig.peek<uint32_t>(x + 50 * 4) == 0);  // half of its blocks
  CHECK(rig.peek<uint32_t>(x + 2048 + 99 * 4) == 100);
  CHECK(rig.device->fault().sequence == 6);
  OK(rig.d().cuDevicePrimaryCtxReset_v2(0));
  rig.load();
  rig.launch("mark_blocks", {.grid = 100}, x);
  OK(rig.d().cuCtxSynchronize());  // once is enough
  CHECK(injected.count == 1 && rig.peek<uint32_t>(x + 99 * 4) == 100);
}

TEST(inject_fault_in_copy) {
  Rig rig;
  Injected injected;
  const CUdeviceptr a = rig.memory(4096), b = rig.memory(4096);
  OK(rig.d().cuMemsetD8Async(a, 0xaa, 4096, nullptr));
  OK(rig.d().cuCtxSynchronize());
  rig.device->arm({8, device::InjectPoint::kCopy, device::InjectKind::kFault, 0, 0}, Injected::notify, &injected);
  OK(rig.d().cuMemcpyDtoDAsync_v2(b, a, 4096, nullptr));
  CHECK_RESULT(CUDA_ERROR_ILLEGAL_ADDRESS, rig.d().cuCtxSynchronize());
  CHECK(injected.count == 1 && rig.peek<uint8_t>(b + 2047) == 0xaa && rig.peek<uint8_t>(b + 2048) == 0);
}

TEST(inject_kill) {
  const int status = in_child([] {
    Rig rig;
    rig.load();
    const CUdeviceptr x = rig.memory(4096);
    rig.device->arm({9, device::InjectPoint::kKernel, device::InjectKind::kKill, 0, 0}, nullptr, nullptr);
    rig.launch("mark_blocks", {.grid = 2}, x);
    rig.d().cuCtxSynchronize();
  });
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

TEST(inject_hang) {
  Rig rig;
  rig.load();
  Injected injected;
  const CUdeviceptr x = rig.memory(4096);
  const CUstream stream = rig.stream(), other = rig.stream();
  rig.device->arm({10, device::InjectPoint::kKernel, device::InjectKind::kHang, 0, 0}, Injected::notify, &injected);
  rig.launch("mark_blocks", {.grid = 4, .stream = stream}, x);
  while (injected.count == 0) std::this_thread::yield();
  CHECK(rig.peek<uint32_t>(x + 4) == 2 && rig.peek<uint32_t>(x + 8) == 0);
  CHECK_RESULT(CUDA_ERROR_NOT_READY, rig.d().cuStreamQuery(stream));
  rig.launch("mark_blocks", {.grid = 4, .stream = other}, x);  // other streams go on
  OK(rig.d().cuStreamSynchronize(other));
  std::atomic<pid_t> waiting{0};
  std::thread waiter([&] {
    OK(rig.d().cuCtxSetCurrent(rig.context));
    waiting = ::gettid();
    CHECK_RESULT(CUDA_ERROR_CONTEXT_IS_DESTROYED, rig.d().cuStreamSynchronize(stream));
  });
  while (waiting == 0) std::this_thread::yield();
  wait_until_it_sleeps(waiting);
  OK(rig.d().cuDevicePrimaryCtxReset_v2(0));
  waiter.join();
}
