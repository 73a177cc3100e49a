// The null device, and what devices say of themselves.
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>

#include "device/image.h"
#include "device_harness.h"

TEST(descriptions) {
  {
    Rig rig;
    const journal::DeviceDescription d = rig.device->describe(0);
    CHECK(d.total_bytes == 256 << 20 && d.attributes[CU_DEVICE_ATTRIBUTE_WARP_SIZE] == 32);
    CHECK(d.attributes[CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING] == 1);
    CHECK(d.attributes[CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS] == 0);
    for (int a = 1; a < CU_DEVICE_ATTRIBUTE_MAX; ++a) {
      int value = 0;
      OK(rig.d().cuDeviceGetAttribute(&value, static_cast<CUdevice_attribute>(a), 0));
      CHECK(value == d.attributes[a]);
    }
  }
  Rig rig("null", 0);
  const journal::DeviceDescription d = rig.device->describe(0);
  CHECK(std::strcmp(d.name, "NVIDIA H200") == 0 && d.attributes[CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT] == 132);
  CHECK(d.attributes[CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN] == 232448);
  CHECK(d.total_bytes == 150109880320);
}

TEST(refusals) {
  auto refused = [](auto&& open) {
    try {
      open();
    } catch (const std::runtime_error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  const int one[] = {0};
  CHECK(refused([&] { device::open("gpu", one, 0); }).find("\"gpu\"") != std::string::npos);
  CHECK(!refused([&] { device::open("cpu", {}, 0); }).empty());
  const auto first = device::open("cpu", one, 0);
  CHECK(refused([&] { device::open("cpu", one, 0); }).find("already") != std::string::npos);
  int count = 0;
  CHECK_RESULT(CUDA_ERROR_NOT_INITIALIZED, first->driver().cuDeviceGetCount(&count));
}

TEST(every_function) {
  for (const char* kind : {"cpu", "null"}) {
    Rig rig(kind);
    const DriverTable& table = rig.d();
    for_each_driver_function([&](const char* name, auto member) {
      if (!(table.*member)) std::fprintf(stderr, "%s: %s\n", kind, name);
      CHECK(table.*member);
    });
  }
}

TEST(null_device) {
  Rig rig("null");
  const auto& d = rig.d();
  const CUdeviceptr a = rig.memory(64ull << 30);  // addresses only
  rig.load();
  CHECK(rig.functions.contains("parameters") && rig.device->globals(rig.module).size() == 2);
  rig.launch("store", {}, uint64_t{0});
  const CUstream stream = rig.stream();
  const CUevent event = rig.event(), other = rig.event();
  CHECK(event != other);
  OK(d.cuEventRecordWithFlags(event, stream, 0));
  OK(d.cuEventQuery(event));
  float ms = -1;
  OK(d.cuEventElapsedTime_v2(&ms, event, event));
  CHECK(ms >= 0);
  std::vector<uint8_t> got(100, 9);
  OK(d.cuMemcpyDtoHAsync_v2(got.data(), a, 100, stream));
  CHECK(got == std::vector<uint8_t>(100, 0));
  const device::Chunk chunks[] = {{a, 2 << 20}, {a + (2 << 20), 2 << 20}};
  uint64_t hashes[2] = {1, 2};
  CHECK(rig.device->hash(chunks, hashes) && hashes[0] == hashes[1]);
  CHECK(rig.device->copy(a, a + 4096, 4096));

  // Host functions are run, elsewhere, and waited for.
  static std::thread::id thread;
  OK(d.cuLaunchHostFunc(stream, [](void*) { thread = std::this_thread::get_id(); }, nullptr));
  OK(d.cuStreamSynchronize(stream));
  CHECK(thread != std::thread::id() && thread != std::this_thread::get_id());

  CUmodule module = nullptr;
  OK(d.cuModuleLoadData(&module, ".version 8.0\n.target sm_90\n.visible .entry f() { ret; }"));
  OK(d.cuModuleUnload(module));
}

TEST(null_exports) {
  Rig rig("null");
  CUmemGenericAllocationHandle handle = 0;
  const CUmemAllocationProp prop = Rig::property();
  OK(rig.d().cuMemCreate(&handle, 1 << 30, &prop, 0));
  int fd = -1;
  OK(rig.d().cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  struct stat status{};
  CHECK(fstat(fd, &status) == 0 && status.st_size == 1 << 30 && status.st_blocks == 0);
  close(fd);
  OK(rig.d().cuMemRelease(handle));
}
