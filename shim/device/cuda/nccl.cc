#include "device/cuda/nccl.h"

#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <span>
#include <thread>
#include <utility>

#include "api/nccl.h"
#include "common/hex.h"
#include "device/device.h"

namespace xmig::device {
namespace {

using journal::CollectiveKind;
using journal::CollectiveOperation;
using journal::Reduction;

// Of nccl.h: what is called here.
struct Library {
  ncclResult_t (*ncclGetVersion)(int*);
  ncclResult_t (*ncclGetUniqueId)(ncclUniqueId*);
  ncclResult_t (*ncclCommInitRank)(ncclComm_t*, int, ncclUniqueId, int);
  ncclResult_t (*ncclCommDestroy)(ncclComm_t);
  ncclResult_t (*ncclCommAbort)(ncclComm_t);
  ncclResult_t (*ncclCommGetAsyncError)(ncclComm_t, ncclResult_t*);
  const char* (*ncclGetErrorString)(ncclResult_t);
  const char* (*ncclGetLastError)(ncclComm_t);
  ncclResult_t (*ncclGroupStart)();
  ncclResult_t (*ncclGroupEnd)();
  ncclResult_t (*ncclAllReduce)(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, CUstream);
  ncclResult_t (*ncclBroadcast)(const void*, void*, size_t, ncclDataType_t, int, ncclComm_t, CUstream);
  ncclResult_t (*ncclReduce)(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, int, ncclComm_t, CUstream);
  ncclResult_t (*ncclAllGather)(const void*, void*, size_t, ncclDataType_t, ncclComm_t, CUstream);
  ncclResult_t (*ncclReduceScatter)(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, CUstream);
  ncclResult_t (*ncclSend)(const void*, size_t, ncclDataType_t, int, ncclComm_t, CUstream);
  ncclResult_t (*ncclRecv)(void*, size_t, ncclDataType_t, int, ncclComm_t, CUstream);
  ncclResult_t (*ncclRedOpCreatePreMulSum)(ncclRedOp_t*, void*, ncclDataType_t, ncclScalarResidence_t, ncclComm_t);
  ncclResult_t (*ncclRedOpDestroy)(ncclRedOp_t, ncclComm_t);
  // Of 2.28 on; from before that, they are made of sends and receives.
  ncclResult_t (*ncclAlltoAll)(const void*, void*, size_t, ncclDataType_t, ncclComm_t, CUstream);
  ncclResult_t (*ncclGather)(const void*, void*, size_t, ncclDataType_t, int, ncclComm_t, CUstream);
  ncclResult_t (*ncclScatter)(const void*, void*, size_t, ncclDataType_t, int, ncclComm_t, CUstream);
};

// A file that runs in this process: the server is the program's user's, and so may be the file, but nobody else's.
Result<> trusted(const std::string& path) {
  struct stat status {};
  if (path.empty()) return Error{"the program has loaded no NCCL that could be found: set XMIG_NATIVE_LIBNCCL to the path of its libnccl.so.2"};
  if (path[0] != '/' || ::stat(path.c_str(), &status) != 0 || !S_ISREG(status.st_mode)) return Error{"there is no file " + path};
  if ((status.st_uid != 0 && status.st_uid != ::geteuid()) || (status.st_mode & S_IWOTH) != 0) {
    return Error{path + " belongs to another user, or anybody may write it: it is not loaded"};
  }
  return {};
}

// What its user has set, and what xMIG needs: no NVLink multicast, which no handle of memory survives; connections are made when the
// communicator is, where waiting is allowed; no pages of the host through the driver's own allocator, which can deadlock; and no
// access to a program's memory by another device of the process, for which it is not mapped.
void set_up(const std::vector<std::string>& settings) {
  for (const std::string& setting : settings) {
    const size_t equals = setting.find('=');
    if (!setting.starts_with("NCCL_") || equals == std::string::npos) continue;
    ::setenv(setting.substr(0, equals).c_str(), setting.c_str() + equals + 1, 1);
  }
  ::setenv("NCCL_NVLS_ENABLE", "0", 1);
  ::setenv("NCCL_RUNTIME_CONNECT", "0", 1);
  ::setenv("NCCL_CUMEM_HOST_ENABLE", "0", 1);
  ::setenv("NCCL_P2P_DIRECT_DISABLE", "1", 1);
}

class Loaded {
 public:
  Result<const Library*> get(const std::string& path, const std::vector<std::string>& settings) {
    const std::lock_guard lock(mutex_);
    if (handle_) {
      if (path == path_) return &library_;
      return Error{"the program uses " + path + " after " + path_ + ": one NCCL for each program"};
    }
    if (const Result<> allowed = trusted(path); !allowed) return allowed.error();
    set_up(settings);
    void* const handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) return Error{"NCCL cannot be loaded: " + std::string(::dlerror())};
    std::string missing;
    const auto find = [&](auto& function, const char* name, bool needed = true) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(handle, name));
      if (!function && needed) missing += (missing.empty() ? "" : ", ") + std::string(name);
    };
#define XMIG_FIND(name) find(library_.name, #name)
    XMIG_FIND(ncclGetVersion);
    XMIG_FIND(ncclGetUniqueId);
    XMIG_FIND(ncclCommInitRank);
    XMIG_FIND(ncclCommDestroy);
    XMIG_FIND(ncclCommAbort);
    XMIG_FIND(ncclCommGetAsyncError);
    XMIG_FIND(ncclGetErrorString);
    XMIG_FIND(ncclGetLastError);
    XMIG_FIND(ncclGroupStart);
    XMIG_FIND(ncclGroupEnd);
    XMIG_FIND(ncclAllReduce);
    XMIG_FIND(ncclBroadcast);
    XMIG_FIND(ncclReduce);
    XMIG_FIND(ncclAllGather);
    XMIG_FIND(ncclReduceScatter);
    XMIG_FIND(ncclSend);
    XMIG_FIND(ncclRecv);
    XMIG_FIND(ncclRedOpCreatePreMulSum);
    XMIG_FIND(ncclRedOpDestroy);
#undef XMIG_FIND
    find(library_.ncclAlltoAll, "ncclAlltoAll", false);
    find(library_.ncclGather, "ncclGather", false);
    find(library_.ncclScatter, "ncclScatter", false);
    if (missing.empty()) {
      handle_ = handle;
      path_ = path;
      return &library_;
    }
    ::dlclose(handle);
    return Error{path + " has no " + missing};
  }

 private:
  std::mutex mutex_;
  void* handle_ = nullptr;  // guarded by mutex_, as is the rest; never changes once it is set
  std::string path_;
  Library library_{};
};

Loaded& loaded() {
  static Loaded& one = *new Loaded;
  return one;
}

// A thread that nobody waits for. Its context is the calling thread's.
template <typename Work>
void apart(const DriverTable& driver, CUcontext context, Work&& work) {
  std::thread([use = driver.cuCtxSetCurrent, context, work = std::forward<Work>(work)] {
    use(context);
    work();
  }).detach();
}

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(const DriverTable& driver, const Library& library, ncclComm_t comm, const Place& place, std::function<void()> failed)
      : driver_(driver),
        library_(library),
        comm_(comm),
        rank_(place.rank),
        ranks_(place.ranks),
        context_(static_cast<CUcontext>(place.context)),
        failed_(std::move(failed)) {}

  // To destroy waits until the others do, too. They may never.
  ~NcclCommunicator() override {
    for (const CUevent mark : marks_) driver_.cuEventDestroy_v2(mark);
    if (aborted_) return;
    apart(driver_, context_, [&library = library_, comm = comm_] { library.ncclCommDestroy(comm); });
  }

  // It may wait for the device, which on a dead one is for ever.
  void abort() override {
    if (std::exchange(aborted_, true)) return;
    apart(driver_, context_, [&library = library_, comm = comm_] { library.ncclCommAbort(comm); });
  }

  bool unfinished() override {
    while (!marks_.empty() && driver_.cuEventQuery(marks_.front()) != CUDA_ERROR_NOT_READY) {
      driver_.cuEventDestroy_v2(marks_.front());
      marks_.pop_front();
    }
    return !marks_.empty();
  }

  std::string failure() override {
    if (!failure_.empty()) return failure_;
    ncclResult_t error = ncclSuccess;
    if (aborted_ || library_.ncclCommGetAsyncError(comm_, &error) != ncclSuccess) return {};
    if (error == ncclSuccess || error == ncclInProgress) return {};
    return "NCCL, rank " + std::to_string(rank_) + " of " + std::to_string(ranks_) + ": " + library_.ncclGetErrorString(error) + " (" +
           library_.ncclGetLastError(comm_) + ")";
  }

  // Between ncclGroupStart and ncclGroupEnd. Operators that are made for it are gone when the group has ended.
  ncclResult_t begin(const CollectiveOperation& operation, CUstream stream) {
    const void* const send = reinterpret_cast<const void*>(operation.send);
    void* const receive = reinterpret_cast<void*>(operation.receive);
    const size_t count = operation.count;
    const auto type = static_cast<ncclDataType_t>(operation.type);
    const int peer = static_cast<int>(operation.peer);
    ncclRedOp_t op = static_cast<ncclRedOp_t>(operation.reduction);
    if (const ncclResult_t result = operator_of(operation, op); result != ncclSuccess) return result;
    switch (static_cast<CollectiveKind>(operation.kind)) {
      case CollectiveKind::kAllReduce: return library_.ncclAllReduce(send, receive, count, type, op, comm_, stream);
      case CollectiveKind::kBroadcast: return library_.ncclBroadcast(send, receive, count, type, peer, comm_, stream);
      case CollectiveKind::kReduce: return library_.ncclReduce(send, receive, count, type, op, peer, comm_, stream);
      case CollectiveKind::kAllGather: return library_.ncclAllGather(send, receive, count, type, comm_, stream);
      case CollectiveKind::kReduceScatter: return library_.ncclReduceScatter(send, receive, count, type, op, comm_, stream);
      case CollectiveKind::kSend: return library_.ncclSend(send, count, type, peer, comm_, stream);
      case CollectiveKind::kReceive: return library_.ncclRecv(receive, count, type, peer, comm_, stream);
      case CollectiveKind::kAllToAll:
        if (library_.ncclAlltoAll) return library_.ncclAlltoAll(send, receive, count, type, comm_, stream);
        break;
      case CollectiveKind::kGather:
        if (library_.ncclGather) return library_.ncclGather(send, receive, count, type, peer, comm_, stream);
        break;
      case CollectiveKind::kScatter:
        if (library_.ncclScatter) return library_.ncclScatter(send, receive, count, type, peer, comm_, stream);
        break;
      case CollectiveKind::kCount: break;
    }
    return ncclInvalidUsage;
  }

  CUresult mark(CUstream stream) {
    for (const ncclRedOp_t op : operators_) library_.ncclRedOpDestroy(op, comm_);
    operators_.clear();
    CUevent event = nullptr;
    CUresult result = driver_.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
    if (result == CUDA_SUCCESS) result = driver_.cuEventRecordWithFlags(event, stream, 0);
    if (event) marks_.push_back(event);
    return result;
  }

  void fail(const std::string& why) {
    if (failure_.empty()) failure_ = why;
    failed_();
  }

 private:
  ncclResult_t operator_of(const CollectiveOperation& operation, ncclRedOp_t& op) {
    const auto reduction = static_cast<Reduction>(operation.reduction);
    if (reduction != Reduction::kScaledSum && reduction != Reduction::kScaledSumByDevice) return ncclSuccess;
    const bool by_device = reduction == Reduction::kScaledSumByDevice;
    uint64_t bits = operation.scalar;
    void* const scalar = by_device ? reinterpret_cast<void*>(operation.scalar) : &bits;
    const ncclResult_t result = library_.ncclRedOpCreatePreMulSum(&op, scalar, static_cast<ncclDataType_t>(operation.type),
                                                                  by_device ? ncclScalarDevice : ncclScalarHostImmediate, comm_);
    if (result == ncclSuccess) operators_.push_back(op);
    return result;
  }

  const DriverTable& driver_;
  const Library& library_;
  const ncclComm_t comm_;
  const uint32_t rank_, ranks_;
  const CUcontext context_;
  const std::function<void()> failed_;
  std::string failure_;
  bool aborted_ = false;
  std::deque<CUevent> marks_;  // behind each group that was begun
  std::vector<ncclRedOp_t> operators_;
};

class NcclCollectives final : public Collectives {
 public:
  explicit NcclCollectives(const DriverTable& driver) : driver_(driver) {}

  Result<std::unique_ptr<Communicator>> join(const Place& place, const Meeting& meet, std::function<void()> failed) override {
    const Result<const Library*> found = loaded().get(place.library, place.settings);
    if (!found) return found.error();
    const Library& library = **found;
    library_.store(&library);
    int version = 0;
    ncclUniqueId id{};
    ncclResult_t result = library.ncclGetVersion(&version);
    if (result == ncclSuccess && place.rank == 0) result = library.ncclGetUniqueId(&id);
    if (result != ncclSuccess) return failure(library, "cannot begin", result);
    // Versions first: ranks of different ones would not understand each other, and say so late or never.
    const std::span<std::byte> address = std::as_writable_bytes(std::span(id.internal));
    const Result<std::vector<std::string>> offers = meet(std::to_string(version) + (place.rank == 0 ? " " + to_hex(address) : ""));
    if (!offers) return offers.error();
    const std::string own = std::to_string(version);
    for (size_t rank = 0; rank < offers->size(); ++rank) {
      const std::string& other = (*offers)[rank];
      if (other.substr(0, other.find(' ')) == own) continue;
      return Error{"rank " + std::to_string(rank) + " has NCCL " + other.substr(0, other.find(' ')).substr(0, 16) + ", rank " +
                   std::to_string(place.rank) + " has " + own + ": all ranks need the same"};
    }
    if (offers->empty() || !(*offers)[0].starts_with(own + " ") || !from_hex((*offers)[0].substr(own.size() + 1), address)) {
      return Error{"what rank 0 says is no address"};
    }
    ncclComm_t comm = nullptr;
    result = library.ncclCommInitRank(&comm, static_cast<int>(place.ranks), id, static_cast<int>(place.rank));
    if (result != ncclSuccess) return failure(library, "cannot make the communicator", result);
    return std::unique_ptr<Communicator>(std::make_unique<NcclCommunicator>(driver_, library, comm, place, std::move(failed)));
  }

  // One group for all: a rank's communicators may wait for each other's peers.
  Status run(std::span<Part> parts) override {
    const Library& library = *library_.load();  // there is a communicator
    ncclResult_t result = library.ncclGroupStart();
    for (Part& part : parts) {
      auto& communicator = static_cast<NcclCommunicator&>(*part.communicator);
      part.enter();
      for (const CollectiveOperation& one : part.operations) {
        if (result == ncclSuccess) result = communicator.begin(one, static_cast<CUstream>(part.stream));
      }
    }
    const ncclResult_t ended = library.ncclGroupEnd();
    if (result == ncclSuccess) result = ended;
    for (Part& part : parts) {
      auto& communicator = static_cast<NcclCommunicator&>(*part.communicator);
      part.enter();
      if (result != ncclSuccess) {
        communicator.fail("NCCL cannot begin a group: " + text_of(library, result));
      } else if (const CUresult marked = communicator.mark(static_cast<CUstream>(part.stream)); marked != CUDA_SUCCESS) {
        return status_of(marked);
      }
    }
    return {};
  }

 private:
  static std::string text_of(const Library& library, ncclResult_t result) {
    return std::string(library.ncclGetErrorString(result)) + " (" + library.ncclGetLastError(nullptr) + ")";
  }
  static Error failure(const Library& library, const char* what, ncclResult_t result) {
    return Error{std::string("NCCL ") + what + ": " + text_of(library, result)};
  }

  const DriverTable& driver_;
  std::atomic<const Library*> library_{nullptr};
};

}  // namespace

std::unique_ptr<Collectives> nccl_collectives(const DriverTable& driver) { return std::make_unique<NcclCollectives>(driver); }

}  // namespace xmig::device
