// A stand-in for NVIDIA's driver: as much of libcuda.so.1 and libnvidia-ml.so.1 as engine=driver uses, in one library
// with both names. What it knows is in the folder $STANDIN, so that a test can look at it and change it:
//   gpus       a line per GPU: identifier, total bytes, bytes that others use, compute mode, MIG, name
//   PID        state, GPU, bytes, of a process that "uses CUDA"; checkpointed: the GPU it was on, and in use nowhere
//   fail       a line per failure to come: call, CUresult, the state in which the process is afterwards or "-"
//   calls      what was called, in order
//   slow       a call that does not go on while the file is there
//   mps        pids under MPS
//   driver     NVML's version of the driver
#define _DEFAULT_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { kMax = 8, kSuccess = 0, kInvalid = 1, kOutOfMemory = 2, kIllegalState = 401, kNotFound = 500, kNotReady = 600 };
enum { kRunning, kLocked, kCheckpointed, kFailed };

typedef struct {
  unsigned char bytes[16];
} Uuid;

typedef struct {
  char uuid[64], name[64];
  unsigned long long total, others;
  int mode, mig;
} Gpu;

static FILE *file(const char *name, const char *mode) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s", getenv("STANDIN"), name);
  return fopen(path, mode);
}

static int gpus(Gpu *found) {
  FILE *f = file("gpus", "r");
  int n = 0;
  while (f && n < kMax &&
         fscanf(f, "%63s %llu %llu %d %d %63[^\n]", found[n].uuid, &found[n].total, &found[n].others, &found[n].mode,
                &found[n].mig, found[n].name) == 6)
    ++n;
  if (f) fclose(f);
  return n;
}

typedef struct {
  int pid, state;
  char gpu[64];
  unsigned long long bytes;
} Process;

static int read_process(int pid, Process *p) {
  char name[32];
  snprintf(name, sizeof name, "%d", pid);
  FILE *f = file(name, "r");
  if (!f) return 0;
  const int fields = fscanf(f, "%d %63s %llu", &p->state, p->gpu, &p->bytes);
  fclose(f);
  p->pid = pid;
  return fields == 3;
}

static void write_process(const Process *p) {
  char name[32], from[4096], to[4096];
  snprintf(name, sizeof name, "%d", p->pid);
  FILE *f = file("new", "w");
  fprintf(f, "%d %s %llu\n", p->state, p->gpu, p->bytes);
  fclose(f);
  snprintf(from, sizeof from, "%s/new", getenv("STANDIN"));
  snprintf(to, sizeof to, "%s/%s", getenv("STANDIN"), name);
  rename(from, to);
}

static void called(const char *call, const char *more) {
  FILE *f = file("calls", "a");
  fprintf(f, "%s%s%s\n", call, *more ? " " : "", more);
  fclose(f);
}

// Is this call to fail? Takes the failure off the list.
static int fails(const char *call, Process *p) {
  FILE *f = file("fail", "r");
  char kept[4096] = "", line[256];
  int error = 0;
  while (f && fgets(line, sizeof line, f)) {
    char which[32], state[32];
    int code;
    if (!error && sscanf(line, "%31s %d %31s", which, &code, state) == 3 && strcmp(which, call) == 0) {
      error = code;
      if (strcmp(state, "-") != 0 && p) p->state = atoi(state), write_process(p);
    } else {
      strncat(kept, line, sizeof kept - strlen(kept) - 1);
    }
  }
  if (f) fclose(f);
  if (error) {
    f = file("fail", "w");
    fputs(kept, f);
    fclose(f);
  }
  return error;
}

static unsigned long long used(const Gpu *gpu) {
  unsigned long long sum = gpu->others;
  FILE *list = file("pids", "r");
  int pid;
  while (list && fscanf(list, "%d", &pid) == 1) {
    Process p;
    if (read_process(pid, &p) && p.state < kCheckpointed && strcmp(p.gpu, gpu->uuid) == 0) sum += p.bytes;
  }
  if (list) fclose(list);
  return sum;
}

static void print_uuid(const Uuid *uuid, char *text) {
  const unsigned char *b = uuid->bytes;
  sprintf(text, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1], b[2], b[3], b[4],
          b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
}

// --- libcuda ---------------------------------------------------------------------------------------------------------

int cuInit(unsigned flags) {
  (void)flags;
  called("init", "");
  return fails("init", NULL);
}

int cuDriverGetVersion(int *version) {
  *version = 13000;
  return kSuccess;
}

int cuDeviceGetCount(int *count) {
  Gpu found[kMax];
  *count = gpus(found);
  return kSuccess;
}

int cuDeviceGet(int *device, int ordinal) {
  *device = ordinal;
  return kSuccess;
}

int cuDeviceGetUuid_v2(Uuid *uuid, int device) {
  Gpu found[kMax];
  if (device >= gpus(found)) return kInvalid;
  const char *text = found[device].uuid + 4;
  for (int i = 0; i < 16; ++i) {
    if (*text == '-') ++text;
    unsigned byte;
    sscanf(text, "%2x", &byte);
    uuid->bytes[i] = (unsigned char)byte;
    text += 2;
  }
  return kSuccess;
}

int cuCheckpointProcessGetState(int pid, int *state) {
  Process p;
  const int error = fails("state", NULL);
  if (error) return error;
  if (!read_process(pid, &p)) return kInvalid;
  *state = p.state;
  return kSuccess;
}

static int is_slow(const char *call) {
  char name[32] = "";
  FILE *f = file("slow", "r");
  if (!f) return 0;
  if (fscanf(f, "%31s", name) != 1) name[0] = 0;
  fclose(f);
  return strcmp(name, call) == 0;
}

static int step(const char *call, int pid, int from, int to, Process *p) {
  while (is_slow(call)) usleep(10000);
  if (!read_process(pid, p)) return kInvalid;
  const int error = fails(call, p);
  if (error) return error;
  if (p->state != from) return kIllegalState;
  p->state = to;
  return kSuccess;
}

int cuCheckpointProcessLock(int pid, const unsigned *args) {
  Process p;
  char text[32];
  snprintf(text, sizeof text, "%u", args ? *args : 0);
  called("lock", text);
  const int error = step("lock", pid, kRunning, kLocked, &p);
  if (!error) write_process(&p);
  return error;
}

int cuCheckpointProcessCheckpoint(int pid, void *args) {
  Process p;
  (void)args;
  called("checkpoint", "");
  const int error = step("checkpoint", pid, kLocked, kCheckpointed, &p);
  if (!error) write_process(&p);
  return error;
}

typedef struct {
  struct {
    Uuid old, new;
  } *pairs;
  unsigned count;
} RestoreArgs;

int cuCheckpointProcessRestore(int pid, const RestoreArgs *args) {
  Process p;
  Gpu found[kMax];
  const int count = gpus(found);
  char target[64] = "";
  if (!read_process(pid, &p)) return kInvalid;
  strcpy(target, p.gpu);
  if (args && args->count) {
    // Every GPU has to be named, and none twice.
    if ((int)args->count != count) return called("restore", "map-incomplete"), kInvalid;
    for (unsigned i = 0; i < args->count; ++i) {
      char old[64], new[64];
      print_uuid(&args->pairs[i].old, old);
      print_uuid(&args->pairs[i].new, new);
      if (strcmp(old, p.gpu) == 0) strcpy(target, new);
    }
  }
  called("restore", target);
  const int error = step("restore", pid, kCheckpointed, kLocked, &p);
  if (error) return error;
  for (int i = 0; i < count; ++i) {
    if (strcmp(found[i].uuid, target) != 0) continue;
    if (used(&found[i]) + p.bytes > found[i].total) {
      p.state = kFailed;  // as the real one: stuck for good
      write_process(&p);
      return kOutOfMemory;
    }
    strcpy(p.gpu, target);
    write_process(&p);
    return kSuccess;
  }
  return kInvalid;
}

int cuCheckpointProcessUnlock(int pid, void *args) {
  Process p;
  (void)args;
  called("unlock", "");
  const int error = step("unlock", pid, kLocked, kRunning, &p);
  if (!error) write_process(&p);
  return error;
}

static int unsupported(void) { return 801; }

// cuda.bindings asks for every function of the driver by its name, without _v2.
int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
  static const struct {
    const char *name;
    void *function;
  } known[] = {{"cuInit", cuInit}, {"cuDriverGetVersion", cuDriverGetVersion}, {"cuDeviceGetCount", cuDeviceGetCount},
               {"cuDeviceGet", cuDeviceGet}, {"cuDeviceGetUuid", cuDeviceGetUuid_v2},
               {"cuCheckpointProcessGetState", cuCheckpointProcessGetState},
               {"cuCheckpointProcessLock", cuCheckpointProcessLock},
               {"cuCheckpointProcessCheckpoint", cuCheckpointProcessCheckpoint},
               {"cuCheckpointProcessRestore", cuCheckpointProcessRestore},
               {"cuCheckpointProcessUnlock", cuCheckpointProcessUnlock}};
  (void)version, (void)flags;
  *function = unsupported;
  for (unsigned i = 0; i < sizeof known / sizeof *known; ++i)
    if (strcmp(known[i].name, name) == 0) *function = known[i].function;
  if (status) *status = 0;
  return kSuccess;
}

int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, NULL);
}

// --- libnvidia-ml ----------------------------------------------------------------------------------------------------

enum { kNvmlInvalid = 2, kNvmlNotSupported = 3, kNvmlInsufficientSize = 7 };

int nvmlInitWithFlags(unsigned flags) { return (void)flags, 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int error) { return error == kNvmlNotSupported ? "Not Supported" : "an error"; }

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
  FILE *f = file("driver", "r");
  char version[32] = "580.65.06";
  if (f) {
    if (fscanf(f, "%31s", version) != 1) version[0] = 0;
    fclose(f);
  }
  snprintf(text, size, "%s", version);
  return 0;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = 13000, 0; }

int nvmlDeviceGetCount_v2(unsigned *count) {
  Gpu found[kMax];
  *count = (unsigned)gpus(found);
  return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
  *handle = (void *)(uintptr_t)(index + 1);
  return 0;
}

static int device(void *handle, Gpu *gpu) {
  Gpu found[kMax];
  const int index = (int)(uintptr_t)handle - 1;
  if (index < 0 || index >= gpus(found)) return kNvmlInvalid;
  *gpu = found[index];
  return 0;
}

int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) {
  Gpu gpu;
  const int error = device(handle, &gpu);
  if (!error) snprintf(text, size, "%s", gpu.uuid);
  return error;
}

int nvmlDeviceGetName(void *handle, char *text, unsigned size) {
  Gpu gpu;
  const int error = device(handle, &gpu);
  if (!error) snprintf(text, size, "%s", gpu.name);
  return error;
}

int nvmlDeviceGetComputeMode(void *handle, int *mode) {
  Gpu gpu;
  const int error = device(handle, &gpu);
  if (!error) *mode = gpu.mode;
  return error;
}

int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
  Gpu gpu;
  const int error = device(handle, &gpu);
  if (error) return error;
  if (gpu.mig < 0) return kNvmlNotSupported;
  *current = *pending = (unsigned)gpu.mig;
  return 0;
}

int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *info) {
  Gpu gpu;
  const int error = device(handle, &gpu);
  if (error) return error;
  info[0] = gpu.total, info[2] = used(&gpu), info[1] = info[0] - info[2];
  return 0;
}

typedef struct {
  unsigned pid;
  unsigned long long bytes;
  unsigned gpu_instance, compute_instance;
} Info;

static int list(const char *name, void *handle, unsigned *count, Info *infos) {
  Gpu gpu;
  int error = device(handle, &gpu), pid;
  if (error) return error;
  unsigned n = 0;
  FILE *f = file(name, "r");
  while (f && fscanf(f, "%d", &pid) == 1) {
    Process p;
    if (!read_process(pid, &p) || p.state >= kCheckpointed || strcmp(p.gpu, gpu.uuid) != 0) continue;
    if (n < *count && infos) infos[n] = (Info){(unsigned)pid, p.bytes, 0, 0};
    ++n;
  }
  if (f) fclose(f);
  error = n > *count ? kNvmlInsufficientSize : 0;
  *count = n;
  return error;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, Info *infos) {
  return list("pids", handle, count, infos);
}

int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *handle, unsigned *count, Info *infos) {
  return list("mps", handle, count, infos);
}
