// The cuda device: the genuine driver, loaded by path, behind the same driver table as the others.
//
// The server's environment holds no preload, so `libcuda.so.1` is NVIDIA's. Which of the node's GPUs the program sees,
// in which order, is settled before cuInit by CUDA_VISIBLE_DEVICES: afterwards ordinal i is device i.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>

#include "device/cuda/hash.h"
#include "device/cuda/nccl.h"
#include "device/cuda/open_cuda.h"
#include "device/cuda/used_memory.h"
#include "device/description.h"
#include "journal/shadow_layout.h"

// hash.ptx and faults.ptx, as text.
asm(".pushsection .rodata\n.balign 8\nxmig_hash_ptx:\n.incbin \"" XMIG_PTX "/hash.ptx\"\n.byte 0\n"
    ".balign 8\nxmig_faults_ptx:\n.incbin \"" XMIG_PTX "/faults.ptx\"\n.byte 0\n.popsection\n");
extern "C" __attribute__((visibility("hidden"))) const char xmig_hash_ptx[], xmig_faults_ptx[];

namespace xmig::device {
namespace {

// The kernel that ends in this sticky error; others than these cannot be caused at will.
const char* fault_kernel(int error) {
  switch (error) {
    case CUDA_ERROR_ASSERT: return "xmig_assert";
    case CUDA_ERROR_MISALIGNED_ADDRESS: return "xmig_misaligned_address";
    case CUDA_ERROR_LAUNCH_FAILED: return "xmig_trap";
    default: return "xmig_illegal_address";
  }
}

const char* advice(CUresult result) {
  switch (result) {
    case CUDA_ERROR_OUT_OF_MEMORY: return "the GPU has no memory left for a context, which takes about 0.5 GB";
    case CUDA_ERROR_DEVICE_UNAVAILABLE:
      return "the GPU is in exclusive mode and another process has it, or it takes none (nvidia-smi -q -d COMPUTE; "
             "nvidia-smi -c DEFAULT lets several in)";
    case CUDA_ERROR_NO_DEVICE: return "the driver finds no GPU (nvidia-smi -L; CUDA_VISIBLE_DEVICES of xmigd)";
    default: return "see `nvidia-smi` and the kernel's log";
  }
}

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(std::span<const int> ordinals) {
    std::string visible;
    for (int ordinal : ordinals) visible += (visible.empty() ? "" : ",") + std::to_string(ordinal);
    // Clients of MPS choose among what its control daemon sees, which is their device alone (xmigd/mps/control.py).
    if (ordinals.size() == 1 && getenv("CUDA_MPS_PIPE_DIRECTORY")) visible = "0";
    setenv("CUDA_VISIBLE_DEVICES", visible.c_str(), 1);
    setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID", 1);
    library_ = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library_)
      throw Unavailable(CUDA_ERROR_NO_DEVICE, std::string("the NVIDIA driver cannot be loaded: ") + dlerror() +
                                                  "; install the driver of this node's GPUs");
    std::string missing;
    for_each_driver_function([&](const char* name, auto member) {
      void* function = dlsym(library_, name);
      if (!function) missing += std::string(missing.empty() ? "" : ", ") + name;
      std::memcpy(&(driver_.*member), &function, sizeof(function));
    });
    get_current_ = reinterpret_cast<decltype(get_current_)>(dlsym(library_, "cuCtxGetCurrent"));
    if (!get_current_) missing += missing.empty() ? "cuCtxGetCurrent" : ", cuCtxGetCurrent";
    if (!missing.empty())
      throw Unavailable(CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,
                        "the NVIDIA driver is too old: it lacks " + missing +
                            "; xMIG needs one for CUDA 12.4 or newer (550 or newer)");
    used_ = std::async(std::launch::async, [] { return std::make_unique<UsedMemory>(); }).share();
    check(driver_.cuInit(0), "cuInit");
    int count = 0;
    check(driver_.cuDeviceGetCount(&count), "cuDeviceGetCount");
    if (count < static_cast<int>(ordinals.size()))
      throw Unavailable(CUDA_ERROR_INVALID_DEVICE, "the driver shows " + std::to_string(count) +
                                                       " GPUs, but device(s) " + visible + " were requested");
    units_.resize(ordinals.size());
  }

  ~CudaDevice() override {
    if (library_) dlclose(library_);
  }

  const DriverTable& driver() const override { return driver_; }

  // Until then this process takes no memory of the GPU. What fails leaves nothing behind there.
  Status open_context(uint32_t ordinal, ContextHandle& out) override {
    Unit& unit = units_.at(ordinal);
    const std::lock_guard lock(unit.mutex);
    const CUuuid uuid = uuid_of(ordinal);
    const uint64_t before = used_.get()->of(uuid.bytes);
    CUcontext context = nullptr;
    check(driver_.cuDevicePrimaryCtxRetain(&context, device_of(ordinal)), "cuDevicePrimaryCtxRetain");
    unit.context = context;
    try {
      open_unit(ordinal, unit);
    } catch (const Unavailable&) {
      close_context(ordinal);
      throw;
    }
    const uint64_t after = used_.get()->of(uuid.bytes);
    if (before != 0 && after > before) own_bytes_ += after - before;
    out = context;
    return {};
  }

  void close_context(uint32_t ordinal) override {
    Unit& unit = units_.at(ordinal);
    if (driver_.cuCtxSetCurrent(unit.context) == CUDA_SUCCESS) driver_.cuMemHostUnregister(unit.shared.get());
    unit.context = nullptr;
    unit.kernels.clear();
    driver_.cuCtxSetCurrent(nullptr);
    Device::close_context(ordinal);  // and with it what was loaded and made there
  }

  journal::DeviceDescription describe(int ordinal) const override {
    journal::DeviceDescription description{};
    CUdevice device = 0;
    check(driver_.cuDeviceGet(&device, ordinal), "cuDeviceGet");
    check(driver_.cuDeviceGetName(description.name, sizeof(description.name), device), "cuDeviceGetName");
    const CUuuid uuid = uuid_of(static_cast<size_t>(ordinal));
    std::memcpy(description.uuid, uuid.bytes, sizeof(description.uuid));
    size_t total = 0;
    check(driver_.cuDeviceTotalMem_v2(&total, device), "cuDeviceTotalMem");
    description.total_bytes = total;
    description.attribute_count = journal::kAttributes;
    for (uint32_t i = 1; i < journal::kAttributes; ++i) {
      int value = 0;
      if (driver_.cuDeviceGetAttribute(&value, static_cast<CUdevice_attribute>(i), device) == CUDA_SUCCESS)
        description.attributes[i] = value;
    }
    promise_what_works(description);
    return description;
  }

  uint32_t peer(int ordinal, int peer) const override {
    if (ordinal == peer) return 0;
    CUdevice device = 0, other = 0;
    check(driver_.cuDeviceGet(&device, ordinal), "cuDeviceGet");
    check(driver_.cuDeviceGet(&other, peer), "cuDeviceGet");
    int reaches = 0;
    if (driver_.cuDeviceCanAccessPeer(&reaches, device, other) != CUDA_SUCCESS || !reaches) return 0;
    const auto ask = [&](CUdevice_P2PAttribute attribute) {
      int value = 0;
      return driver_.cuDeviceGetP2PAttribute(&value, attribute, device, other) == CUDA_SUCCESS ? value : 0;
    };
    const auto rank = static_cast<uint32_t>(ask(CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK));
    return journal::kPeerReaches |
           (ask(CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED) ? uint32_t{journal::kPeerAtomics} : 0) |
           (ask(CU_DEVICE_P2P_ATTRIBUTE_ONLY_PARTIAL_NATIVE_ATOMIC_SUPPORTED) ? uint32_t{journal::kPeerSomeAtomics} : 0) |
           rank << journal::kPeerRankShift;
  }

  uint64_t own_bytes() const override { return own_bytes_; }
  // Most of it until the dead process's context is gone. H100, H200: 75 to 85 ms, 30 to 40 until memory is mapped.
  uint64_t recovery_ns() const override { return 120'000'000; }

  void set_sequence(uint64_t) override {}  // the driver does not say whose work has faulted

  Fault fault() const override {
    // Any driver call on a broken context says so; a query of the null stream does no work.
    const CUresult state = driver_.cuStreamQuery(CU_STREAM_LEGACY);
    if (!is_sticky(state) && state != CUDA_ERROR_UNKNOWN) return {};
    return {state, 0, "the GPU reports a sticky error"};
  }

  void on_fault(void (*)(void*), void*) override {}  // the driver has no such call: waits and queries report it

  bool hash(std::span<const Chunk> chunks, std::span<uint64_t> hashes, Where where) override {
    if (chunks.empty()) return true;
    Unit& unit = unit_of(chunks[0].address);
    return hash_each(unit, unit.hash, chunks, unit.shared->chunks, hashes, where);
  }

  uint64_t hash_of(std::span<const std::byte> content) const override { return cuda::hash_content(content); }

  bool copy(std::span<const Move> moves, Where where) override {
    if (moves.empty()) return true;
    Unit& unit = unit_of(in_device_ranges(moves[0].from) ? moves[0].from : moves[0].to);
    const auto stream = static_cast<CUstream>(where.value_or(unit.stream));
    const std::lock_guard lock(unit.mutex);
    const Within within(*this, unit);
    if (!within) return false;
    for (const Move& move : moves) {
      const bool host = journal::in_host_shadow(move.to) || journal::in_host_shadow(move.from);
      // Neighbours in host memory may be two pieces that were page-locked one by one: no copy may touch both.
      const uint64_t piece = host ? journal::kGranule : move.bytes;
      for (uint64_t done = 0; done < move.bytes; done += piece) {
        const Move part{move.to + done, move.from + done, std::min(piece, move.bytes - done)};
        if (copy_part(part, stream) != CUDA_SUCCESS) return false;
      }
    }
    return driver_.cuStreamSynchronize(stream) == CUDA_SUCCESS;
  }

  bool copy_and_hash(std::span<const Move> moves, std::span<uint64_t> hashes, Where where) override {
    if (moves.empty()) return true;
    // What goes to the host or comes from there is for the copy engines.
    const bool all_on_device = std::none_of(moves.begin(), moves.end(), [](const Move& move) {
      return journal::in_host_shadow(move.to) || journal::in_host_shadow(move.from);
    });
    if (!all_on_device) return Device::copy_and_hash(moves, hashes, where);
    Unit& unit = unit_of(moves[0].from);
    return hash_each(unit, unit.copy_hash, moves, unit.shared->moves, hashes, where);
  }

  Result<> placed_variables(uint32_t ordinal, std::span<const std::byte> image, std::vector<ImageVariable>& out) override {
    return read_variables(image, units_.at(ordinal).architecture, out);
  }

  // The words of 16 bytes in which they lie: what the driver gives begins and ends at such.
  bool hash_placed(uint32_t ordinal, std::span<const Chunk> chunks, std::span<uint64_t> hashes, Where where) override {
    if (chunks.empty()) return true;
    std::vector<Chunk> words;
    words.reserve(chunks.size());
    for (const Chunk& chunk : chunks) {
      const uint64_t start = chunk.address & ~uint64_t{15};
      words.push_back({start, ((chunk.address + chunk.bytes + 15) & ~uint64_t{15}) - start});
    }
    Unit& unit = units_.at(ordinal);
    return hash_each(unit, unit.hash, std::span<const Chunk>(words), unit.shared->chunks, hashes, where);
  }

  // Globals of a GPU module live where the driver puts them; the program asks for them by name.
  Collectives& collectives() override { return *collectives_; }
  std::vector<Global> globals(CUmodule) override { return {}; }
  bool bind_global(CUmodule, uint32_t, uint64_t) override { return false; }

  bool injects() const override { return true; }

  Status inject(StreamHandle stream, uint32_t ordinal, InjectKind kind, int error) override {
    Unit& unit = units_.at(ordinal);
    uint64_t word = address_of(&unit.shared->word);
    void* parameters[] = {&word};
    const char* const kernel = kind == InjectKind::kHang ? "xmig_hang" : fault_kernel(error);
    return status_of(launch(unit.kernels.at(kernel), 1, 1, static_cast<CUstream>(stream), parameters));
  }

  void arm(const Injection&, Notify, void*) override {}  // it is injected instead

  // Before it, nothing is opened beside this.
  void wake() override {
    awake_ = true;
    for (Unit& unit : units_) {
      if (!unit.context) continue;
      const Within within(*this, unit);
      check(within.result(), "cuCtxSetCurrent");
      check(driver_.cuCtxSetLimit(CU_LIMIT_STACK_SIZE, unit.stack), "cuCtxSetLimit");
    }
  }

  // From any thread: the kernels are loaded before one is needed.
  void prepare_to_inject() override {
    injects_ = true;
    for (Unit& unit : units_) {
      const std::lock_guard lock(unit.mutex);
      if (!unit.context || unit.kernels.contains("xmig_trap")) continue;
      const Within within(*this, unit);
      check(within.result(), "cuCtxSetCurrent");
      load_kernels(unit, xmig_faults_ptx);
    }
  }

 private:
  static constexpr size_t kBatch = 16384;

  // Host memory that the kernels read and write directly.
  struct alignas(4096) Shared {
    union {
      Chunk chunks[kBatch];
      Move moves[kBatch];
    };
    uint64_t hashes[kBatch];
    uint64_t word;
  };
  // What each GPU has of ours.
  struct Unit {
    CUcontext context = nullptr;
    std::map<std::string, CUfunction> kernels;
    CUfunction hash = nullptr, copy_hash = nullptr;
    CUstream stream = nullptr;
    size_t stack = 0;  // of a thread, as the driver has it
    uint32_t architecture = 0;  // 90: compute capability 9.0
    std::unique_ptr<Shared> shared = std::make_unique<Shared>();
    std::mutex mutex;
  };

  // For as long as one lives, the unit's context is the calling thread's current one. Callers keep in mind which one that
  // is (server/contexts.h): it is theirs again afterwards.
  class Within {
   public:
    Within(const CudaDevice& device, const Unit& unit) : driver_(device.driver_) {
      device.get_current_(&before_);
      result_ = driver_.cuCtxSetCurrent(unit.context);
    }
    ~Within() { driver_.cuCtxSetCurrent(before_); }
    Within(const Within&) = delete;
    explicit operator bool() const { return result_ == CUDA_SUCCESS; }
    CUresult result() const { return result_; }

   private:
    const DriverTable& driver_;
    CUcontext before_ = nullptr;
    CUresult result_;
  };

  static uint64_t address_of(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }
  static bool in_device_ranges(uint64_t address) {
    return address - journal::kDeviceBase < journal::kMaxDevices * journal::kDeviceSpan;
  }
  // Of a device's memory, or of its shadow.
  Unit& unit_of(uint64_t address) {
    return units_.at(in_device_ranges(address) ? (address - journal::kDeviceBase) / journal::kDeviceSpan
                                               : (address - journal::kShadowBase) / journal::kShadowSpan);
  }

  void check(CUresult result, const char* what) const {
    if (result != CUDA_SUCCESS)
      throw Unavailable(result, std::string(what) + " failed with CUDA error " +
                                    std::to_string(static_cast<int>(result)) + ": " + advice(result));
  }

  CUdevice device_of(size_t ordinal) const {
    CUdevice device = 0;
    check(driver_.cuDeviceGet(&device, static_cast<int>(ordinal)), "cuDeviceGet");
    return device;
  }

  CUuuid uuid_of(size_t ordinal) const {
    CUuuid uuid{};
    check(driver_.cuDeviceGetUuid_v2(&uuid, device_of(ordinal)), "cuDeviceGetUuid");
    return uuid;
  }

  void load_kernels(Unit& unit, const char* ptx) const {
    CUmodule module = nullptr;
    check(driver_.cuModuleLoadData(&module, ptx), "loading the built-in kernels");
    unsigned count = 0;
    check(driver_.cuModuleGetFunctionCount(&count, module), "cuModuleGetFunctionCount");
    std::vector<CUfunction> functions(count);
    check(driver_.cuModuleEnumerateFunctions(functions.data(), count, module), "cuModuleEnumerateFunctions");
    for (CUfunction kernel : functions) {
      const char* name = nullptr;
      check(driver_.cuFuncGetName(&name, kernel), "cuFuncGetName");
      // Now: the driver would wait for the GPU before it loads one that is launched for the first time.
      check(driver_.cuFuncLoad(kernel), "cuFuncLoad");
      unit.kernels[name] = kernel;
    }
  }

  // In its context, which stays the calling thread's current one.
  void open_unit(size_t ordinal, Unit& unit) {
    const CUdevice device = device_of(ordinal);
    check(driver_.cuCtxSetCurrent(unit.context), "cuCtxSetCurrent");
    int major = 0, minor = 0;
    check(driver_.cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device), "cuDeviceGetAttribute");
    check(driver_.cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device), "cuDeviceGetAttribute");
    unit.architecture = static_cast<uint32_t>(major * 10 + minor);
    // For kernels that the program will bring: 277 MB of an H200 that a standby does not need.
    check(driver_.cuCtxGetLimit(&unit.stack, CU_LIMIT_STACK_SIZE), "cuCtxGetLimit");
    if (!awake_) check(driver_.cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 0), "cuCtxSetLimit");
    load_kernels(unit, xmig_hash_ptx);
    if (injects_) load_kernels(unit, xmig_faults_ptx);
    unit.hash = unit.kernels.at("xmig_hash");
    unit.copy_hash = unit.kernels.at("xmig_copy_hash");
    check(driver_.cuStreamCreateWithPriority(&unit.stream, CU_STREAM_NON_BLOCKING, 0), "cuStreamCreate");
    check(driver_.cuMemHostRegister_v2(unit.shared.get(), sizeof(Shared), CU_MEMHOSTREGISTER_DEVICEMAP),
          "cuMemHostRegister");
  }

  // One of hash.cu's kernels, whose list `shared` is.
  template <typename T>
  bool hash_each(Unit& unit, CUfunction kernel, std::span<const T> list, T* shared, std::span<uint64_t> hashes, Where where) {
    const auto stream = static_cast<CUstream>(where.value_or(unit.stream));
    const std::lock_guard lock(unit.mutex);
    const Within within(*this, unit);
    if (!within) return false;
    for (size_t done = 0; done < list.size();) {
      const size_t count = std::min(list.size() - done, kBatch);
      std::memcpy(shared, list.data() + done, count * sizeof(T));
      uint64_t from = address_of(shared), to = address_of(unit.shared->hashes);
      void* parameters[] = {&from, &to};
      if (launch(kernel, static_cast<unsigned>(count), 512, stream, parameters) != CUDA_SUCCESS ||
          driver_.cuStreamSynchronize(stream) != CUDA_SUCCESS)
        return false;
      std::memcpy(hashes.data() + done, unit.shared->hashes, count * sizeof(uint64_t));
      done += count;
    }
    return true;
  }

  CUresult copy_part(const Move& part, CUstream stream) {
    if (journal::in_host_shadow(part.to))
      return driver_.cuMemcpyDtoHAsync_v2(reinterpret_cast<void*>(part.to), part.from, part.bytes, stream);
    if (journal::in_host_shadow(part.from))
      return driver_.cuMemcpyHtoDAsync_v2(part.to, reinterpret_cast<const void*>(part.from), part.bytes, stream);
    return driver_.cuMemcpyDtoDAsync_v2(part.to, part.from, part.bytes, stream);
  }

  CUresult launch(CUfunction kernel, unsigned blocks, unsigned threads, CUstream stream, void** parameters) {
    CUlaunchConfig config{};
    config.gridDimX = blocks;
    config.blockDimX = threads;
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
    config.hStream = stream;
    return driver_.cuLaunchKernelEx(&config, kernel, parameters, nullptr);
  }

  void* library_ = nullptr;
  DriverTable driver_{};
  const std::unique_ptr<Collectives> collectives_ = nccl_collectives(driver_);
  decltype(&::cuCtxGetCurrent) get_current_ = nullptr;
  std::deque<Unit> units_;  // by ordinal
  std::shared_future<std::unique_ptr<UsedMemory>> used_;  // it takes time to start
  std::atomic<bool> injects_{false}, awake_{false};
  std::atomic<uint64_t> own_bytes_{0};
};

}  // namespace

std::unique_ptr<Device> open_cuda(std::span<const int> ordinals) { return std::make_unique<CudaDevice>(ordinals); }

}  // namespace xmig::device
