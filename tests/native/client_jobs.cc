// The client against a daemon and a server that belong to the test (client_harness.h): its life, its threads, its journal.
#include <dirent.h>
#include <pthread.h>

#include <functional>
#include <set>

#include "client/journal/append.h"
#include "client_jobs.h"

namespace {

using namespace harness;

std::set<std::string> open_files() {
  std::set<std::string> files;
  DIR* const folder = ::opendir("/proc/self/fd");
  while (const dirent* entry = ::readdir(folder)) files.insert(entry->d_name);
  ::closedir(folder);
  return files;
}

void handshake() {
  Fixture test;
  const auto before = open_files();
  test.start();
  CHECK(open_files() == before);  // no socket, no memfd
  CU(cuInit(0));
  CHECK(test.control.jobs == 1);
  int count = 0;
  CU(cuDeviceGetCount(&count));
  CHECK(count == 2);
  char name[64];
  CU(cuDeviceGetName(name, sizeof(name), 1));
  CHECK(std::string_view(name) == "a device of the tests, number 1");
  CUdevice device = -1;
  CU(cuDeviceGetByPCIBusId(&device, "0000:02:00.0"));
  CHECK(device == 1);
  CHECK(cuDeviceGet(&device, 2) == CUDA_ERROR_INVALID_DEVICE);
  CU(cuCtxSynchronize());
  CU(cuStreamSynchronize(nullptr));
  CHECK(cuStreamSynchronize(reinterpret_cast<CUstream>(0x1234)) == CUDA_ERROR_INVALID_HANDLE);
  CHECK(test.control.bad == 0);
}

void refusals() {
  Fixture test;
  test.control.refuse = CUDA_ERROR_OUT_OF_MEMORY;
  CHECK(cuInit(0) == CUDA_ERROR_OUT_OF_MEMORY);
  int count;
  CHECK(cuDeviceGetCount(&count) == CUDA_ERROR_NOT_INITIALIZED);
  test.control.refuse = 0;
  // Somebody else is where device memory has to be.
  auto taken = journal::Mapping::reserve(journal::kDeviceBase + (1 << 20), 4096);
  CHECK(taken);
  CHECK(cuInit(0) == CUDA_ERROR_OUT_OF_MEMORY);
  taken.reset();
  CU(cuInit(0));
}

void many_threads() {
  Fixture test;
  test.start();
  const CUfunction function = test.kernel();
  std::vector<std::thread> threads;
  for (int t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      CU(cuCtxSetCurrent(test.context));
      Arguments arguments;
      for (int i = 0; i < 20'000; ++i) {
        CU(launch(function, arguments));
        if (i % 500 == t) CU(cuStreamSynchronize(nullptr));
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CU(cuCtxSynchronize());
  CHECK(test.control.launches == 6 * 20'000 && test.control.bad == 0);
}

void thread_slots() {
  Fixture test;
  test.start();
  CU(cuCtxSynchronize());  // the main thread has a slot
  // Many more threads than slots, one after another.
  for (uint32_t i = 0; i < 2 * journal::kMaxThreads; ++i) {
    std::thread([&] {
      CU(cuCtxSetCurrent(test.context));
      CU(cuMemsetD8Async(journal::kDeviceBase, 0, 1, nullptr));
    }).join();
  }
  const auto used = [] {
    int count = 0;
    for (auto& thread : process.header->threads) count += std::atomic_ref(thread.tid).load() != 0;
    return count;
  };
  CHECK(used() == 1);
  // All at the same time: those that find none get an error, and none disturbs another.
  std::atomic<uint32_t> inside{0}, refused{0};
  std::atomic<bool> leave{false};
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < journal::kMaxThreads + 8; ++i) {
    threads.emplace_back([&] {
      CU(cuCtxSetCurrent(test.context));
      const CUresult result = cuMemsetD8Async(journal::kDeviceBase, 0, 1, nullptr);
      CHECK(result == CUDA_SUCCESS || result == CUDA_ERROR_OUT_OF_MEMORY);
      refused += result != CUDA_SUCCESS;
      ++inside;
      eventually([&] { return leave.load(); });
    });
  }
  eventually([&] { return inside == threads.size(); });
  leave = true;
  for (auto& thread : threads) thread.join();
  CHECK(refused == 9 && used() == 1);
  CU(cuCtxSynchronize());
  CHECK(test.control.bad == 0);
}

void full_ring() {
  Fixture test;
  test.start();
  test.control.trim_freely = false;  // as a server that snapshots only when it has to
  const CUfunction function = test.kernel();
  Arguments arguments;
  const uint64_t turns = 3 * process.ring_bytes / 200;
  std::thread other([&] {
    CU(cuCtxSetCurrent(test.context));
    for (uint64_t i = 0; i < turns; ++i) CU(launch(function, arguments));
  });
  for (uint64_t i = 0; i < turns; ++i) CU(launch(function, arguments));
  other.join();
  CU(cuCtxSynchronize());
  CHECK(test.control.launches == 2 * turns && test.control.bad == 0);
  // Payloads as large as they get.
  std::vector<std::byte> megabyte(journal::kMaxPayload);
  const client::Slice slice{megabyte.data(), megabyte.size()};
  const Args_xmImage args{.image = 1, .total = 64 * megabyte.size(), .offset = 0};
  for (int i = 0; i < 64; ++i) CU(client::append(Op::xmImage, &args, sizeof(args), {&slice, 1}));
  const client::Slice too_large{megabyte.data(), megabyte.size() + 1};
  CHECK(client::append(Op::xmImage, &args, sizeof(args), {&too_large, 1}) == CUDA_ERROR_INVALID_VALUE);
  CU(cuCtxSynchronize());
  CHECK(test.control.bad == 0);
}

// Several unanswered calls of one thread hold the journal up: it has to take their replies before it waits for room.
void full_ring_and_unanswered() {
  Fixture test;
  test.start();
  test.control.trim_freely = false;
  std::vector<std::byte> megabyte(journal::kMaxPayload);
  const client::Slice slice{megabyte.data(), megabyte.size()};
  const Args_xmCopyToHost args{};
  for (int turn = 0; turn < 10; ++turn) {
    client::Pending pending[journal::kStagingSlots];
    for (auto& one : pending) {
      one = client::start(Op::xmCopyToHost, &args, sizeof(args), {&slice, 1}, 4096);
      CU(one.error);
    }
    for (auto& one : pending) {
      unsigned char reply[4096] = {};
      size_t used = 0;
      CU(client::finish(one, reply, sizeof(reply), &used));
      CHECK(used == sizeof(reply) && reply[0] == 0x11 && reply[4095] == 0x11);
    }
    CHECK(client::finish(pending[0], nullptr, 0) == CUDA_ERROR_INVALID_VALUE);
  }
  CHECK(test.control.bad == 0);
}

void sticky_error() {
  Fixture test;
  test.start();
  const CUfunction function = test.kernel();
  Arguments arguments;
  test.control.fault = CUDA_ERROR_ILLEGAL_ADDRESS;
  CU(launch(function, arguments));
  eventually([&] { return process.header->context_error.load() != 0; });
  CHECK(launch(function, arguments) == CUDA_ERROR_ILLEGAL_ADDRESS);
  CHECK(cuCtxSynchronize() == CUDA_ERROR_ILLEGAL_ADDRESS);
  CHECK(cuStreamQuery(nullptr) == CUDA_ERROR_ILLEGAL_ADDRESS);
  CUdevice device;
  CU(cuCtxGetDevice(&device));  // where one is, one may still ask
  // The other device is not affected.
  CUcontext other;
  CU(cuDevicePrimaryCtxRetain(&other, 1));
  CU(cuCtxPushCurrent_v2(other));
  CU(cuCtxSynchronize());
  CU(cuCtxPopCurrent_v2(nullptr));
  CHECK(launch(function, arguments) == CUDA_ERROR_ILLEGAL_ADDRESS);
  CU(cuDevicePrimaryCtxReset_v2(0));
  CU(cuCtxSynchronize());
  CHECK(launch(function, arguments) == CUDA_ERROR_INVALID_HANDLE);  // its module is gone
  CHECK(test.control.bad == 0);
}

void host_functions() {
  Fixture test;
  test.start();
  static std::atomic<int> runs, wrong;
  static pthread_t program;
  program = ::pthread_self();
  const auto function = [](void* data) {
    sigset_t blocked;
    ::pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    wrong += ::pthread_equal(program, ::pthread_self()) || !::sigismember(&blocked, SIGTERM);
    runs += *static_cast<int*>(data);
  };
  int one = 1;
  for (int i = 0; i < 100; ++i) CU(cuLaunchHostFunc(nullptr, function, &one));
  CU(cuStreamAddCallback(
      nullptr,
      [](CUstream stream, CUresult status, void* data) {
        wrong += stream != nullptr || status != CUDA_SUCCESS;
        runs += *static_cast<int*>(data);
      },
      &one, 0));
  eventually([&] { return test.control.host_functions_done == 101; });
  CHECK(runs == 101 && wrong == 0 && test.control.bad == 0);
  CHECK(cuLaunchHostFunc(nullptr, nullptr, nullptr) == CUDA_ERROR_INVALID_VALUE);
}

void posted_twice() {
  Fixture test;
  test.start();
  test.control.post_twice = true;
  static std::atomic<int> runs;
  for (int i = 0; i < 50; ++i) CU(cuLaunchHostFunc(nullptr, [](void*) { ++runs; }, nullptr));
  eventually([&] { return process.header->callbacks_taken == 100; });
  CHECK(runs == 50);
}

void forks() {
  Fixture test;
  // Before initialisation, a child is as good as its parent.
  const auto in_child = [](const std::function<bool()>& what) {
    const pid_t child = ::fork();
    if (child == 0) std::_Exit(what() ? 0 : 1);
    int status = -1;
    ::waitpid(child, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
  };
  CHECK(in_child([&] {
    test.start();
    return cuCtxSynchronize() == CUDA_SUCCESS;
  }));
  CHECK(test.control.jobs == 1);
  test.start();
  CHECK(test.control.jobs == 2);
  CU(cuCtxSynchronize());
  const uint64_t before = test.control.records;
  CHECK(in_child([&] {
    int count;
    CUdeviceptr pointer;
    return cuInit(0) == CUDA_ERROR_NOT_INITIALIZED && cuDeviceGetCount(&count) == CUDA_ERROR_NOT_INITIALIZED &&
           cuMemAlloc_v2(&pointer, 64) == CUDA_ERROR_NOT_INITIALIZED &&
           cuStreamSynchronize(nullptr) == CUDA_ERROR_NOT_INITIALIZED &&
           cuDevicePrimaryCtxRelease_v2(0) == CUDA_ERROR_NOT_INITIALIZED;
  }));
  // One that leaves through atexit handlers which call the driver.
  const pid_t child = ::fork();
  if (child == 0) {
    std::atexit([] { cuDevicePrimaryCtxRelease_v2(0); });
    std::thread([] { cuCtxSynchronize(); }).join();
    std::exit(0);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(test.control.records == before);
  CU(cuCtxSynchronize());
  CHECK(test.control.bad == 0);
}

// The job is lost while a thread waits: it is informed.
void lost() {
  Fixture test;
  test.start();
  CU(cuCtxSynchronize());
  test.control.hold_answers = true;
  std::thread waiter([&] {
    CU(cuCtxSetCurrent(test.context));
    CHECK(cuCtxSynchronize() == CUDA_ERROR_ECC_UNCORRECTABLE);
  });
  eventually([&] {
    for (auto& thread : process.header->threads) {
      if (thread.waiting.load() != journal::kNotWaiting) return true;
    }
    return false;
  });
  process.header->context_error = CUDA_ERROR_ECC_UNCORRECTABLE;
  process.header->context_error_ordinal = 0;
  process.header->state = static_cast<uint32_t>(journal::ServerState::kLost);
  waiter.join();
  CHECK(cuCtxSynchronize() == CUDA_ERROR_ECC_UNCORRECTABLE);
  int count;
  CHECK(cuDeviceGetCount(&count) == CUDA_ERROR_ECC_UNCORRECTABLE);
}

// Server and daemon are killed while a thread waits; a new daemon does not know the job.
void everybody_gone() {
  Fixture test;
  test.start();
  test.control.hold_answers = true;
  std::thread waiter([&] {
    CU(cuCtxSetCurrent(test.context));
    CHECK(cuCtxSynchronize() == CUDA_ERROR_DEVICE_UNAVAILABLE);
  });
  test.daemon->kill();
  test.control.refuse_reattach = CUDA_ERROR_DEVICE_UNAVAILABLE;
  test.daemon.emplace(test.control, test.path);
  waiter.join();
  CHECK(test.control.reattached == 1);
  CHECK(cuStreamSynchronize(nullptr) == CUDA_ERROR_DEVICE_UNAVAILABLE);
}

const Tests kTests = {
    {"handshake", handshake}, {"refusals", refusals}, {"many_threads", many_threads}, {"thread_slots", thread_slots},
    {"full_ring", full_ring}, {"full_ring_and_unanswered", full_ring_and_unanswered}, {"sticky_error", sticky_error},
    {"host_functions", host_functions}, {"posted_twice", posted_twice}, {"forks", forks}, {"lost", lost},
    {"everybody_gone", everybody_gone},
};

}  // namespace

int main(int argc, char** argv) { return run_test(argc, argv, kTests); }
