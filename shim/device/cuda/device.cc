// The cuda device: the genuine driver, loaded by path, behind the same driver table as the others.
//
// The server's environment holds no preload, so `libcuda.so.1` is NVIDIA's. Which of the node's GPUs the program sees,
// in which order, is settled before cuInit by CUDA_VISIBLE_DEVICES: afterwards ordinal i is device i.
#include <dlfcn.h>
#include <signal.h>

#include <atomic>
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <stdexcept>

#include "device/cuda/open_cuda.h"

// kernels.ptx, as text.
asm(".pushsection .rodata\n.balign 8\nxmig_kernels_ptx:\n.incbin \"" XMIG_KERNELS_PTX "\"\n.byte 0\n.popsection\n");
extern "C" __attribute__((visibility("hidden"))) const char xmig_kernels_ptx[];

namespace xmig::device {
namespace {

bool is_sticky(CUresult error) {
  switch (error) {
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_CONTEXT_IS_DESTROYED:
    case CUDA_ERROR_UNKNOWN:
      return true;
    default:
      return false;
  }
}

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(std::span<const int> ordinals) {
    std::string visible;
    for (int ordinal : ordinals) visible += (visible.empty() ? "" : ",") + std::to_string(ordinal);
    setenv("CUDA_VISIBLE_DEVICES", visible.c_str(), 1);
    setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID", 1);
    library_ = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library_)
      throw std::runtime_error(std::string("the NVIDIA driver cannot be loaded: ") + dlerror() +
                               "; install the driver of this node's GPUs");
    std::string missing;
    for_each_driver_function([&](const char* name, auto member) {
      void* function = dlsym(library_, name);
      if (!function) missing += std::string(missing.empty() ? "" : ", ") + name;
      std::memcpy(&(driver_.*member), &function, sizeof(function));
    });
    if (!missing.empty())
      throw std::runtime_error("the NVIDIA driver is too old: it lacks " + missing + "; xMIG needs 12.8 or newer");
    check(driver_.cuInit(0), "cuInit");
    int count = 0;
    check(driver_.cuDeviceGetCount(&count), "cuDeviceGetCount");
    if (count < static_cast<int>(ordinals.size()))
      throw std::runtime_error("the driver shows " + std::to_string(count) + " GPUs, but device(s) " + visible +
                               " were asked for");
    CUcontext context = nullptr;
    check(driver_.cuDevicePrimaryCtxRetain(&context, 0), "cuDevicePrimaryCtxRetain");
    check(driver_.cuCtxSetCurrent(context), "cuCtxSetCurrent");
    context_ = context;
    load_kernels();
  }

  ~CudaDevice() override {
    if (library_) dlclose(library_);
  }

  const DriverTable& driver() const override { return driver_; }

  journal::DeviceDescription describe(int ordinal) const override {
    journal::DeviceDescription description{};
    CUdevice device = 0;
    check(driver_.cuDeviceGet(&device, ordinal), "cuDeviceGet");
    check(driver_.cuDeviceGetName(description.name, sizeof(description.name), device), "cuDeviceGetName");
    CUuuid uuid{};
    check(driver_.cuDeviceGetUuid_v2(&uuid, device), "cuDeviceGetUuid");
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
    // What xMIG does not carry must not be promised.
    for (const auto attribute :
         {CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS,
          CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS, CU_DEVICE_ATTRIBUTE_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST,
          CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES,
          CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED,
          CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED,
          CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED,
          CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, CU_DEVICE_ATTRIBUTE_SPARSE_CUDA_ARRAY_SUPPORTED})
      description.attributes[attribute] = 0;
    return description;
  }

  void set_sequence(uint64_t sequence) override {
    sequence_.store(sequence, std::memory_order_relaxed);
    if (armed_.load(std::memory_order_acquire)) [[unlikely]]
      strike(sequence);
  }

  Fault fault() const override {
    // Any driver call on a broken context says so; a query of the null stream does no work.
    const CUresult state = driver_.cuStreamQuery(CU_STREAM_LEGACY);
    if (!is_sticky(state)) return {};
    return {state, 0, "the GPU reports a sticky error"};
  }

  void on_fault(void (*)(void*), void*) override {}  // the driver has no such call: waits and queries report it

  bool hash(std::span<const Chunk> chunks, std::span<uint64_t> hashes) override {
    const std::lock_guard lock(mutex_);
    if (driver_.cuCtxSetCurrent(context_) != CUDA_SUCCESS) return false;
    for (size_t done = 0; done < chunks.size();) {
      const size_t count = std::min(chunks.size() - done, kBatch);
      std::memcpy(shared_->chunks, chunks.data() + done, count * sizeof(Chunk));
      uint64_t list = reinterpret_cast<uint64_t>(shared_->chunks), result = reinterpret_cast<uint64_t>(shared_->hashes);
      void* parameters[] = {&list, &result};
      if (launch(hash_kernel_, static_cast<unsigned>(count), 512, stream_, parameters) != CUDA_SUCCESS ||
          driver_.cuStreamSynchronize(stream_) != CUDA_SUCCESS)
        return false;
      std::memcpy(hashes.data() + done, shared_->hashes, count * sizeof(uint64_t));
      done += count;
    }
    return true;
  }

  bool copy(uint64_t destination, uint64_t source, uint64_t bytes) override {
    const std::lock_guard lock(mutex_);
    return driver_.cuCtxSetCurrent(context_) == CUDA_SUCCESS &&
           driver_.cuMemcpyDtoDAsync_v2(destination, source, bytes, stream_) == CUDA_SUCCESS &&
           driver_.cuStreamSynchronize(stream_) == CUDA_SUCCESS;
  }

  // Globals of a GPU module live where the driver puts them; the program asks for them by name.
  std::vector<Global> globals(CUmodule) override { return {}; }
  bool bind_global(CUmodule, uint32_t, uint64_t) override { return false; }

  void arm(const Injection& injection, Notify notify, void* user) override {
    const std::lock_guard lock(mutex_);
    injections_.push_back({injection, notify, user});
    armed_.store(true, std::memory_order_release);
  }

 private:
  static constexpr size_t kBatch = 16384;

  // Host memory that the kernels read and write directly.
  struct alignas(4096) Shared {
    Chunk chunks[kBatch];
    uint64_t hashes[kBatch];
    uint32_t stop;
  };
  struct Armed {
    Injection injection;
    Notify notify;
    void* user;
  };

  void check(CUresult result, const char* what) const {
    if (result != CUDA_SUCCESS)
      throw std::runtime_error(std::string(what) + " failed with CUDA error " +
                               std::to_string(static_cast<int>(result)) + "; see `nvidia-smi` and the kernel's log");
  }

  CUfunction function(const char* name) {
    unsigned count = 0;
    check(driver_.cuModuleGetFunctionCount(&count, module_), "cuModuleGetFunctionCount");
    std::vector<CUfunction> functions(count);
    check(driver_.cuModuleEnumerateFunctions(functions.data(), count, module_), "cuModuleEnumerateFunctions");
    for (CUfunction candidate : functions) {
      const char* found = nullptr;
      if (driver_.cuFuncGetName(&found, candidate) == CUDA_SUCCESS && !std::strcmp(found, name)) return candidate;
    }
    throw std::runtime_error(std::string("the built-in kernel ") + name + " is missing");
  }

  void load_kernels() {
    check(driver_.cuModuleLoadData(&module_, xmig_kernels_ptx), "loading the built-in kernels");
    hash_kernel_ = function("xmig_hash");
    check(driver_.cuStreamCreateWithPriority(&stream_, CU_STREAM_NON_BLOCKING, 0), "cuStreamCreate");
    shared_ = std::make_unique<Shared>();
    check(driver_.cuMemHostRegister_v2(shared_.get(), sizeof(Shared), CU_MEMHOSTREGISTER_DEVICEMAP),
          "cuMemHostRegister");
  }

  CUresult launch(CUfunction kernel, unsigned blocks, unsigned threads, CUstream stream, void** parameters) {
    CUlaunchConfig config{};
    config.gridDimX = blocks;
    config.blockDimX = threads;
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
    config.hStream = stream;
    return driver_.cuLaunchKernelEx(&config, kernel, parameters, nullptr);
  }

  void strike(uint64_t sequence) {
    std::vector<Armed> due;
    {
      const std::lock_guard lock(mutex_);
      for (auto it = injections_.begin(); it != injections_.end();) {
        if (it->injection.sequence > sequence) {
          ++it;
          continue;
        }
        due.push_back(*it);
        it = injections_.erase(it);
      }
      armed_.store(!injections_.empty(), std::memory_order_release);
    }
    for (const Armed& armed : due) {
      armed.notify(armed.user, armed.injection.id);
      switch (armed.injection.kind) {
        case InjectKind::kKill:
          raise(SIGKILL);
          break;
        case InjectKind::kHang: {
          uint64_t stop = reinterpret_cast<uint64_t>(&shared_->stop);
          void* parameters[] = {&stop};
          launch(function("xmig_hang"), 1, 1, nullptr, parameters);
          break;
        }
        case InjectKind::kFault: {
          uint64_t address = reinterpret_cast<uint64_t>(shared_->hashes);
          void* parameters[] = {&address};
          const char* kernel = armed.injection.error == CUDA_ERROR_MISALIGNED_ADDRESS ? "xmig_misaligned_address"
                               : armed.injection.error == CUDA_ERROR_LAUNCH_FAILED    ? "xmig_trap"
                                                                                      : "xmig_illegal_address";
          launch(function(kernel), 1, 1, nullptr, parameters);
          break;
        }
      }
    }
  }

  void* library_ = nullptr;
  DriverTable driver_{};
  CUcontext context_ = nullptr;
  CUmodule module_ = nullptr;
  CUfunction hash_kernel_ = nullptr;
  CUstream stream_ = nullptr;
  std::unique_ptr<Shared> shared_;
  std::mutex mutex_;
  std::vector<Armed> injections_;
  std::atomic<bool> armed_{false};
  std::atomic<uint64_t> sequence_{0};
};

}  // namespace

std::unique_ptr<Device> open_cuda(std::span<const int> ordinals) { return std::make_unique<CudaDevice>(ordinals); }

}  // namespace xmig::device
