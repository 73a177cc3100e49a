// The client against a daemon and a server that belong to the test (client_harness.h).
#include <dirent.h>
#include <pthread.h>

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string_view>

#include "api/profiler.h"
#include "client/append.h"
#include "client/integrity.h"
#include "client/process.h"
#include "client_harness.h"

namespace {

using namespace harness;
using client::process;

struct Fixture {
  Control& control = make_control();
  std::string path = "/tmp/xmig-client-test-" + std::to_string(::getpid());
  std::optional<Daemon> daemon;

  Fixture() {
    ::setenv("XMIG_SOCKET", path.c_str(), 1);
    daemon.emplace(control, path);
  }
  ~Fixture() {
    daemon.reset();
    ::unlink(path.c_str());
  }
  CUcontext context = nullptr;
  void start() {
    CU(cuInit(0));
    CU(cuDevicePrimaryCtxRetain(&context, 0));
    CU(cuCtxSetCurrent(context));
  }
  CUfunction kernel() {
    static const char ptx[] = ".version 8.0";
    CUmodule module = nullptr;
    CUfunction function = nullptr;
    CU(cuModuleLoadData(&module, ptx));
    CU(cuModuleGetFunction(&function, module, "many"));
    return function;
  }
};

struct Arguments {
  uint64_t a = 0xa1, c = 0xc3, e = 0xe5, h = 0x88;
  uint32_t b = 0xb2, d = 0xd4, f = 0xf6;
  uint32_t g[3] = {1, 2, 3};
  void* pointers[8] = {&a, &b, &c, &d, &e, &f, &g, &h};
};

CUresult launch(CUfunction function, Arguments& arguments, CUstream stream = nullptr) {
  return cuLaunchKernel(function, 3, 2, 1, 64, 2, 1, 128, stream, arguments.pointers, nullptr);
}

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

void launch_record() {
  Fixture test;
  test.start();
  const CUfunction function = test.kernel();
  Arguments arguments;
  CU(launch(function, arguments));
  CU(cuCtxSynchronize());
  const Args_xmLaunch& seen = test.control.launch;
  CHECK(test.control.launches == 1);
  CHECK(seen.function == reinterpret_cast<uint64_t>(function) && seen.grid_x == 3 && seen.grid_y == 2 &&
        seen.block_x == 64 && seen.block_y == 2 && seen.shared_bytes == 128 && seen.parameter_bytes == kKernelBytes);
  for (uint32_t i = 0; i < kParameters; ++i) {
    CHECK(std::memcmp(test.control.parameters + kLayout[i].offset, arguments.pointers[i], kLayout[i].size) == 0);
  }
  // Packed by the program.
  unsigned char packed[kKernelBytes];
  for (size_t i = 0; i < sizeof(packed); ++i) packed[i] = static_cast<unsigned char>(i);
  size_t bytes = sizeof(packed);
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, packed, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_END};
  CU(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, extra));
  CU(cuCtxSynchronize());
  CHECK(std::memcmp(test.control.parameters, packed, sizeof(packed)) == 0);
  bytes = 10;
  CHECK(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, extra) == CUDA_ERROR_INVALID_VALUE);
  // With attributes before the parameters.
  CUlaunchAttribute attribute{};
  attribute.id = CU_LAUNCH_ATTRIBUTE_PRIORITY;
  attribute.value.priority = -3;
  CUlaunchConfig config{};
  config.gridDimX = config.gridDimY = config.gridDimZ = config.blockDimX = config.blockDimY = config.blockDimZ = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  CU(cuLaunchKernelEx_ptsz(&config, function, arguments.pointers, nullptr));
  CU(cuCtxSynchronize());
  CHECK(seen.attributes == 1 && seen.stream == reinterpret_cast<uint64_t>(CU_STREAM_PER_THREAD));
  CHECK(std::memcmp(test.control.parameters, &attribute, sizeof(attribute)) == 0);
  CHECK(std::memcmp(test.control.parameters + sizeof(attribute), &arguments.a, 8) == 0);
  CU(cuLaunchCooperativeKernel(function, 1, 1, 1, 1, 1, 1, 0, nullptr, arguments.pointers));
  // Events that the launch completes are recorded behind it.
  CUevent begun, said, timed;
  CU(cuEventCreate(&begun, CU_EVENT_DISABLE_TIMING));
  CU(cuEventCreate(&said, CU_EVENT_DISABLE_TIMING));
  CU(cuEventCreate(&timed, CU_EVENT_DEFAULT));
  CUlaunchAttribute both[2]{};
  both[0].id = CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT;
  both[0].value.launchCompletionEvent.event = begun;
  both[1].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT;
  both[1].value.programmaticEvent.event = said;
  config.attrs = both;
  config.numAttrs = 2;
  CU(cuCtxSynchronize());
  CHECK(seen.cooperative == 1);
  const uint64_t records = test.control.records;
  test.control.hold_events = true;
  CU(cuLaunchKernelEx(&config, function, arguments.pointers, nullptr));
  CU(cuCtxSynchronize());
  CHECK(test.control.records == records + 4);  // launch, two records of events, synchronise
  CHECK(cuEventQuery(begun) == CUDA_ERROR_NOT_READY && cuEventQuery(said) == CUDA_ERROR_NOT_READY);
  test.control.hold_events = false;
  CU(cuLaunchKernelEx(&config, function, arguments.pointers, nullptr));
  eventually([&] { return cuEventQuery(begun) == CUDA_SUCCESS && cuEventQuery(said) == CUDA_SUCCESS; });
  CHECK(seen.attributes == 2 && reinterpret_cast<const CUlaunchAttribute*>(test.control.parameters)->id == 0);
  both[1].value.programmaticEvent.event = timed;
  CHECK(cuLaunchKernelEx(&config, function, arguments.pointers, nullptr) == CUDA_ERROR_INVALID_VALUE);
  both[1].value.programmaticEvent.event = reinterpret_cast<CUevent>(0x77);
  CHECK(cuLaunchKernelEx(&config, function, arguments.pointers, nullptr) == CUDA_ERROR_INVALID_HANDLE);
  // What is not known is refused by the call.
  config.attrs = &attribute;
  config.numAttrs = 1;
  attribute.id = CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE;
  CHECK(cuLaunchKernelEx(&config, function, arguments.pointers, nullptr) == CUDA_ERROR_NOT_SUPPORTED);
  attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  attribute.value.clusterDim = {2, 1, 1};
  CHECK(cuLaunchKernelEx(&config, function, arguments.pointers, nullptr) == CUDA_ERROR_INVALID_CLUSTER_SIZE);
  CU(cuCtxSynchronize());
  CHECK(test.control.bad == 0);
}

// Whether a cooperative launch, or a cluster, fits the device only the device can say: it is asked once for each shape,
// and says it at the call.
void first_launches() {
  Fixture test;
  test.start();
  CUmodule module = nullptr;
  CUfunction function = nullptr;
  CU(cuModuleLoadData(&module, ".version 8.0"));
  CU(cuModuleGetFunction(&function, module, ("kernel number 1" + std::string(100, '.')).c_str()));
  auto& asked = test.control.first_launches;
  const auto launch = [&](unsigned blocks) {
    return cuLaunchCooperativeKernel(function, blocks, 1, 1, 32, 1, 1, 0, nullptr, nullptr);
  };
  CU(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, nullptr, nullptr, nullptr));
  CHECK(asked == 0);
  for (int i = 0; i < 5; ++i) CU(launch(4));
  CU(cuCtxSynchronize());
  CHECK(asked == 1 && test.control.launches == 6);
  test.control.refuse_launch = CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
  CU(launch(4));
  for (int i = 0; i < 3; ++i) CHECK(launch(5) == CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
  CHECK(asked == 4);
  CU(cuCtxSynchronize());  // and nothing else is harmed
  // The same as an attribute; one that is not set asks nothing.
  CUlaunchAttribute attribute{};
  attribute.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
  CUlaunchConfig config{4, 1, 1, 32, 1, 1, 0, nullptr, &attribute, 1};
  CU(cuLaunchKernelEx(&config, function, nullptr, nullptr));
  attribute.value.cooperative = 1;
  CU(cuLaunchKernelEx(&config, function, nullptr, nullptr));
  CHECK(asked == 4);
  config.blockDimX = 64;
  CHECK(cuLaunchKernelEx(&config, function, nullptr, nullptr) == CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
  // What is set on the function may change the answer, and a number that is used again is another kernel's.
  CU(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 50));
  CHECK(launch(4) == CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
  test.control.refuse_launch = 0;
  CU(launch(4));
  // Into a graph it goes unasked: there the instantiation tells.
  const uint64_t before = asked;
  CUstream stream;
  CUgraph graph;
  CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CU(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
  CU(cuLaunchCooperativeKernel(function, 7, 1, 1, 32, 1, 1, 0, stream, nullptr));
  CU(cuStreamEndCapture(stream, &graph));
  CHECK(asked == before);
  CHECK(test.control.bad == 0);
}

// Parameters of every size, from anywhere, as many bytes as there may be; and packed by the program, in each form.
void launch_parameters() {
  Fixture test;
  test.start();
  CUmodule module = nullptr;
  CUfunction odd = nullptr, none = nullptr;
  CU(cuModuleLoadData(&module, ".version 8.0"));
  CU(cuModuleGetFunction(&odd, module, ("kernel number 0" + std::string(100, '.')).c_str()));
  CU(cuModuleGetFunction(&none, module, ("kernel number 1" + std::string(100, '.')).c_str()));
  size_t offset = 0, size = 0;
  for (size_t i = 0; i < std::size(kOddLayout); ++i) {
    CU(cuFuncGetParamInfo(odd, i, &offset, &size));
    CHECK(offset == kOddLayout[i].offset && size == kOddLayout[i].size);
  }
  CHECK(cuFuncGetParamInfo(odd, std::size(kOddLayout), &offset, &size) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuFuncGetParamInfo(none, 0, &offset, &size) == CUDA_ERROR_INVALID_VALUE);

  // Each in memory of its own, at an odd address, and of exactly its size: the sanitizers see what is read beyond.
  std::vector<std::vector<unsigned char>> values;
  std::vector<void*> pointers;
  for (const journal::ParameterInfo& parameter : kOddLayout) {
    auto& value = values.emplace_back(parameter.size + 1);
    for (size_t i = 0; i < value.size(); ++i) value[i] = static_cast<unsigned char>(7 * values.size() + i);
    pointers.push_back(value.data() + 1);
  }
  const auto arrived = [&] {
    for (size_t i = 0; i < std::size(kOddLayout); ++i) {
      if (std::memcmp(test.control.parameters + kOddLayout[i].offset, pointers[i], kOddLayout[i].size) != 0) return false;
    }
    return test.control.launch.parameter_bytes == kOddBytes;
  };
  CU(cuLaunchKernel(odd, 1, 1, 1, 1, 1, 1, 0, nullptr, pointers.data(), nullptr));
  CU(cuCtxSynchronize());
  CHECK(arrived());

  std::vector<unsigned char> packed(kOddBytes);
  for (size_t i = 0; i < std::size(kOddLayout); ++i) {
    std::memcpy(packed.data() + kOddLayout[i].offset, pointers[i], kOddLayout[i].size);
  }
  std::memset(test.control.parameters, 0, sizeof(test.control.parameters));
  size_t bytes = packed.size();
  const auto launched = [&](std::initializer_list<void*> extra, CUfunction function, void** parameters = nullptr) {
    std::vector<void*> words(extra);
    const uint64_t before = test.control.launches;
    const CUresult result = cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, nullptr, parameters, words.data());
    CU(cuCtxSynchronize());
    CHECK(test.control.launches == before + (result == CUDA_SUCCESS));
    return result;
  };
  // The order of the words does not count, and there may be more bytes than are needed.
  CU(launched({CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_BUFFER_POINTER, packed.data(), CU_LAUNCH_PARAM_END}, odd));
  CHECK(arrived());
  packed.resize(40'000);
  bytes = packed.size();
  CU(launched({CU_LAUNCH_PARAM_BUFFER_POINTER, packed.data(), CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_END}, odd));
  CHECK(arrived());
  // Too few, none at all, both forms, a word that is none.
  bytes = kOddBytes - 1;
  const auto refused = [&](std::initializer_list<void*> extra, void** parameters = nullptr) {
    CHECK(launched(extra, odd, parameters) == CUDA_ERROR_INVALID_VALUE);
  };
  refused({CU_LAUNCH_PARAM_BUFFER_POINTER, packed.data(), CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_END});
  bytes = kOddBytes;
  refused({CU_LAUNCH_PARAM_BUFFER_POINTER, packed.data(), CU_LAUNCH_PARAM_END});
  refused({CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_END});
  refused({CU_LAUNCH_PARAM_BUFFER_POINTER, nullptr, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_END});
  refused({CU_LAUNCH_PARAM_END});
  refused({reinterpret_cast<void*>(9), packed.data(), CU_LAUNCH_PARAM_END});
  refused({CU_LAUNCH_PARAM_BUFFER_POINTER, packed.data(), CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_END},
          pointers.data());
  // A kernel without parameters takes anything.
  CU(cuLaunchKernel(none, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr));
  CU(cuCtxSynchronize());
  CU(launched({CU_LAUNCH_PARAM_END}, none));
  bytes = 0;
  CU(launched({CU_LAUNCH_PARAM_BUFFER_POINTER, nullptr, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_END}, none));
  CHECK(test.control.launch.parameter_bytes == 0 && test.control.bad == 0);
}

void launch_errors() {
  Fixture test;
  test.start();
  const CUfunction function = test.kernel();
  Arguments arguments;
  void** p = arguments.pointers;
  const auto now = [&] { return test.control.launches.load(); };
  CHECK(cuLaunchKernel(function, 0, 1, 1, 1, 1, 1, 0, nullptr, p, nullptr) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuLaunchKernel(function, 65536, 1, 1, 1, 1, 1, 0, nullptr, p, nullptr) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuLaunchKernel(function, 1, 1, 1, 0, 1, 1, 0, nullptr, p, nullptr) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuLaunchKernel(function, 1, 1, 1, 1024, 2, 1, 0, nullptr, p, nullptr) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuLaunchKernel(function, 1, 1, 1, 513, 1, 1, 0, nullptr, p, nullptr) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 4097, nullptr, p, nullptr) == CUDA_ERROR_INVALID_VALUE);
  CU(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 8192));
  CU(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 4097, nullptr, p, nullptr));
  CHECK(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 200 << 10) ==
        CUDA_ERROR_INVALID_VALUE);
  CHECK(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuLaunchKernel(nullptr, 1, 1, 1, 1, 1, 1, 0, nullptr, p, nullptr) == CUDA_ERROR_INVALID_HANDLE);
  const auto bad_stream = reinterpret_cast<CUstream>(&test);
  CHECK(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, bad_stream, p, nullptr) == CUDA_ERROR_INVALID_HANDLE);
  CUstream stream;
  CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CU(launch(function, arguments, stream));
  CU(cuStreamDestroy_v2(stream));
  CHECK(launch(function, arguments, stream) == CUDA_ERROR_INVALID_HANDLE);
  CU(cuCtxSetCurrent(nullptr));
  CHECK(launch(function, arguments) == CUDA_ERROR_INVALID_CONTEXT);
  CU(cuCtxSetCurrent(test.context));
  CU(cuCtxSynchronize());
  CHECK(now() == 2 && test.control.bad == 0);
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
  test.control.trim_freely = false;  // as a server that cuts only when it has to
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

void events() {
  Fixture test;
  test.start();
  CUevent event, fast;
  CU(cuEventCreate(&event, CU_EVENT_DEFAULT));
  CU(cuEventQuery(event));  // never recorded
  CU(cuEventSynchronize(event));
  CU(cuStreamWaitEvent(nullptr, event, 0));
  test.control.hold_events = true;
  CU(cuEventRecord(event, nullptr));
  CHECK(cuEventQuery(event) == CUDA_ERROR_NOT_READY);
  float milliseconds;
  CHECK(cuEventElapsedTime(&milliseconds, event, event) == CUDA_ERROR_NOT_READY);
  test.control.hold_events = false;
  CU(cuEventRecord(event, nullptr));
  eventually([&] { return cuEventQuery(event) == CUDA_SUCCESS; });
  CU(cuEventQuery(event));
  CU(cuEventSynchronize(event));
  CU(cuCtxSynchronize());
  CHECK(test.control.synchronise_notes == 1);  // seen once, written once
  CU(cuEventElapsedTime(&milliseconds, event, event));
  // A thread without a context may ask, as PyTorch's thread for page-locked memory does.
  CUstream stream;
  CU(cuStreamCreate(&stream, 0));
  CU(cuEventRecord(event, nullptr));
  std::thread([&] {
    CUdevice device;
    CHECK(cuCtxGetDevice(&device) == CUDA_ERROR_INVALID_CONTEXT);
    eventually([&] { return cuEventQuery(event) == CUDA_SUCCESS; });
    CU(cuEventSynchronize(event));
    CU(cuEventElapsedTime(&milliseconds, event, event));
    CU(cuStreamQuery(stream));
    CU(cuStreamSynchronize(stream));
    CU(cuStreamDestroy_v2(stream));
    CHECK(cuStreamSynchronize(nullptr) == CUDA_ERROR_INVALID_CONTEXT);
  }).join();
  CU(cuEventCreate(&fast, CU_EVENT_DISABLE_TIMING));
  CU(cuEventRecord(fast, nullptr));
  CHECK(cuEventElapsedTime(&milliseconds, event, fast) == CUDA_ERROR_INVALID_HANDLE);
  CHECK(cuEventCreate(&fast, 64) == CUDA_ERROR_INVALID_VALUE);
  CU(cuEventDestroy_v2(event));
  CHECK(cuEventRecord(event, nullptr) == CUDA_ERROR_INVALID_HANDLE);
  // As many as there can be, and again.
  std::vector<CUevent> all;
  CUevent next;
  CUresult result;
  while ((result = cuEventCreate(&next, 0)) == CUDA_SUCCESS) all.push_back(next);
  CHECK(result == CUDA_ERROR_OUT_OF_MEMORY && all.size() == journal::kMaxEvents - 2);
  for (const CUevent one : all) CU(cuEventDestroy_v2(one));
  CU(cuEventCreate(&next, 0));
  CHECK(test.control.bad == 0);
}

void contexts() {
  Fixture test;
  test.start();
  CUcontext made, current;
  CU(cuCtxCreate_v2(&made, 0, 1));
  CU(cuCtxGetCurrent(&current));
  CHECK(current == made);
  CUdevice device;
  CU(cuCtxGetDevice(&device));
  CHECK(device == 1);
  CUstream stream;
  CU(cuStreamCreate(&stream, 0));
  CU(cuCtxSetCurrent(test.context));  // replaces the top
  CU(cuCtxPopCurrent_v2(&current));
  CHECK(current == test.context);
  CU(cuCtxGetCurrent(&current));
  CHECK(current == test.context);  // from start()
  CU(cuCtxDestroy_v2(made));
  CHECK(test.control.context_resets == 1);
  CHECK(cuStreamSynchronize(stream) == CUDA_ERROR_INVALID_HANDLE);
  CHECK(cuCtxSetCurrent(made) == CUDA_ERROR_INVALID_CONTEXT);
  CHECK(cuCtxDestroy_v2(test.context) == CUDA_ERROR_INVALID_CONTEXT);
  size_t value;
  CU(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 4096));
  CU(cuCtxGetLimit(&value, CU_LIMIT_STACK_SIZE));
  CHECK(value == 4096);
  // What the device made of it; it is asked once.
  CU(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 5000));
  CHECK(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 1 << 21) == CUDA_ERROR_INVALID_VALUE);
  const uint64_t asked = test.control.limits_asked;
  for (int i = 0; i < 10; ++i) {
    CU(cuCtxGetLimit(&value, CU_LIMIT_STACK_SIZE));
    CHECK(value == 5008);
  }
  CHECK(test.control.limits_asked == asked);
  for (int i = 0; i < 10; ++i) CU(cuCtxGetLimit(&value, CU_LIMIT_MALLOC_HEAP_SIZE));
  CHECK(test.control.limits_asked == asked + 1);
  CHECK(cuCtxGetLimit(&value, CU_LIMIT_MAX) == CUDA_ERROR_UNSUPPORTED_LIMIT);
  CHECK(cuCtxSetLimit(CU_LIMIT_MAX, 1) == CUDA_ERROR_UNSUPPORTED_LIMIT);
  CHECK(cuCtxGetLimit(nullptr, CU_LIMIT_STACK_SIZE) == CUDA_ERROR_INVALID_VALUE);
  // Retained twice, released twice; a thread that still has it current is told.
  CU(cuDevicePrimaryCtxRetain(&current, 0));
  unsigned int flags;
  int active;
  CU(cuDevicePrimaryCtxRelease_v2(0));
  CU(cuDevicePrimaryCtxGetState(0, &flags, &active));
  CHECK(active == 1);
  CU(cuDevicePrimaryCtxRelease_v2(0));
  CU(cuDevicePrimaryCtxGetState(0, &flags, &active));
  CHECK(active == 0);
  CHECK(cuCtxSynchronize() == CUDA_ERROR_CONTEXT_IS_DESTROYED);
  CHECK(cuDevicePrimaryCtxRelease_v2(0) == CUDA_ERROR_INVALID_CONTEXT);
  CU(cuDevicePrimaryCtxRetain(&current, 0));
  CHECK(current == test.context);
  CU(cuCtxSynchronize());
  // Made and destroyed again and again.
  for (int i = 0; i < 500; ++i) {
    CU(cuCtxCreate_v2(&made, 0, 0));
    CU(cuCtxDestroy_v2(made));
  }
  CHECK(test.control.bad == 0);
}

void modules() {
  Fixture test;
  test.start();
  // A description that is longer than one reply.
  CUmodule module;
  CU(cuModuleLoadData(&module, ".version 8.0"));
  unsigned int count;
  CU(cuModuleGetFunctionCount(&count, module));
  CHECK(count == 2001);
  CUfunction function;
  CU(cuModuleGetFunction(&function, module, ("kernel number 1999" + std::string(100, '.')).c_str()));
  CHECK(cuModuleGetFunction(&function, module, "no such") == CUDA_ERROR_NOT_FOUND);
  CU(cuModuleUnload(module));
  CHECK(cuModuleUnload(module) == CUDA_ERROR_INVALID_HANDLE);
  // A large image travels in pieces; one in a file is only named.
  CHECK(test.control.image_files == 0);
  const uint64_t before = test.control.image_bytes;
  std::string large = ".version 8.0";
  large.resize(3 << 20, ' ');
  CU(cuModuleLoadData(&module, large.c_str()));
  CHECK(test.control.image_bytes - before == large.size() + 1);
  char path[] = "/tmp/xmig-client-test-image-XXXXXX";
  const ipc::UniqueFd file(::mkstemp(path));
  CHECK(::write(file.get(), large.c_str(), large.size() + 1) == static_cast<ssize_t>(large.size() + 1));
  void* const mapped = ::mmap(nullptr, large.size() + 1, PROT_READ, MAP_PRIVATE, file.get(), 0);
  CU(cuModuleLoadData(&module, mapped));
  CHECK(test.control.image_files == 1);
  ::unlink(path);
  CU(cuModuleLoadData(&module, mapped));  // the name is gone: the bytes travel
  CHECK(test.control.image_files == 1);
  // One library on two devices: the same kernel, another function in each.
  CUlibrary library;
  CUkernel kernel;
  CU(cuLibraryLoadData(&library, ".version 8.0", nullptr, nullptr, 0, nullptr, nullptr, 0));
  CU(cuLibraryGetKernel(&kernel, library, "many"));
  Arguments arguments;
  CU(launch(reinterpret_cast<CUfunction>(kernel), arguments));
  CU(cuCtxSynchronize());
  const uint64_t first = test.control.launch.function;
  CUcontext other;
  CU(cuDevicePrimaryCtxRetain(&other, 1));
  CU(cuCtxSetCurrent(other));
  CU(launch(reinterpret_cast<CUfunction>(kernel), arguments));
  CU(cuCtxSynchronize());
  CHECK(test.control.launch.function != first);
  CU(cuKernelGetFunction(&function, kernel));
  CHECK(reinterpret_cast<uint64_t>(function) == test.control.launch.function);
  int value;
  CU(cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 8192, kernel, 0));
  CU(cuKernelGetAttribute(&value, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel, 0));
  CHECK(value == 8192);
  CU(cuKernelGetAttribute(&value, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel, 1));
  CHECK(value == 4096);
  // After a reset it is loaded again when it is needed again, and keeps what was set.
  CU(cuDevicePrimaryCtxReset_v2(0));
  CU(cuCtxSetCurrent(test.context));
  CU(cuKernelGetAttribute(&value, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel, 0));
  CHECK(value == 8192);
  CU(launch(reinterpret_cast<CUfunction>(kernel), arguments));
  CU(cuLibraryUnload(library));
  CHECK(launch(reinterpret_cast<CUfunction>(kernel), arguments) == CUDA_ERROR_INVALID_HANDLE);
  CU(cuCtxSynchronize());
  CHECK(test.control.bad == 0);
}

void* const* table(std::initializer_list<unsigned char> uuid) {
  CUuuid id;
  std::copy(uuid.begin(), uuid.end(), reinterpret_cast<unsigned char*>(id.bytes));
  const void* found = nullptr;
  CU(cuGetExportTable(&found, &id));
  return static_cast<void* const*>(found);
}
void* const* runtime_table() {
  return table({0x6b, 0xd5, 0xfb, 0x6c, 0x5b, 0xf4, 0xe7, 0x4a, 0x89, 0x87, 0xd9, 0x39, 0x12, 0xfd, 0x9d, 0xf9});
}

// The answer is made of what the driver says elsewhere.
void integrity_slot() {
  Fixture test;
  test.start();
  void* const* const slots =
      table({0xd4, 0x08, 0x20, 0x55, 0xbd, 0xe6, 0x70, 0x4b, 0x8d, 0x34, 0xba, 0x12, 0x3c, 0x66, 0xe1, 0xf2});
  CHECK(reinterpret_cast<uint64_t>(slots[0]) == 3 * sizeof(void*));
  const auto answer = reinterpret_cast<CUresult (*)(uint32_t, uint64_t, uint64_t(*)[2])>(slots[1]);
  CHECK(answer(13000, 0, nullptr) == CUDA_ERROR_INVALID_VALUE);
  uint64_t got[2], expected[2];
  CU(answer(13000, 0, &got));
  CHECK(got[0] == 0x3341181C03CB675C && got[1] == 0x8ED383AA1F4CD1E8);
  std::vector<client::ChallengeDevice> devices(2);
  for (int i = 0; i < 2; ++i) {
    CU(cuDeviceGetUuid_v2(&devices[i].uuid, i));
    CU(cuDeviceGetAttribute(&devices[i].domain, CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, i));
    CU(cuDeviceGetAttribute(&devices[i].bus, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, i));
    CU(cuDeviceGetAttribute(&devices[i].device, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, i));
  }
  int version = 0;
  CU(cuDriverGetVersion(&version));
  const auto check = [&] {
    const client::Challenge challenge{.version = 12082,
                                      .unix_seconds = 1'800'000'000,
                                      .driver_version = static_cast<uint32_t>(version),
                                      .pid = static_cast<uint32_t>(::getpid()),
                                      .thread = static_cast<uint32_t>(::pthread_self()),
                                      .runtime_table = reinterpret_cast<uint64_t>(runtime_table()),
                                      .integrity_table = reinterpret_cast<uint64_t>(slots),
                                      .integrity_function = reinterpret_cast<uint64_t>(slots[1])};
    uint64_t here[2];
    client::answer_challenge(challenge, devices, expected);
    CU(answer(12082, 1'800'000'000, &here));
    CHECK(here[0] == expected[0] && here[1] == expected[1]);
  };
  check();
  std::thread(check).join();  // another thread, another answer
}

// Values per context, with a function that runs when the context ends.
struct Kept {
  CUcontext context = nullptr;
  CUdeviceptr memory = 0;
  int ended = 0;
};
CUresult (*storage_get)(void**, CUcontext, void*);
CUresult (*storage_put)(CUcontext, void*, void*, void (*)(CUcontext, void*, void*));

void storage() {
  Fixture test;
  test.start();
  void* const* const slots =
      table({0xc6, 0x93, 0x33, 0x6e, 0x11, 0x21, 0xdf, 0x11, 0xa8, 0xc3, 0x68, 0xf3, 0x55, 0xd8, 0x95, 0x93});
  CHECK(!slots[3]);
  storage_put = reinterpret_cast<decltype(storage_put)>(slots[0]);
  const auto forget = reinterpret_cast<CUresult (*)(CUcontext, void*)>(slots[1]);
  storage_get = reinterpret_cast<decltype(storage_get)>(slots[2]);
  static int key, other_key;
  // What runs may ask for other values, and use the context, which is there still.
  const auto end = [](CUcontext context, void* its_key, void* value) {
    auto& kept = *static_cast<Kept*>(value);
    void* found = nullptr;
    CHECK(its_key == &key && context == kept.context);
    CHECK(storage_get(&found, context, &key) == CUDA_ERROR_INVALID_HANDLE);
    if (kept.memory) CU(cuMemFree_v2(kept.memory));
    ++kept.ended;
  };
  CUcontext made, again;
  CU(cuCtxCreate_v2(&made, 0, 1));
  Kept first{test.context}, second{made};
  CU(cuMemAlloc_v2(&second.memory, 4096));
  CU(storage_put(nullptr, &key, &second, end));  // the current context
  CU(storage_put(test.context, &key, &first, end));
  CU(storage_put(test.context, &other_key, &first, nullptr));
  void* found = nullptr;
  CU(storage_get(&found, made, &key));
  CHECK(found == &second);
  CU(storage_get(&found, test.context, &key));
  CHECK(found == &first);
  CHECK(storage_get(&found, nullptr, &other_key) == CUDA_ERROR_INVALID_HANDLE);  // of another context
  CHECK(storage_get(nullptr, nullptr, &key) == CUDA_ERROR_INVALID_VALUE);
  CHECK(storage_put(reinterpret_cast<CUcontext>(&first), &key, &first, end) == CUDA_ERROR_INVALID_CONTEXT);
  CHECK(forget(reinterpret_cast<CUcontext>(&first), &key) == CUDA_ERROR_INVALID_CONTEXT);
  CHECK(storage_get(&found, reinterpret_cast<CUcontext>(&first), &key) == CUDA_ERROR_INVALID_CONTEXT);
  CU(cuCtxDestroy_v2(made));
  CHECK(second.ended == 1 && first.ended == 0);
  // Whoever gets its place has none of its values.
  CU(cuCtxCreate_v2(&again, 0, 1));
  CHECK(storage_get(&found, again, &key) == CUDA_ERROR_INVALID_HANDLE);
  CU(cuCtxDestroy_v2(again));
  CHECK(second.ended == 1);
  // The primary context: a reset ends it, and so does the last release.
  CU(cuCtxSetCurrent(test.context));
  CU(cuDevicePrimaryCtxReset_v2(0));
  CHECK(first.ended == 1 && storage_get(&found, test.context, &other_key) == CUDA_ERROR_INVALID_HANDLE);
  CU(storage_put(nullptr, &key, &first, end));
  CU(cuDevicePrimaryCtxRetain(&again, 0));
  CU(cuDevicePrimaryCtxRelease_v2(0));
  CHECK(first.ended == 1);
  CU(cuDevicePrimaryCtxRelease_v2(0));
  CHECK(first.ended == 2);
  // Taken out by its owner: nothing runs.
  CU(cuDevicePrimaryCtxRetain(&again, 0));
  CU(storage_put(nullptr, &key, &first, end));
  CU(forget(nullptr, &key));
  CHECK(forget(nullptr, &key) == CUDA_ERROR_INVALID_HANDLE);
  CU(cuDevicePrimaryCtxRelease_v2(0));
  CHECK(first.ended == 2);
  // Nobody's: a thread without a context.
  std::thread([&] { CHECK(storage_get(&found, nullptr, &key) == CUDA_ERROR_INVALID_CONTEXT); }).join();
  CHECK(test.control.bad == 0);
}

// What cuBLAS, cuBLASLt and cuFFT ask the driver's unpublished tables.
void unpublished() {
  Fixture test;
  test.start();
  void* const* const threads =
      table({0x42, 0xd8, 0x5a, 0x81, 0x23, 0xf6, 0xcb, 0x47, 0x82, 0x98, 0xf6, 0xe7, 0x8a, 0x3a, 0xec, 0xdc});
  void* const* const numbers =
      table({0x21, 0x31, 0x8c, 0x60, 0x97, 0x14, 0x32, 0x48, 0x8c, 0xa6, 0x41, 0xff, 0x73, 0x24, 0xc8, 0xf2});
  void* const* const modules =
      table({0x6e, 0x16, 0x3f, 0xbe, 0xb9, 0x58, 0x44, 0x4d, 0x83, 0x5c, 0xe1, 0x82, 0xaf, 0xf1, 0x99, 0x1e});
  CHECK(reinterpret_cast<uint64_t>(modules[0]) == 792 && reinterpret_cast<uint64_t>(numbers[0]) == 744);

  // The current context, and a number for each: the first one's is 0, and none comes again.
  const auto current = reinterpret_cast<CUresult (*)(CUcontext*)>(threads[2]);
  const auto context_number = reinterpret_cast<CUresult (*)(CUcontext, uint64_t*)>(numbers[4]);
  CUcontext now = nullptr, other = nullptr;
  CU(current(&now));
  CHECK(now == test.context);
  uint64_t first = 9, second = 9;
  CU(context_number(now, &first));
  CU(cuCtxCreate_v2(&other, 0, 1));
  CU(current(&now));
  CHECK(now == other);
  CU(context_number(nullptr, &second));
  CHECK(first == 0 && second != 0);
  CU(cuCtxDestroy_v2(other));
  CU(cuCtxSetCurrent(test.context));

  // Streams, by the driver's own name of them.
  const auto own_stream = reinterpret_cast<CUresult (*)(CUcontext, CUstream, CUstream*, int)>(numbers[51]);
  const auto stream_number = reinterpret_cast<CUresult (*)(CUcontext, CUstream, uint64_t*)>(numbers[39]);
  CUstream stream, another;
  CU(cuStreamCreate(&stream, 0));
  CU(cuStreamCreate(&another, 0));
  std::set<uint64_t> seen;
  for (const CUstream asked : {static_cast<CUstream>(nullptr), CU_STREAM_PER_THREAD, stream, another}) {
    CUstream own = nullptr;
    uint64_t number = 0;
    CU(own_stream(test.context, asked, &own, asked == CU_STREAM_PER_THREAD));
    CU(stream_number(test.context, own, &number));
    CHECK(seen.insert(number).second);
  }
  CUstream own = nullptr;
  CHECK(own_stream(test.context, reinterpret_cast<CUstream>(0x1234), &own, 0) == CUDA_ERROR_INVALID_HANDLE);

  // A module's functions, whatever they are called.
  const auto visit =
      reinterpret_cast<int (*)(CUcontext, CUmodule, void (*)(void*, CUfunction), void*)>(modules[7]);
  static const char ptx[] = ".version 8.0";
  CUmodule module = nullptr;
  CUfunction function = nullptr;
  CU(cuModuleLoadData(&module, ptx));
  CU(cuModuleGetFunction(&function, module, "many"));
  std::vector<CUfunction> all;
  const int count = visit(
      test.context, module,
      [](void* user, CUfunction one) { static_cast<std::vector<CUfunction>*>(user)->push_back(one); }, &all);
  CHECK(count == 2001 && all.size() == 2001 && all[0] == function);
  CHECK(visit(test.context, nullptr, [](void*, CUfunction) {}, nullptr) == 0);
  CU(cuProfilerStart());
  CU(cuProfilerStop());
}

// A tensor map is made where the driver is; what the program gave is in the record, and the reply is the map.
void tensor_maps() {
  Fixture test;
  test.start();
  const cuuint64_t sizes[] = {256, 128, 3}, strides[] = {512, 65536};
  const cuuint32_t box[] = {64, 32, 1}, steps[] = {1, 1, 1};
  CUtensorMap map{}, answered;
  std::memset(&answered, 0x11, sizeof(answered));
  const auto encode = [&](CUtensorMap* to, cuuint32_t rank, const cuuint64_t* lengths) {
    return cuTensorMapEncodeTiled(to, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, rank, reinterpret_cast<void*>(0x1000), lengths,
                                  strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                                  CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CU(encode(&map, 3, sizes));
  CHECK(std::memcmp(&map, &answered, sizeof(map)) == 0);
  const Args_xmTensorMap& seen = test.control.tensor_map;
  CHECK(seen.rank == 3 && seen.address == 0x1000 && seen.sizes[2] == 3 && seen.strides[1] == 65536 && seen.box[1] == 32);
  CHECK(encode(&map, 0, sizes) == CUDA_ERROR_INVALID_VALUE);
  CHECK(encode(&map, 6, sizes) == CUDA_ERROR_INVALID_VALUE);
  CHECK(encode(&map, 3, nullptr) == CUDA_ERROR_INVALID_VALUE);
  CHECK(encode(nullptr, 3, sizes) == CUDA_ERROR_INVALID_VALUE);
  CHECK(encode(reinterpret_cast<CUtensorMap*>(reinterpret_cast<char*>(&map) + 8), 2, sizes) == CUDA_ERROR_INVALID_VALUE);
  alignas(128) std::byte older[256];  // CUDA 12 aligned the type to 64 bytes
  CU(encode(reinterpret_cast<CUtensorMap*>(older + 64), 3, sizes));
  CHECK(std::memcmp(older + 64, &answered, sizeof(answered)) == 0);
  CU(cuTensorMapReplaceAddress(&map, reinterpret_cast<void*>(0x2000)));
  CHECK(seen.address == 0x2000 && std::memcmp(seen.map, &answered, sizeof(answered)) == 0);
  CHECK(test.control.bad == 0);
}

// The job is lost while a thread waits: it is told.
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

// What a launch costs the program. Printed, not judged: this is no machine for timing.
void launch_cost() {
  Fixture test;
  test.start();
  const CUfunction function = test.kernel();
  Arguments arguments;
  double best = 1e9;
  for (int turn = 0; turn < 50; ++turn) {
    CU(cuCtxSynchronize());
    const auto from = std::chrono::steady_clock::now();
    for (int i = 0; i < 5000; ++i) CU(launch(function, arguments));
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - from;
    best = std::min(best, took.count() / 5000);
  }
  std::printf("a launch with %u parameters: %.0f ns\n", kParameters, best);
  double round_trip = 1e9;
  for (int turn = 0; turn < 50; ++turn) {
    const auto from = std::chrono::steady_clock::now();
    for (int i = 0; i < 100; ++i) CU(cuStreamSynchronize(nullptr));
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - from;
    round_trip = std::min(round_trip, took.count() / 100);
  }
  std::printf("a synchronous call: %.2f us\n", round_trip);
}

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string_view, void (*)()> tests = {
      {"handshake", handshake},
      {"refusals", refusals},
      {"launch_record", launch_record},
      {"first_launches", first_launches},
      {"launch_parameters", launch_parameters},
      {"launch_errors", launch_errors},
      {"many_threads", many_threads},
      {"thread_slots", thread_slots},
      {"full_ring", full_ring},
      {"full_ring_and_unanswered", full_ring_and_unanswered},
      {"sticky_error", sticky_error},
      {"host_functions", host_functions},
      {"posted_twice", posted_twice},
      {"forks", forks},
      {"events", events},
      {"contexts", contexts},
      {"modules", modules},
      {"unpublished", unpublished},
      {"integrity_slot", integrity_slot},
      {"storage", storage},
      {"tensor_maps", tensor_maps},
      {"lost", lost},
      {"everybody_gone", everybody_gone},
      {"launch_cost", launch_cost},
  };
  CHECK(argc == 2 && tests.contains(argv[1]));  // one a process: it initialises once
  tests.at(argv[1])();
}
