/* A program whose results are watched: `steps KERNELS MIB SECONDS STEP_MS`. An ordinary CUDA driver program.
 *
 * MIB of device memory are live and full. A step changes 256 KiB of it and a counter, reads the counter back, and checks
 * it; then the program rests for the remainder of STEP_MS. It prints, as JSON, when the results came that took longer
 * than twice a usual step: [begin, end] in CLOCK_MONOTONIC seconds. */
#include <stdint.h>

#include "program.h"

enum { PART = 256 << 10 };

int main(int argc, char **argv) {
  if (argc != 5) {
    fprintf(stderr, "usage: %s KERNELS MIB SECONDS STEP_MS\n", argv[0]);
    return 2;
  }
  const uint64_t mib = strtoull(argv[2], NULL, 10), part = PART / sizeof(float), parts = mib * ((1u << 20) / PART);
  const double seconds = atof(argv[3]), step_ms = atof(argv[4]);
  CUdevice device;
  CUcontext context;
  CUdeviceptr memory, counter;
  CUfunction fill, increment;
  CHECK(cuInit(0));
  CHECK(cuDeviceGet(&device, 0));
  CHECK(cuDevicePrimaryCtxRetain(&context, device));
  CHECK(cuCtxSetCurrent(context));
  const CUmodule module = load(argv[1]);
  CHECK(cuModuleGetFunction(&fill, module, "fill"));
  CHECK(cuModuleGetFunction(&increment, module, "increment"));
  CHECK(cuMemAlloc(&memory, mib << 20));
  CHECK(cuMemAlloc(&counter, 8));
  CHECK(cuMemsetD8(counter, 0, 8));
  uint64_t n = part;
  for (uint64_t i = 0; i < parts; ++i) {
    CUdeviceptr at = memory + i * PART;
    float value = (float)i;
    void *parameters[] = {&at, &value, &n};
    CHECK(cuLaunchKernel(fill, 64, 1, 1, 256, 1, 1, 0, 0, parameters, NULL));
  }
  CHECK(cuCtxSynchronize());
  puts("[");
  fflush(stdout);
  const double end = now() + seconds;
  uint64_t step = 0;
  for (double begin = now(); begin < end; begin = now()) {
    CUdeviceptr at = memory + step % parts * PART;
    float value = (float)step;
    void *filled[] = {&at, &value, &n}, *counted[] = {&counter};
    CHECK(cuLaunchKernel(fill, 64, 1, 1, 256, 1, 1, 0, 0, filled, NULL));
    CHECK(cuLaunchKernel(increment, 1, 1, 1, 1, 1, 1, 0, 0, counted, NULL));
    uint64_t result;
    CHECK(cuMemcpyDtoH(&result, counter, 8));
    if (result != ++step) {
      fprintf(stderr, "step %lu has the result %lu\n", (unsigned long)step, (unsigned long)result);
      return 1;
    }
    const double done = now();
    if (done - begin > 2e-3 * step_ms) printf("[%.9f, %.9f],\n", begin, done);
    const double rest = step_ms * 1e-3 - (done - begin);
    if (rest > 0) nanosleep(&(struct timespec){0, (long)(rest * 1e9)}, NULL);
  }
  printf("%lu]\n", (unsigned long)step);
  return 0;
}
