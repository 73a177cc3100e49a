#include "client/collectives/communicators.h"

#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string_view>
#include <utility>

#include "client/bootstrap/message.h"
#include "client/bootstrap/process.h"
#include "client/bootstrap/requested.h"
#include "client/collectives/genuine.h"
#include "client/collectives/group.h"
#include "client/journal/append.h"
#include "local.h"
#include "nccl_calls.h"
#include "nccl_client.h"

namespace xmig::client {
namespace {

using journal::Kind;

// What a unique id holds: enough to find the group, and nothing that anybody could listen at.
struct LogicalId {
  char magic[8];
  uint8_t group[journal::kGroupIdBytes];
};
constexpr char kIdMagic[] = "xMIGgrp";
static_assert(sizeof(kIdMagic) == sizeof(LogicalId::magic) && sizeof(LogicalId) <= NCCL_UNIQUE_ID_BYTES);

constexpr size_t kLongestSettings = 16 << 10;

std::mutex& text_mutex = *new std::mutex;
char last_text[512] = "";  // guarded by text_mutex

uint32_t milliseconds(const char* set, double otherwise) {
  char* end = nullptr;
  const double seconds = set && *set ? std::strtod(set, &end) : otherwise;
  const bool sound = seconds > 0 && seconds <= 1e6 && (!end || *end == 0);
  return static_cast<uint32_t>((sound ? seconds : otherwise) * 1000);
}

// The program's library, and what its user has set for it.
std::string library_and_settings() {
  std::string text = genuine_nccl();
  text.push_back(0);
  for (char** one = environ; one && *one; ++one) {
    const std::string_view setting(*one);
    if (!setting.starts_with("NCCL_") || text.size() + setting.size() >= kLongestSettings) continue;
    text.append(setting);
    text.push_back(0);
  }
  return text;
}

// A shorter structure is an older caller's: nothing behind its end is read.
ncclResult_t check(const ncclConfig_t* config) {
  if (!config) return ncclSuccess;
  if (config->size < offsetof(ncclConfig_t, version) || config->magic != NCCL_CONFIG_MAGIC) {
    return failed(ncclInvalidArgument, "the configuration is not initialised");
  }
  return ncclSuccess;  // blocking or not: a call that has done all when it returns is allowed either way
}

// The context that NCCL would use: the current one, or the first device's.
Context* context_for_new() {
  if (client::cuInit(0) != CUDA_SUCCESS) return nullptr;
  if (const Current now = current(this_thread()); now.context) return now.context;
  CUcontext primary = nullptr;
  if (client::cuDevicePrimaryCtxRetain(&primary, 0) != CUDA_SUCCESS || client::cuCtxSetCurrent(primary) != CUDA_SUCCESS) return nullptr;
  return current(this_thread()).context;
}

ncclResult_t join(ncclComm_t* out, int ranks, const ncclUniqueId& id, int rank, const ncclConfig_t* config, Context* context) {
  if (!out) return failed(ncclInvalidArgument, "no place for the communicator");
  *out = nullptr;
  if (const ncclResult_t result = check(config); result != ncclSuccess) return result;
  if (ranks < 1 || rank < 0 || rank >= ranks) return failed(ncclInvalidArgument, "rank %d of %d", rank, ranks);
  if (ranks > static_cast<int>(journal::kMaxRanks)) {
    return failed(ncclInvalidUsage, "a communicator has at most %u ranks, not %d", journal::kMaxRanks, ranks);
  }
  LogicalId logical;
  std::memcpy(&logical, id.internal, sizeof(logical));
  if (std::memcmp(logical.magic, kIdMagic, sizeof(kIdMagic)) != 0) {
    return failed(ncclInvalidArgument,
                  "the unique id was not made under xMIG: start all ranks of the job with `xmigctl run`");
  }
  if (!context) return failed(ncclUnhandledCudaError, "no device for the communicator");
  Making making;
  making.op = Op::xmCommInit;
  making.context = context;
  making.out = out;
  making.handle = create_handle(Kind::kCommunicator);
  if (!making.handle) return failed(ncclSystemError, "a program has at most %u communicators at a time", journal::kMaxCommunicators);
  Args_xmCommInit args{};
  args.communicator = making.handle;
  std::memcpy(args.group, logical.group, sizeof(args.group));
  args.rank = static_cast<uint32_t>(rank);
  args.ranks = static_cast<uint32_t>(ranks);
  args.join_time = milliseconds(std::getenv("XMIG_JOIN_TIMEOUT"), 600);
  args.operation_time = milliseconds(std::getenv("XMIG_COLLECTIVE_TIMEOUT"), 1800);
  making.arguments.resize(sizeof(args));
  std::memcpy(making.arguments.data(), &args, sizeof(args));
  making.payload = library_and_settings();
  return make(std::move(making));
}

ncclResult_t end(ncclComm_t handle, bool abort) {
  Communicator* const communicator = find_communicator(handle);
  if (!communicator || !communicator->alive.exchange(false)) return failed(ncclInvalidArgument, "there is no such communicator");
  const WithContext of_it(*communicator->context);
  const Args_xmCommEnd args{number(handle), abort, 0};
  // Of a process that is lost there is nothing left to end.
  static_cast<void>(append(Op::xmCommEnd, &args, sizeof(args)));
  free_handle(number(handle));
  return ncclSuccess;
}

template <typename Value>
ncclResult_t ask(ncclComm_t handle, int* out, Value&& value) {
  const Communicator* const communicator = find_communicator(handle);
  if (!communicator || !out) return failed(ncclInvalidArgument, "there is no such communicator, or no place for the answer");
  *out = value(*communicator);
  return ncclSuccess;
}

}  // namespace

ncclResult_t as_nccl(CUresult error) {
  switch (error) {
    case CUDA_SUCCESS:
      return ncclSuccess;
    case CUDA_ERROR_INVALID_VALUE:
    case CUDA_ERROR_INVALID_HANDLE:
      return ncclInvalidArgument;
    default:
      return ncclUnhandledCudaError;
  }
}

ncclResult_t failed(ncclResult_t result, const char* format, ...) {
  char text[sizeof(last_text)];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  {
    const std::lock_guard lock(text_mutex);
    std::memcpy(last_text, text, sizeof(text));
  }
  complain("NCCL: %s", text);
  fail_group(result);
  return result;
}

void refused_nccl(const char* name) {
  static std::mutex& mutex = *new std::mutex;
  static auto& named = *new std::set<std::string_view>;
  const std::lock_guard lock(mutex);
  if (!named.insert(name).second) return;
  note_refused(name);
  say("%s is not supported: the call was refused", name);
}

ncclResult_t ncclGetVersion(int* version) {
  if (!version) return ncclInvalidArgument;
  *version = kNcclVersion;
  return ncclSuccess;
}

// Known by nobody but those to whom the program gives it. Whoever has it finds the others through the daemon.
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  if (!id) return ncclInvalidArgument;
  std::memset(id, 0, sizeof(*id));
  LogicalId logical{};
  std::memcpy(logical.magic, kIdMagic, sizeof(kIdMagic));
  if (::getrandom(logical.group, sizeof(logical.group), 0) != static_cast<ssize_t>(sizeof(logical.group))) {
    return failed(ncclSystemError, "no random numbers for a unique id");
  }
  std::memcpy(id->internal, &logical, sizeof(logical));
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled CUDA error";
    case ncclSystemError: return "system error";
    case ncclInternalError: return "internal error";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage";
    case ncclRemoteError: return "another rank has failed";
    case ncclInProgress: return "operation in progress";
  }
  return "unknown result code";
}

const char* ncclGetLastError(ncclComm_t) {
  static thread_local char copy[sizeof(last_text)];
  const std::lock_guard lock(text_mutex);
  std::memcpy(copy, last_text, sizeof(copy));
  return copy;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  return join(comm, nranks, id, rank, config, context_for_new());
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank) {
  return join(comm, nranks, id, rank, nullptr, context_for_new());
}

// Several ids spread the work of a rendezvous, which is no work here: the first is as good as all.
ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int nranks, int rank, int ids, ncclUniqueId* id, ncclConfig_t* config) {
  if (ids < 1 || !id) return failed(ncclInvalidArgument, "no unique id");
  return join(comm, nranks, id[0], rank, config, context_for_new());
}

ncclResult_t ncclCommInitAll(ncclComm_t* comms, int ndev, const int* devices) {
  if (!comms || ndev < 1) return failed(ncclInvalidArgument, "no place for the communicators");
  if (!context_for_new()) return failed(ncclUnhandledCudaError, "no device for the communicators");
  for (int i = 0; i < ndev; ++i) {
    const int device = devices ? devices[i] : i;
    if (check_ordinal(device) != CUDA_SUCCESS) return failed(ncclInvalidArgument, "there is no device %d", device);
    if (devices && std::find(devices, devices + i, device) != devices + i) {
      return failed(ncclInvalidUsage, "device %d is named twice", device);
    }
  }
  ncclUniqueId id;
  if (const ncclResult_t result = client::ncclGetUniqueId(&id); result != ncclSuccess) return result;
  client::ncclGroupStart();
  for (int i = 0; i < ndev; ++i) {
    const int device = devices ? devices[i] : i;
    CUcontext retained = nullptr;
    Context* const context = client::cuDevicePrimaryCtxRetain(&retained, device) == CUDA_SUCCESS ? &primary_context(device) : nullptr;
    static_cast<void>(join(&comms[i], ndev, id, i, nullptr, context));
  }
  return client::ncclGroupEnd();
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm, ncclConfig_t* config) {
  Communicator* const parent = find_communicator(comm);
  if (!parent || !newcomm) return failed(ncclInvalidArgument, "there is no such communicator, or no place for the new one");
  *newcomm = nullptr;
  if (const ncclResult_t result = check(config); result != ncclSuccess) return result;
  if (color < 0 && color != NCCL_SPLIT_NOCOLOR) return failed(ncclInvalidArgument, "colour %d", color);
  Making making;
  making.op = Op::xmCommSplit;
  making.context = parent->context;
  making.out = newcomm;
  making.handle = create_handle(Kind::kCommunicator);
  if (!making.handle) return failed(ncclSystemError, "a program has at most %u communicators at a time", journal::kMaxCommunicators);
  const Args_xmCommSplit args{making.handle, number(comm), color, key};
  making.arguments.resize(sizeof(args));
  std::memcpy(making.arguments.data(), &args, sizeof(args));
  return make(std::move(making));
}

// Everything that was begun is still done. Nothing has to be waited for here.
ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  return find_communicator(comm) ? ncclSuccess : failed(ncclInvalidArgument, "there is no such communicator");
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) { return comm ? end(comm, false) : ncclSuccess; }

ncclResult_t ncclCommAbort(ncclComm_t comm) { return comm ? end(comm, true) : ncclSuccess; }

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  if (!error || !find_communicator(comm)) return failed(ncclInvalidArgument, "there is no such communicator");
  if (check_peers() != CUDA_SUCCESS) {
    *error = ncclSystemError;
    return ncclSuccess;
  }
  const uint32_t state = process.header->communicators[journal::handle_index(number(comm))].load(std::memory_order_acquire);
  *error = state < ncclInProgress ? static_cast<ncclResult_t>(state) : ncclInternalError;
  return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  return ask(comm, count, [](const Communicator& c) { return static_cast<int>(c.ranks); });
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  return ask(comm, device, [](const Communicator& c) { return c.context->ordinal; });
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  return ask(comm, rank, [](const Communicator& c) { return static_cast<int>(c.rank); });
}

// --- memory: any of the program's will do

ncclResult_t ncclMemAlloc(void** pointer, size_t size) {
  if (!pointer) return ncclInvalidArgument;
  CUdeviceptr address = 0;
  if (!context_for_new()) return ncclUnhandledCudaError;
  if (const CUresult error = client::cuMemAlloc_v2(&address, size); error != CUDA_SUCCESS) return as_nccl(error);
  *pointer = reinterpret_cast<void*>(address);
  return ncclSuccess;
}

ncclResult_t ncclMemFree(void* pointer) { return as_nccl(client::cuMemFree_v2(reinterpret_cast<CUdeviceptr>(pointer))); }

// Registered memory is used without copies, if at all; results are the same.
ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buffer, size_t size, void** handle) {
  if (!find_communicator(comm) || !handle) return failed(ncclInvalidArgument, "there is no such communicator");
  *handle = buffer;
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void*) {
  return find_communicator(comm) ? ncclSuccess : ncclInvalidArgument;
}

// As where devices have no symmetric memory: it went well, and there is no window.
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void*, size_t, ncclWindow_t* window, int) {
  if (!find_communicator(comm) || !window) return failed(ncclInvalidArgument, "there is no such communicator");
  *window = nullptr;
  return ncclSuccess;
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t) { return ncclSuccess; }

}  // namespace xmig::client
