// Where the microseconds of a launch go: what calls cost the thread that makes them, and what launches cost in a row.
// No framework, no runtime: the driver interface only, so that the same program measures the driver and the shim.
// `launches [MODULE]`: a file with a kernel `empty`, for a device that takes no PTX.
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { kBurst = 500, kBursts = 41, kSustained = 200000, kWaits = 200, kRests = 100 };

static const char ptx[] =
    ".version 8.0\n.target sm_80\n.address_size 64\n"
    ".visible .entry empty(.param .u64 a, .param .u64 b, .param .u64 c, .param .u64 d, .param .u32 e, .param .u32 f,"
    " .param .f32 g, .param .f32 h) { ret; }\n"
    ".visible .entry large(.param .align 8 .b8 a[3072]) { ret; }\n";

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e9 + t.tv_nsec;
}

static int compare(const void* a, const void* b) {
  double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

static void check(CUresult result, const char* what) {
  if (result != CUDA_SUCCESS) {
    fprintf(stderr, "Error: %s: CUDA error %d\n", what, result);
    exit(1);
  }
}

#define LOAD(name) __typeof__(name)* name##_ = (__typeof__(name)*)load(driver, #name)

static void* load(void* driver, const char* name) {
  void* found = dlsym(driver, name);
  if (found == NULL) {
    fprintf(stderr, "Error: libcuda.so.1 has no %s\n", name);
    exit(1);
  }
  return found;
}

// Nanoseconds that one call takes its thread: the median of bursts that the device can hold.
#define BURSTS(call)                                     \
  ({                                                     \
    double each[kBursts];                                \
    for (int i = 0; i < kBursts; i++) {                  \
      double began = now();                              \
      for (int j = 0; j < kBurst; j++) check(call, #call); \
      each[i] = (now() - began) / kBurst;                \
      check(cuStreamSynchronize_(stream), "sync");       \
    }                                                    \
    qsort(each, kBursts, sizeof *each, compare);         \
    each[kBursts / 2];                                   \
  })

int main(int argc, char** argv) {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (driver == NULL) {
    fprintf(stderr, "Error: %s\n", dlerror());
    return 1;
  }
  LOAD(cuInit);
  LOAD(cuDevicePrimaryCtxRetain);
  LOAD(cuCtxSetCurrent);
  LOAD(cuModuleLoad);
  LOAD(cuModuleLoadData);
  LOAD(cuModuleGetFunction);
  LOAD(cuStreamCreate);
  LOAD(cuStreamSynchronize);
  LOAD(cuLaunchKernel);
  LOAD(cuEventCreate);
  LOAD(cuEventRecord);
  LOAD(cuMemAlloc_v2);
  LOAD(cuMemsetD8Async);
  LOAD(cuMemcpyHtoDAsync_v2);
  CUcontext context;
  CUmodule module;
  CUfunction empty, large;
  CUstream stream;
  CUevent event;
  CUdeviceptr memory;
  check(cuInit_(0), "cuInit");
  check(cuDevicePrimaryCtxRetain_(&context, 0), "cuDevicePrimaryCtxRetain");
  check(cuCtxSetCurrent_(context), "cuCtxSetCurrent");
  check(argc > 1 ? cuModuleLoad_(&module, argv[1]) : cuModuleLoadData_(&module, ptx), "loading the module");
  check(cuModuleGetFunction_(&empty, module, "empty"), "cuModuleGetFunction");
  const int has_large = cuModuleGetFunction_(&large, module, "large") == CUDA_SUCCESS;
  check(cuStreamCreate_(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  check(cuEventCreate_(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
  check(cuMemAlloc_v2_(&memory, 1 << 20), "cuMemAlloc");

  unsigned long long numbers[8] = {0};
  static char bytes[4096];
  void* parameters[] = {numbers,     numbers + 1, numbers + 2, numbers + 3,
                        numbers + 4, numbers + 5, numbers + 6, numbers + 7};
  void* large_parameter[] = {bytes};
#define LAUNCH(kernel, parameters) cuLaunchKernel_(kernel, 1, 1, 1, 32, 1, 1, 0, stream, parameters, NULL)
  (void)BURSTS(LAUNCH(empty, parameters));  // warm
  printf("{\"launch_ns\": %.0f, ", BURSTS(LAUNCH(empty, parameters)));
  if (has_large) printf("\"launch_3072_bytes_ns\": %.0f, ", BURSTS(LAUNCH(large, large_parameter)));
  printf("\"event_ns\": %.0f, ", BURSTS(cuEventRecord_(event, stream)));
  printf("\"memset_ns\": %.0f, ", BURSTS(cuMemsetD8Async_(memory, 0, 4096, stream)));
  printf("\"copy_4096_ns\": %.0f, ", BURSTS(cuMemcpyHtoDAsync_v2_(memory, bytes, 4096, stream)));

  double began = now();
  for (int i = 0; i < kSustained; i++) check(LAUNCH(empty, parameters), "cuLaunchKernel");
  check(cuStreamSynchronize_(stream), "cuStreamSynchronize");
  printf("\"sustained_ns\": %.0f, ", (now() - began) / kSustained);

  double awake[kWaits], idle[kRests];
  for (int i = 0; i < kWaits; i++) {
    double from = now();
    check(LAUNCH(empty, parameters), "cuLaunchKernel");
    check(cuStreamSynchronize_(stream), "cuStreamSynchronize");
    awake[i] = now() - from;
  }
  qsort(awake, kWaits, sizeof *awake, compare);
  for (int i = 0; i < kRests; i++) {
    struct timespec rest = {0, 20000000};
    nanosleep(&rest, NULL);
    double from = now();
    check(LAUNCH(empty, parameters), "cuLaunchKernel");
    check(cuStreamSynchronize_(stream), "cuStreamSynchronize");
    idle[i] = now() - from;
  }
  qsort(idle, kRests, sizeof *idle, compare);
  printf("\"launch_and_wait_ns\": %.0f, \"from_idle_ns\": %.0f}\n", awake[kWaits / 2], idle[kRests / 2]);
  fflush(stdout);
  (void)getchar();  // rests for as long as its standard input is open
  return 0;
}
