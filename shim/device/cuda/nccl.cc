#include "device/cuda/nccl.h"

#include <dlfcn.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <sstream>
#include <thread>
#include <type_traits>
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

constexpr const char* kUnknown = "unknown";
constexpr size_t kFirstBytes = 4096;  // of the first operation, on each rank
constexpr size_t kMostFirst = 64;      // ranks of one communicator in one process
constexpr uint32_t kMostPairs = 32;    // ranks that are connected with each other from the beginning, if some share a process
constexpr std::chrono::seconds kFirstPatience{60};
constexpr auto kByte = static_cast<ncclDataType_t>(journal::DataType::kInt8);

// What its user has set, and what xMIG needs: no NVLink multicast, which no handle of memory survives; connections are made when the
// communicator is, where waiting is allowed, unless its user wants them later, which takes less memory; no pages of the host through
// the driver's own allocator, which can deadlock; and no access to a program's memory by another device of the process, for which it is
// not mapped.
void set_up(const std::vector<std::string>& settings) {
  for (const std::string& setting : settings) {
    const size_t equals = setting.find('=');
    if (!setting.starts_with("NCCL_") || equals == std::string::npos) continue;
    ::setenv(setting.substr(0, equals).c_str(), setting.c_str() + equals + 1, 1);
  }
  ::setenv("NCCL_NVLS_ENABLE", "0", 1);
  ::setenv("NCCL_RUNTIME_CONNECT", "0", 0);
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

// Of an Error. Other results may be the program's fault, or this node's, and come again.
const char* code_of(ncclResult_t result) { return result == ncclRemoteError ? kSevered : "failed"; }

// What takes how long, one after the other.
class Steps {
 public:
  void done(const char* what) {
    const Clock::time_point now = Clock::now();
    const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(now - last_);
    last_ = now;
    all_ += took;
    text_ += (text_.empty() ? "" : ", ") + std::to_string(took.count()) + " ms " + what;
  }
  std::string text() const { return all_ < kWorthALine ? "" : text_; }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kWorthALine{100};
  Clock::time_point last_ = Clock::now();
  std::chrono::milliseconds all_{};
  std::string text_;
};

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
    if (!aborted_) end(library_.ncclCommDestroy);
  }

  // It may wait for the device, which on a dead one is for ever.
  void abort() override {
    if (!std::exchange(aborted_, true)) end(library_.ncclCommAbort);
  }

  void joined(std::string how) { how_joined_ = std::move(how); }

  // A stream in which it has something that may never be done: it ends behind the communicator.
  void take(CUstream stream) { stream_ = stream; }

  bool unfinished() override {
    while (!marks_.empty() && driver_.cuEventQuery(marks_.front()) != CUDA_ERROR_NOT_READY) {
      driver_.cuEventDestroy_v2(marks_.front());
      marks_.pop_front();
    }
    return !marks_.empty();
  }

  std::optional<Error> failure() override {
    if (failure_) return failure_;
    ncclResult_t error = ncclSuccess;
    if (aborted_ || library_.ncclCommGetAsyncError(comm_, &error) != ncclSuccess) return {};
    if (error == ncclSuccess || error == ncclInProgress) return {};
    return Error{"NCCL, rank " + std::to_string(rank_) + " of " + std::to_string(ranks_) + ": " + library_.ncclGetErrorString(error) +
                     " (" + library_.ncclGetLastError(comm_) + ")",
                 code_of(error)};
  }

  std::string how_joined() const override { return how_joined_; }

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
    if (!failure_) failure_ = Error{why};
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

  void end(ncclResult_t (*how)(ncclComm_t)) {
    apart(driver_, context_, [how, comm = comm_, destroy = driver_.cuStreamDestroy_v2, stream = stream_] {
      how(comm);
      if (stream) destroy(stream);
    });
  }

  const DriverTable& driver_;
  const Library& library_;
  const ncclComm_t comm_;
  CUstream stream_ = nullptr;
  const uint32_t rank_, ranks_;
  const CUcontext context_;
  std::string how_joined_;
  const std::function<void()> failed_;
  std::optional<Error> failure_;
  bool aborted_ = false;
  std::deque<CUevent> marks_;  // behind each group that was begun
  std::vector<ncclRedOp_t> operators_;
};

class NcclCollectives final : public Collectives {
 public:
  explicit NcclCollectives(const DriverTable& driver) : driver_(driver) {}

  Result<std::unique_ptr<Communicator>> join(const Place& place, const Meeting& meet, std::function<void()> failed) override {
    Steps steps;
    const Result<const Library*> found = loaded().get(place.library, place.settings);
    if (!found) return found.error();
    const Library& library = **found;
    library_.store(&library);
    int version = 0;
    ncclUniqueId id{};
    ncclResult_t result = library.ncclGetVersion(&version);
    if (result == ncclSuccess && place.rank == 0) result = library.ncclGetUniqueId(&id);
    if (result != ncclSuccess) return failure(library, "cannot begin", result);
    steps.done("to load NCCL");
    const std::span<std::byte> address = std::as_writable_bytes(std::span(id.internal));
    const Offer own{std::to_string(version), device_of(place), begun_.load() ? "old" : "new", place.rank == 0 ? to_hex(address) : "none",
                    process_name()};
    const Result<std::vector<std::string>> texts = meet(own.text());
    if (!texts) return texts.error();
    steps.done("until all ranks met");
    std::vector<Offer> offers;
    for (const std::string& text : *texts) offers.push_back(Offer::of(text));
    // Versions first: ranks of different ones would not understand each other, and say so late or never.
    for (size_t rank = 0; rank < offers.size(); ++rank) {
      if (offers[rank].version == own.version) continue;
      return Error{"rank " + std::to_string(rank) + " has NCCL " + offers[rank].version.substr(0, 16) + ", rank " +
                   std::to_string(place.rank) + " has " + own.version + ": all ranks need the same"};
    }
    if (offers.empty() || !from_hex(offers[0].address, address)) return Error{"what rank 0 says is no address"};
    if (is_apart(offers, place.rank)) ::setenv("NCCL_HOSTID", ("xmig-" + std::to_string(::getpid())).c_str(), 1);
    begun_ = true;
    ncclComm_t comm = nullptr;
    result = library.ncclCommInitRank(&comm, static_cast<int>(place.ranks), id, static_cast<int>(place.rank));
    if (result != ncclSuccess) return failure(library, "cannot make the communicator", result);
    steps.done("to make it");
    auto made = std::make_unique<NcclCommunicator>(driver_, library, comm, place, std::move(failed));
    if (share_a_process(offers)) {
      if (Result<> connected = connect_pairs(library, comm, place, *made); !connected) {
        made->abort();
        return connected.error();
      }
      steps.done("for first transfers");
    }
    made->joined(steps.text());
    return std::unique_ptr<Communicator>(std::move(made));
  }

  // In page-locked memory of the host, which is registered once: to give device memory back would wait for all work of the device.
  Result<> warm(std::span<Part> parts, const std::function<bool()>& give_up) override {
    if (parts.size() > kMostFirst) return {};
    parts[0].enter();
    void* const memory = first_memory();
    if (!memory) return Error{"no page-locked memory for the first operation"};
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < parts.size() && result == CUDA_SUCCESS; ++i) {
      CUstream stream = nullptr;
      parts[i].enter();
      result = driver_.cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0);
      parts[i].stream = stream;
      CollectiveOperation& first = parts[i].operations.emplace_back();
      first.kind = static_cast<uint32_t>(CollectiveKind::kAllReduce);
      first.type = static_cast<uint32_t>(journal::DataType::kFloat32);
      first.send = first.receive = reinterpret_cast<uint64_t>(memory) + i * kFirstBytes;
      first.count = kFirstBytes / sizeof(float);
    }
    if (result == CUDA_SUCCESS) result = result_of(run(parts));
    for (const Part& part : parts) {
      if (!part.stream) continue;
      part.enter();
      if (result == CUDA_SUCCESS) result = wait(static_cast<CUstream>(part.stream), give_up);
      if (result == CUDA_SUCCESS) {
        driver_.cuStreamDestroy_v2(static_cast<CUstream>(part.stream));
      } else {  // to end it here would wait for what the others may never do
        static_cast<NcclCommunicator&>(*part.communicator).take(static_cast<CUstream>(part.stream));
      }
    }
    if (result == CUDA_ERROR_TIMEOUT) return Error{"the first operation was not done in time"};
    if (result != CUDA_SUCCESS) return Error{"the first operation failed: CUDA error " + std::to_string(result)};
    return {};
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
  // What a rank says of itself to the others.
  struct Offer {
    std::string version, device;
    std::string since;    // new: its process has no communicator yet
    std::string address;  // of rank 0
    std::string process;

    std::string text() const { return version + " " + device + " " + since + " " + address + " " + process; }
    static Offer of(const std::string& text) {
      std::istringstream words(text);
      Offer offer;
      words >> offer.version >> offer.device >> offer.since >> offer.address >> offer.process;
      return offer;
    }
  };

  // NCCL refuses two ranks on one device of one machine. One that seems to be on a machine of its own uses the network between them, which is
  // slower, and works. What machine it is on, a process says once: it is the rank whose process begins, and of two of these the higher one.
  static bool is_apart(const std::vector<Offer>& offers, uint32_t own) {
    if (offers[own].since != "new" || offers[own].device == kUnknown) return false;
    for (uint32_t rank = 0; rank < offers.size(); ++rank) {
      if (rank == own || offers[rank].device != offers[own].device) continue;
      if (offers[rank].since != "new" || rank < own) return true;
    }
    return false;
  }

  // Unlike that of any other, also on another machine.
  static const std::string& process_name() {
    static const std::string name = [] {
      std::array<std::byte, 16> random{};
      if (::getrandom(random.data(), random.size(), 0) != static_cast<ssize_t>(random.size())) return std::string(kUnknown);
      return to_hex(random);
    }();
    return name;
  }

  // Has any process several of the ranks? All ranks know it of all.
  static bool share_a_process(const std::vector<Offer>& offers) {
    std::set<std::string> seen;
    return std::any_of(offers.begin(), offers.end(), [&](const Offer& one) { return !seen.insert(one.process).second; });
  }

  // The first transfer between two ranks waits for both. The executor begins operations one after the other: it would wait for itself,
  // where it has both, or two of a ring. So each rank has transferred something to each other one before anybody has the communicator. A
  // first sum loads what sums need, which may wait for kernels that run.
  Result<> connect_pairs(const Library& library, ncclComm_t comm, const Place& place, NcclCommunicator& made) {
    void* const memory = first_memory();
    CUstream stream = nullptr;
    if (!memory || driver_.cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0) != CUDA_SUCCESS) {
      return Error{"no page-locked memory, or no stream, for the first transfers"};
    }
    ncclResult_t result = library.ncclAllReduce(memory, memory, 1, kByte, ncclMax, comm, stream);
    if (result == ncclSuccess) result = library.ncclGroupStart();
    for (uint32_t peer = 0; peer < std::min(place.ranks, kMostPairs) && result == ncclSuccess; ++peer) {
      if (peer == place.rank || place.rank >= kMostPairs) continue;
      result = library.ncclSend(memory, 1, kByte, static_cast<int>(peer), comm, stream);
      if (result == ncclSuccess) result = library.ncclRecv(memory, 1, kByte, static_cast<int>(peer), comm, stream);
    }
    const ncclResult_t ended = library.ncclGroupEnd();
    if (result == ncclSuccess) result = ended;
    const auto end = std::chrono::steady_clock::now() + kFirstPatience;
    const bool done = result == ncclSuccess && wait(stream, [&] { return std::chrono::steady_clock::now() > end; }) == CUDA_SUCCESS;
    if (!done) made.take(stream);  // to end it here would wait for what the others may never do
    if (result != ncclSuccess) return failure(library, "cannot connect the ranks", result);
    if (!done) {
      return Error{"NCCL: the first transfers between the ranks failed, or took more than " + std::to_string(kFirstPatience.count()) + " s"};
    }
    driver_.cuStreamDestroy_v2(stream);
    return {};
  }

  // Of page-locked memory, in which nothing is looked for. Null: there is none.
  void* first_memory() {
    static void* const memory = [&]() -> void* {
      void* const pages = std::aligned_alloc(kFirstBytes, kMostFirst * kFirstBytes);
      if (!pages) return nullptr;
      std::memset(pages, 0, kMostFirst * kFirstBytes);
      constexpr unsigned kFlags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
      return driver_.cuMemHostRegister_v2(pages, kMostFirst * kFirstBytes, kFlags) == CUDA_SUCCESS ? pages : nullptr;
    }();
    return memory;
  }

  // CUDA_ERROR_TIMEOUT: it was given up.
  CUresult wait(CUstream stream, const std::function<bool()>& give_up) {
    for (;;) {
      const CUresult state = driver_.cuStreamQuery(stream);
      if (state != CUDA_ERROR_NOT_READY) return state;
      if (give_up()) return CUDA_ERROR_TIMEOUT;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  std::string device_of(const Place& place) const {
    CUuuid id{};
    if (driver_.cuDeviceGetUuid_v2(&id, static_cast<CUdevice>(place.ordinal)) != CUDA_SUCCESS) return kUnknown;
    return to_hex(std::as_bytes(std::span(id.bytes)));
  }

  static std::string text_of(const Library& library, ncclResult_t result) {
    return std::string(library.ncclGetErrorString(result)) + " (" + library.ncclGetLastError(nullptr) + ")";
  }
  static Error failure(const Library& library, const char* what, ncclResult_t result) {
    return Error{std::string("NCCL ") + what + ": " + text_of(library, result), code_of(result)};
  }

  const DriverTable& driver_;
  std::atomic<const Library*> library_{nullptr};
  std::atomic<bool> begun_{false};  // this process has been a rank
};

}  // namespace

std::unique_ptr<Collectives> nccl_collectives(const DriverTable& driver) { return std::make_unique<NcclCollectives>(driver); }

}  // namespace xmig::device
