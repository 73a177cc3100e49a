/* What calls cost a program: `calls KERNELS MEASURE`, a line of JSON on standard output. An ordinary CUDA driver
 * program; it runs on the shim when it is started under it.
 *
 *   queued     nanoseconds per cuLaunchKernel with 8 parameters, client side, while the journal has room: in the first
 *              lap of the journal, whose pages nobody has touched yet, and after it
 *   sustained  records per second over a long run, until all of them are executed
 *   awake      microseconds of a synchronous call right after another
 *   idle       microseconds of a synchronous call after 20 ms of rest
 *   copies     bytes per second of large copies each way, and of memcpy
 *   rest       makes a context, says "resting", and rests until its standard input ends
 */
#include <stdint.h>
#include <string.h>

#include "program.h"

enum { ROUNDS = 15 };

static int ascending(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double median(double *values, size_t n) {
  qsort(values, n, sizeof *values, ascending);
  return values[n / 2];
}

static CUfunction empty(const char *path) {
  CUfunction function;
  CHECK(cuModuleGetFunction(&function, load(path), "empty"));
  return function;
}

static uint64_t u64[4] = {1, 2, 3, 4};
static uint32_t u32[2] = {5, 6};
static float f32[2] = {7, 8};
static void *parameters[] = {&u64[0], &u64[1], &u64[2], &u64[3], &u32[0], &u32[1], &f32[0], &f32[1]};

static void launch(CUfunction function) {
  CHECK(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, 0, parameters, NULL));
}

/* Bursts that fit the journal, so that the client never waits for room. */
static double bursts(CUfunction function) {
  enum { BURST = 20000 };
  double each[ROUNDS];
  for (int round = 0; round < ROUNDS; ++round) {
    CHECK(cuCtxSynchronize());
    const double begin = now();
    for (int i = 0; i < BURST; ++i) launch(function);
    each[round] = (now() - begin) / BURST * 1e9;
  }
  CHECK(cuCtxSynchronize());
  return median(each, ROUNDS);
}

static void queued(CUfunction function) {
  const double first = bursts(function);
  for (int i = 0; i < 1000000; ++i) launch(function);
  printf("{\"first\": %.2f, \"ns\": %.2f}\n", first, bursts(function));
}

static void sustained(CUfunction function) {
  enum { RUN = 4000000 };
  double each[5];
  for (int round = 0; round < 5; ++round) {
    CHECK(cuCtxSynchronize());
    const double begin = now();
    for (int i = 0; i < RUN; ++i) launch(function);
    CHECK(cuCtxSynchronize());
    each[round] = RUN / (now() - begin);
  }
  printf("{\"per_second\": %.0f}\n", median(each, 5));
}

static void round_trips(int rest_ms, int count) {
  double *each = malloc((size_t)count * sizeof *each);
  for (int i = 0; i < 100; ++i) CHECK(cuStreamSynchronize(0));
  for (int i = 0; i < count; ++i) {
    if (rest_ms) nanosleep(&(struct timespec){0, rest_ms * 1000000l}, NULL);
    const double begin = now();
    CHECK(cuStreamSynchronize(0));
    each[i] = (now() - begin) * 1e6;
  }
  printf("{\"us\": %.3f}\n", median(each, (size_t)count));
  free(each);
}

static void copies(void) {
  const size_t size = 64u << 20;
  char *host = malloc(size), *other = malloc(size);
  memset(host, 1, size);
  memset(other, 2, size);
  CUdeviceptr device;
  CHECK(cuMemAlloc(&device, size));
  double in[ROUNDS], out[ROUNDS], plain[ROUNDS];
  for (int round = -1; round < ROUNDS; ++round) {
    const double begin = now();
    CHECK(cuMemcpyHtoD(device, host, size));
    CHECK(cuCtxSynchronize());
    const double middle = now();
    CHECK(cuMemcpyDtoH(other, device, size));
    const double end = now();
    memcpy(host, other, size);
    const double last = now();
    if (round < 0) continue; /* the first touches every page for the first time */
    in[round] = (double)size / (middle - begin);
    out[round] = (double)size / (end - middle);
    plain[round] = (double)size / (last - end);
  }
  printf("{\"to_device\": %.0f, \"to_host\": %.0f, \"memcpy\": %.0f}\n", median(in, ROUNDS), median(out, ROUNDS),
         median(plain, ROUNDS));
}

int main(int argc, char **argv) {
  if (argc != 3) {
    fprintf(stderr, "usage: %s KERNELS queued|sustained|awake|idle|copies|rest\n", argv[0]);
    return 2;
  }
  CUdevice device;
  CUcontext context;
  CHECK(cuInit(0));
  CHECK(cuDeviceGet(&device, 0));
  CHECK(cuDevicePrimaryCtxRetain(&context, device));
  CHECK(cuCtxSetCurrent(context));
  const char *measure = argv[2];
  if (!strcmp(measure, "queued")) queued(empty(argv[1]));
  else if (!strcmp(measure, "sustained")) sustained(empty(argv[1]));
  else if (!strcmp(measure, "awake")) round_trips(0, 20000);
  else if (!strcmp(measure, "idle")) round_trips(20, 200);
  else if (!strcmp(measure, "copies")) copies();
  else if (!strcmp(measure, "rest")) {
    CHECK(cuCtxSynchronize());
    puts("resting");
    fflush(stdout);
    while (getchar() != EOF) {}
  } else return 2;
  return 0;
}
