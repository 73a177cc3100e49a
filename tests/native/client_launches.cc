// The client against a daemon and a server that belong to the test: kernels.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "client/bootstrap/process.h"
#include "client/journal/append.h"
#include "client_jobs.h"
#include "ipc/fd.h"

namespace {

using namespace harness;

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
  CUevent begun, reported, timed;
  CU(cuEventCreate(&begun, CU_EVENT_DISABLE_TIMING));
  CU(cuEventCreate(&reported, CU_EVENT_DISABLE_TIMING));
  CU(cuEventCreate(&timed, CU_EVENT_DEFAULT));
  CUlaunchAttribute both[2]{};
  both[0].id = CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT;
  both[0].value.launchCompletionEvent.event = begun;
  both[1].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT;
  both[1].value.programmaticEvent.event = reported;
  config.attrs = both;
  config.numAttrs = 2;
  CU(cuCtxSynchronize());
  CHECK(seen.cooperative == 1);
  const uint64_t records = test.control.records;
  test.control.hold_events = true;
  CU(cuLaunchKernelEx(&config, function, arguments.pointers, nullptr));
  CU(cuCtxSynchronize());
  CHECK(test.control.records == records + 4);  // launch, two records of events, synchronise
  CHECK(cuEventQuery(begun) == CUDA_ERROR_NOT_READY && cuEventQuery(reported) == CUDA_ERROR_NOT_READY);
  test.control.hold_events = false;
  CU(cuLaunchKernelEx(&config, function, arguments.pointers, nullptr));
  eventually([&] { return cuEventQuery(begun) == CUDA_SUCCESS && cuEventQuery(reported) == CUDA_SUCCESS; });
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

// Whether a cooperative launch, or a cluster, fits the device only the device can say: it is queried once for each shape,
// and says it at the call.
void first_launches() {
  Fixture test;
  test.start();
  CUmodule module = nullptr;
  CUfunction function = nullptr;
  CU(cuModuleLoadData(&module, ".version 8.0"));
  CU(cuModuleGetFunction(&function, module, ("kernel number 1" + std::string(100, '.')).c_str()));
  auto& requested = test.control.first_launches;
  const auto launch = [&](unsigned blocks) {
    return cuLaunchCooperativeKernel(function, blocks, 1, 1, 32, 1, 1, 0, nullptr, nullptr);
  };
  CU(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, nullptr, nullptr, nullptr));
  CHECK(requested == 0);
  for (int i = 0; i < 5; ++i) CU(launch(4));
  CU(cuCtxSynchronize());
  CHECK(requested == 1 && test.control.launches == 6);
  test.control.refuse_launch = CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
  CU(launch(4));
  for (int i = 0; i < 3; ++i) CHECK(launch(5) == CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
  CHECK(requested == 4);
  CU(cuCtxSynchronize());  // and nothing else is harmed
  // The same as an attribute; one that is not set asks nothing.
  CUlaunchAttribute attribute{};
  attribute.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
  CUlaunchConfig config{4, 1, 1, 32, 1, 1, 0, nullptr, &attribute, 1};
  CU(cuLaunchKernelEx(&config, function, nullptr, nullptr));
  attribute.value.cooperative = 1;
  CU(cuLaunchKernelEx(&config, function, nullptr, nullptr));
  CHECK(requested == 4);
  config.blockDimX = 64;
  CHECK(cuLaunchKernelEx(&config, function, nullptr, nullptr) == CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
  // What is set on the function may change the answer, and a number that is used again is another kernel's.
  CU(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 50));
  CHECK(launch(4) == CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
  test.control.refuse_launch = 0;
  CU(launch(4));
  const uint64_t known = requested;
  CU(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 50));  // nothing new
  CU(launch(4));
  CHECK(requested == known);
  // Into a graph it goes unasked: there the instantiation tells.
  const uint64_t before = requested;
  CUstream stream;
  CUgraph graph;
  CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CU(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
  CU(cuLaunchCooperativeKernel(function, 7, 1, 1, 32, 1, 1, 0, stream, nullptr));
  CU(cuStreamEndCapture(stream, &graph));
  CHECK(requested == before);
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
  size_t bytes = kOddBytes;
  const auto arrived = [&] {
    for (size_t i = 0; i < std::size(kOddLayout); ++i) {
      if (std::memcmp(test.control.parameters + kOddLayout[i].offset, pointers[i], kOddLayout[i].size) != 0) return false;
    }
    return test.control.launch.parameter_bytes == std::clamp<size_t>(bytes, kOddBytes, 32 << 10);
  };
  CU(cuLaunchKernel(odd, 1, 1, 1, 1, 1, 1, 0, nullptr, pointers.data(), nullptr));
  CU(cuCtxSynchronize());
  CHECK(arrived());

  std::vector<unsigned char> packed(kOddBytes);
  for (size_t i = 0; i < std::size(kOddLayout); ++i) {
    std::memcpy(packed.data() + kOddLayout[i].offset, pointers[i], kOddLayout[i].size);
  }
  std::memset(test.control.parameters, 0, sizeof(test.control.parameters));
  bytes = packed.size();
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

bool is_mapped(const void* address) {
  const ipc::UniqueFd pages(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
  uint64_t entry = 0;
  const auto at = static_cast<off_t>(reinterpret_cast<uintptr_t>(address) / 4096 * sizeof(entry));
  CHECK(::pread(pages.get(), &entry, sizeof(entry), at) == sizeof(entry));
  return entry >> 63;
}

// Pages of the journal that have not been written yet, and will be next, are there: writing a record faults none.
void journal_pages() {
  Fixture test;
  test.start();
  const CUfunction function = test.kernel();
  Arguments arguments;
  const uint64_t ring = client::process.ring_bytes;
  const std::atomic<uint64_t>& tail = client::process.header->tail;
  uint64_t ahead = 0, looks = 0;
  while (tail.load() < ring) {
    const uint64_t before = tail.load();
    for (int i = 0; i < 20; ++i) CU(launch(function, arguments));
    const uint64_t next = tail.load() + (tail.load() - before);  // as many again
    if (next >= ring) break;
    ahead += is_mapped(client::process.ring + next);
    ++looks;
  }
  // Not where a piece of pages ends, which the next launches map.
  CHECK(looks > 20 && ahead > looks / 10 * 9);
  while (tail.load() < 2 * ring) CU(launch(function, arguments));
}

const Tests kTests = {
    {"launch_record", launch_record}, {"first_launches", first_launches}, {"launch_parameters", launch_parameters},
    {"launch_errors", launch_errors}, {"launch_cost", launch_cost},
    {"journal_pages", journal_pages},
};

}  // namespace

int main(int argc, char** argv) { return run_test(argc, argv, kTests); }
