/* Ranks that sum a number again and again, each a process of its own: `ranks RANKS FILE PAUSE_MS`. An ordinary program of
 * NCCL and the CUDA driver.
 *
 * FILE has, for each rank, its process, how many steps it has done, and when it was done with each, in CLOCK_MONOTONIC
 * seconds: two integers and STEPS times. Each sum is checked. Ends when its standard input does. */
#include <fcntl.h>
#include <nccl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "program.h"

ncclResult_t ncclGetUniqueId(ncclUniqueId *id);
ncclResult_t ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank);
ncclResult_t ncclAllReduce(const void *send, void *receive, size_t count, ncclDataType_t, ncclRedOp_t, ncclComm_t, CUstream);
ncclResult_t ncclCommDestroy(ncclComm_t comm);
const char *ncclGetLastError(ncclComm_t comm);

#define NCCL(call)                                                                                      \
  do {                                                                                                  \
    const ncclResult_t result = (call);                                                                 \
    if (result != ncclSuccess) {                                                                        \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, ncclGetLastError(NULL)), exit(1);   \
    }                                                                                                   \
  } while (0)

enum { STEPS = 8190, LAST = 1 << 30, UINT32 = 3 };

struct done {
  uint64_t process;
  _Atomic uint64_t count;
  double times[STEPS];
};

static struct shared {
  ncclUniqueId id;
  _Atomic int made, over;
} *shared;

static void rest(double seconds) {
  nanosleep(&(struct timespec){(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)}, NULL);
}

static void run(int rank, int ranks, struct done *done, double pause) {
  CUcontext context;
  CUstream stream;
  CUdeviceptr memory;
  ncclComm_t comm;
  done->process = (uint64_t)getpid();
  CHECK(cuInit(0));
  CHECK(cuDevicePrimaryCtxRetain(&context, 0));
  CHECK(cuCtxSetCurrent(context));
  CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CHECK(cuMemAlloc(&memory, sizeof(uint32_t)));
  if (rank == 0) {
    NCCL(ncclGetUniqueId(&shared->id));
    shared->made = 1;
  }
  while (!shared->made) rest(1e-3);
  NCCL(ncclCommInitRank(&comm, ranks, shared->id, rank));
  for (uint32_t step = 1, sum = 0; sum < LAST; ++step) {
    // One rank alone decides, so that all do the same steps.
    CHECK(cuMemsetD32Async(memory, step % 1024 + (rank == 0 && shared->over ? LAST : 0), 1, stream));
    NCCL(ncclAllReduce((void *)memory, (void *)memory, 1, UINT32, ncclSum, comm, stream));
    CHECK(cuMemcpyDtoHAsync(&sum, memory, sizeof sum, stream));
    CHECK(cuStreamSynchronize(stream));
    if (sum % LAST != step % 1024 * (uint32_t)ranks) {
      fprintf(stderr, "rank %d, step %u: the sum is %u\n", rank, step, sum), exit(1);
    }
    done->times[done->count % STEPS] = now();
    ++done->count;
    rest(pause);
  }
  NCCL(ncclCommDestroy(comm));
}

static void *mapped(int file, size_t size) {
  void *const memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | (file < 0 ? MAP_ANONYMOUS : 0), file, 0);
  if (memory == MAP_FAILED) perror("mmap"), exit(1);
  return memory;
}

int main(int argc, char **argv) {
  if (argc != 4) {
    fprintf(stderr, "usage: %s RANKS FILE PAUSE_MS\n", argv[0]);
    return 2;
  }
  const int ranks = atoi(argv[1]), file = open(argv[2], O_RDWR | O_CREAT | O_TRUNC, 0600);
  const size_t size = (size_t)ranks * sizeof(struct done);
  if (file < 0 || ftruncate(file, (off_t)size) != 0) perror(argv[2]), exit(1);
  struct done *const done = mapped(file, size);
  shared = mapped(-1, sizeof *shared);
  for (int rank = 0; rank < ranks; ++rank) {
    if (fork() == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      run(rank, ranks, done + rank, atof(argv[3]) * 1e-3);
      exit(0);
    }
  }
  while (getchar() != EOF) {
  }
  shared->over = 1;
  int status, wrong = 0;
  while (wait(&status) > 0) wrong |= status;
  return wrong != 0;
}
