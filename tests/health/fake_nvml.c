// As much of NVML as xMIG asks for, of two GPUs whose health is in files: CONTROL/gpu0 and CONTROL/gpu1 hold "RESULT
// ACTION PENDING FAILED", CONTROL/events a line "GPU XID" for each event. A RESULT of -1 never comes.
#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef struct {
  int number;
} Gpu;
static Gpu gpus[2] = {{0}, {1}};

static int read_gpu(const Gpu* gpu, int values[4]) {
  char path[512];
  snprintf(path, sizeof path, "%s/gpu%d", CONTROL, gpu->number);
  FILE* file = fopen(path, "r");
  memset(values, 0, 4 * sizeof values[0]);
  if (file != NULL) {
    if (fscanf(file, "%d %d %d %d", &values[0], &values[1], &values[2], &values[3]) < 1) values[0] = 0;
    fclose(file);
  }
  while (values[0] == -1) pause();
  return values[0];
}

int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return (void)flags, 0; }
int nvmlShutdown(void) { return 0; }
const char* nvmlErrorString(int result) { return result == 15 ? "GPU is lost" : "an error"; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu** gpu) {
  if (index > 1) return 2;
  *gpu = &gpus[index];
  return 0;
}

int nvmlDeviceGetUUID(Gpu* gpu, char* uuid, unsigned length) {
  snprintf(uuid, length, "GPU-0000000%d-0000-0000-0000-000000000000", gpu->number);
  return 0;
}

int nvmlDeviceGetName(Gpu* gpu, char* name, unsigned length) {
  return (void)gpu, snprintf(name, length, "GPU of a test"), 0;
}

int nvmlDeviceGetMemoryInfo(Gpu* gpu, unsigned long long memory[3]) {
  int values[4];
  memory[0] = 1ULL << 34, memory[1] = 1ULL << 33, memory[2] = 1ULL << 33;
  return read_gpu(gpu, values);
}

int nvmlDeviceGetUtilizationRates(Gpu* gpu, void* rates) { return (void)gpu, (void)rates, 3; }

struct Pci {
  char legacy[16];
  unsigned domain, bus, device, id, subsystem;
  char bus_id[32];
};

int nvmlDeviceGetPciInfo_v3(Gpu* gpu, struct Pci* pci) {
  memset(pci, 0, sizeof *pci);
  pci->bus = 0x65 + (unsigned)gpu->number;
  return 0;
}

int nvmlDeviceGetRemappedRows(Gpu* gpu, unsigned* corrected, unsigned* uncorrected, unsigned* pending, unsigned* failed) {
  int values[4], result = read_gpu(gpu, values);
  *corrected = *uncorrected = 0, *pending = (unsigned)values[2], *failed = (unsigned)values[3];
  return result;
}

struct Value {
  unsigned field, scope;
  long long time, latency;
  unsigned type, result;
  unsigned long long value;
};

int nvmlDeviceGetFieldValues(Gpu* gpu, int count, struct Value* value) {
  int values[4], result = read_gpu(gpu, values);
  if (count == 1 && value->field == 230) value->result = 0, value->value = (unsigned)values[1];
  return result;
}

int nvmlEventSetCreate(void** set) { return *set = gpus, 0; }
int nvmlDeviceRegisterEvents(Gpu* gpu, unsigned long long types, void* set) {
  return (void)gpu, (void)types, (void)set, 0;
}

struct Event {
  Gpu* gpu;
  unsigned long long type, data;
  unsigned instance, compute;
};

int nvmlEventSetWait_v2(void* set, struct Event* event, unsigned milliseconds) {
  static int seen = 0;
  (void)set;
  for (unsigned waited = 0; waited < milliseconds; waited += 10) {
    FILE* file = fopen(CONTROL "/events", "r");
    int gpu = 0, xid = 0, number = 0;
    while (file != NULL && fscanf(file, "%d %d\n", &gpu, &xid) == 2) {
      if (number++ == seen) {
        fclose(file);
        seen++;
        *event = (struct Event){&gpus[gpu], 8, (unsigned long long)xid, 0, 0};
        return 0;
      }
    }
    if (file != NULL) fclose(file);
    usleep(10000);
  }
  return 10;
}
