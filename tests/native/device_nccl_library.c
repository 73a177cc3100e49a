// A stand-in for NCCL, as far as a communicator of one rank needs it: everything succeeds, and nothing is done.
#include <stddef.h>

typedef struct {
  char internal[128];
} ncclUniqueId;

int ncclGetVersion(int* version) {
  *version = 22809;
  return 0;
}
int ncclGetUniqueId(ncclUniqueId* id) {
  *id = (ncclUniqueId){{1}};
  return 0;
}
int ncclCommInitRank(void** comm, int ranks, ncclUniqueId id, int rank) {
  (void)ranks, (void)id, (void)rank;
  static int one;
  *comm = &one;
  return 0;
}
int ncclCommGetAsyncError(void* comm, int* error) {
  (void)comm;
  *error = 0;
  return 0;
}
const char* ncclGetErrorString(int result) {
  (void)result;
  return "";
}
const char* ncclGetLastError(void* comm) {
  (void)comm;
  return "";
}

// The arguments of these are not looked at.
#define XMIG_SUCCEEDS(name) \
  int name(void) { return 0; }
XMIG_SUCCEEDS(ncclCommDestroy)
XMIG_SUCCEEDS(ncclCommAbort)
XMIG_SUCCEEDS(ncclGroupStart)
XMIG_SUCCEEDS(ncclGroupEnd)
XMIG_SUCCEEDS(ncclAllReduce)
XMIG_SUCCEEDS(ncclBroadcast)
XMIG_SUCCEEDS(ncclReduce)
XMIG_SUCCEEDS(ncclAllGather)
XMIG_SUCCEEDS(ncclReduceScatter)
XMIG_SUCCEEDS(ncclSend)
XMIG_SUCCEEDS(ncclRecv)
XMIG_SUCCEEDS(ncclRedOpCreatePreMulSum)
XMIG_SUCCEEDS(ncclRedOpDestroy)
