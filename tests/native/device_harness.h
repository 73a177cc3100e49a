// Driving a device directly, without a server.
#pragma once

#include <cuda.h>
#include <sys/types.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "device/device.h"

#define CHECK_RESULT(expected, call)                                                                        \
  do {                                                                                                      \
    const CUresult check_result = (call);                                                                            \
    if (check_result != (expected)) {                                                                                \
      std::fprintf(stderr, "%s:%d: %s: %d, not %d\n", __FILE__, __LINE__, #call, static_cast<int>(check_result), \
                   static_cast<int>(expected));                                                             \
      std::_Exit(1);                                                                                        \
    }                                                                                                       \
  } while (false)
#define OK(call) CHECK_RESULT(CUDA_SUCCESS, call)

using namespace xmig;

// --- tests register themselves; the program runs those that it is given the names of --------------------------------
inline std::map<std::string, void (*)()>& tests() {
  static std::map<std::string, void (*)()> all;
  return all;
}
#define TEST(name)                                                            \
  static void test_##name();                                                  \
  static const bool registered_##name = (tests()[#name] = test_##name, true); \
  static void test_##name()

inline std::string& kernels_path() {
  static std::string path;
  return path;
}

inline std::vector<std::byte> read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  CHECK(in);
  const std::vector<char> text(std::istreambuf_iterator<char>(in), {});
  const auto* bytes = reinterpret_cast<const std::byte*>(text.data());
  return {bytes, bytes + text.size()};
}

// Until this thread of ours sleeps: what it has begun it waits in.
inline void wait_until_it_sleeps(pid_t thread) {
  const std::string path = "/proc/self/task/" + std::to_string(thread) + "/stat";
  while (true) {
    std::string text;
    std::getline(std::ifstream(path), text);
    const size_t name_ends = text.rfind(')');
    CHECK(name_ends != text.npos);
    if (text.compare(name_ends, 3, ") S") == 0) return;
    std::this_thread::yield();
  }
}

// A device with one context, current, and address space like a server's.
class Rig {
 public:
  static constexpr uint64_t kBase = journal::kDeviceBase;
  static constexpr uint64_t kSpan = 1ull << 32;

  explicit Rig(const char* kind = "cpu", uint64_t memory = 256 << 20, int devices = 1) {
    std::vector<int> ordinals;
    for (int i = 0; i < devices; ++i) ordinals.push_back(i);
    device = device::open(kind, ordinals, memory);
    OK(d().cuInit(0));
    OK(d().cuDevicePrimaryCtxRetain(&context, 0));
    OK(d().cuCtxSetCurrent(context));
    CUdeviceptr got = 0;
    OK(d().cuMemAddressReserve(&got, kSpan, 0, kBase, 0));
    CHECK(got == kBase);
  }

  const DriverTable& d() const { return device->driver(); }
  bool copy(uint64_t to, uint64_t from, uint64_t bytes) {
    const device::Move move{to, from, bytes};
    return device->copy(std::span(&move, 1), {});
  }

  // Mapped memory, zeroed.
  CUdeviceptr memory(uint64_t bytes) {
    const uint64_t whole = (bytes + journal::kGranule - 1) / journal::kGranule * journal::kGranule;
    CUmemGenericAllocationHandle handle = 0;
    const CUmemAllocationProp prop = property();
    OK(d().cuMemCreate(&handle, whole, &prop, 0));
    const CUdeviceptr address = next_;
    next_ += whole + journal::kGranule;  // with a hole behind
    OK(d().cuMemMap(address, whole, 0, handle, 0));
    const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    OK(d().cuMemSetAccess(address, whole, &access, 1));
    OK(d().cuMemRelease(handle));
    return address;
  }
  // Reserved, but nothing there.
  CUdeviceptr hole() const { return kBase + kSpan - journal::kGranule; }
  static CUmemAllocationProp property(int ordinal = 0) {
    CUmemAllocationProp prop{};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, ordinal};
    return prop;
  }

  void load() {
    const std::vector<std::byte> image = read_file(kernels_path());
    OK(device->load_image(&module, image));
    unsigned count = 0;
    OK(d().cuModuleGetFunctionCount(&count, module));
    std::vector<CUfunction> all(count);
    OK(d().cuModuleEnumerateFunctions(all.data(), count, module));
    for (const CUfunction f : all) {
      const char* name = nullptr;
      OK(d().cuFuncGetName(&name, f));
      functions[name] = f;
    }
    const std::vector<device::Global> globals = device->globals(module);
    for (uint32_t i = 0; i < globals.size(); ++i) {
      places[globals[i].name] = memory(globals[i].bytes);
      CHECK(device->bind_global(module, i, places[globals[i].name]));
    }
  }

  struct Shape {
    unsigned grid = 1, block = 1, shared = 0;
    CUstream stream = nullptr;
  };
  template <typename... Args>
  CUresult try_launch(const std::string& name, Shape shape, Args... args) {
    CUlaunchConfig config{};
    config.gridDimX = shape.grid;
    config.blockDimX = shape.block;
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = shape.shared;
    config.hStream = shape.stream;
    void* parameters[] = {&args..., nullptr};
    CHECK(functions.contains(name));
    return d().cuLaunchKernelEx(&config, functions[name], parameters, nullptr);
  }
  template <typename... Args>
  void launch(const std::string& name, Shape shape, Args... args) {
    OK(try_launch(name, shape, args...));
  }

  CUstream stream(unsigned flags = CU_STREAM_NON_BLOCKING) {
    CUstream out = nullptr;
    OK(d().cuStreamCreateWithPriority(&out, flags, 0));
    return out;
  }
  CUevent event(unsigned flags = 0) {
    CUevent out = nullptr;
    OK(d().cuEventCreate(&out, flags));
    return out;
  }

  template <typename T>
  T peek(CUdeviceptr address) const {
    return *reinterpret_cast<const volatile T*>(address);
  }
  template <typename T>
  void poke(CUdeviceptr address, T value) {
    *reinterpret_cast<volatile T*>(address) = value;
  }

  std::unique_ptr<device::Device> device;
  CUcontext context = nullptr;
  CUmodule module = nullptr;
  std::map<std::string, CUfunction> functions;
  std::map<std::string, CUdeviceptr> places;  // of the globals

 private:
  CUdeviceptr next_ = kBase;
};

// A gate in a stream: work behind it waits until it is opened.
class Gate {
 public:
  Gate(Rig& rig, CUstream stream) : address_(rig.memory(8)) {
    OK(rig.d().cuStreamWaitValue64_v2(stream, address_, 1, CU_STREAM_WAIT_VALUE_EQ));
  }
  void open() { __atomic_store_n(reinterpret_cast<uint64_t*>(address_), 1, __ATOMIC_RELEASE); }

 private:
  CUdeviceptr address_;
};
