#include "server/measure.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <vector>

#include "device/device.h"
#include "ipc/fd.h"
#include "journal/layout.h"
#include "server/bounce.h"
#include "server/clock.h"
#include "server/contexts.h"
#include "server/hosted.h"
#include "server/options.h"

namespace xmig::server {
namespace {

using journal::kGranule;

constexpr int kRuns = 5;

int fail(const std::string& why) {
  std::fprintf(stderr, "xmig-server: %s\n", why.c_str());
  return 1;
}

// GB/s, the median of some runs; 0 if one failed.
double speed(uint64_t bytes, int runs, const std::function<bool()>& run) {
  std::vector<double> speeds;
  for (int i = 0; i < runs; ++i) {
    const uint64_t start = now_ns();
    if (!run()) return 0;
    speeds.push_back(static_cast<double>(bytes) / static_cast<double>(std::max<uint64_t>(1, now_ns() - start)));
  }
  std::sort(speeds.begin(), speeds.end());
  return speeds[speeds.size() / 2];
}

// As a job's memory is. 0 if there is none. It goes with the process.
CUdeviceptr allocate(const DriverTable& driver, uint64_t bytes) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  CUmemAccessDesc access{};
  access.location = properties.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  CUmemGenericAllocationHandle handle = 0;
  CUdeviceptr address = 0;
  const bool fine = driver.cuMemCreate(&handle, bytes, &properties, 0) == CUDA_SUCCESS &&
                    driver.cuMemAddressReserve(&address, bytes, kGranule, journal::kDeviceBase, 0) == CUDA_SUCCESS &&
                    driver.cuMemMap(address, bytes, 0, handle, 0) == CUDA_SUCCESS &&
                    driver.cuMemSetAccess(address, bytes, &access, 1) == CUDA_SUCCESS;
  return fine ? address : 0;
}

}  // namespace

int measure(const std::string& name, uint64_t mib) {
  Options options;
  if (!parse_device(name, options)) return fail("'" + name + "' is no device");
  const uint64_t granules = std::max<uint64_t>(1, (mib << 20) / kGranule), bytes = granules * kGranule;
  const auto device = device::open(options.device_kind, options.ordinals, bytes + (64ull << 20));
  const DriverTable& driver = device->driver();
  Contexts contexts(driver);
  const uint64_t start = now_ns();
  if (driver.cuInit(0) != CUDA_SUCCESS) return fail("the driver cannot be used");
  const uint64_t initialised = now_ns();
  if (contexts.open(1) != CUDA_SUCCESS) return fail("the device cannot be used");
  const uint64_t opened = now_ns();
  contexts.use(0);
  const CUdeviceptr memory = allocate(driver, bytes);
  if (memory == 0) return fail("the device has no room for " + std::to_string(mib) + " MiB");
  driver.cuMemsetD32Async(memory, 1, bytes / 4, nullptr);
  driver.cuCtxSynchronize();

  std::vector<device::Chunk> chunks;
  std::vector<uint64_t> hashes(granules);
  for (uint64_t i = 0; i < granules; ++i) chunks.push_back({memory + i * kGranule, kGranule});
  nlohmann::json result = {{"bytes", bytes},
                           {"driver_ms", static_cast<double>(initialised - start) / 1e6},
                           {"context_ms", static_cast<double>(opened - initialised) / 1e6}};
  result["hash_gb_s"] = speed(bytes, kRuns, [&] { return device->hash(chunks, hashes); });

  std::string why;
  for (const size_t threads : {4, 8, 16, 32}) {
    Bounce bounce(driver, [&](uint32_t ordinal) { contexts.use(ordinal); }, threads);
    std::vector<ipc::UniqueFd> memfds;
    std::vector<Bounce::Piece> pieces;
    for (uint64_t at = 0; at < bytes; at += kPlainBytes) {
      memfds.emplace_back(::memfd_create("xmig-measure", MFD_CLOEXEC));
      for (uint64_t in = 0; in < std::min(kPlainBytes, bytes - at); in += kGranule) {
        pieces.push_back({memory + at + in, memfds.back().get(), in, 0});
      }
    }
    auto& said = result["threads"][std::to_string(threads)];
    const auto take = [&](const std::string& way, int runs, const std::function<bool()>& run) {
      bounce.spent();
      said[way + "_gb_s"] = speed(bytes, runs, run);
      const Bounce::Spent spent = bounce.spent();
      said[way + "_thread_ms"] = {{"kernel", spent.copying_ns / 1'000'000}, {"device", spent.waiting_ns / 1'000'000},
                                  {"buffers", spent.making_ns / 1'000'000}};
    };
    take("to_new_memfds", 1, [&] { return bounce.to_plain(pieces, why); });
    take("to_memfds", kRuns, [&] { return bounce.to_plain(pieces, why); });
    take("from_memfds", kRuns, [&] { return bounce.to_device(pieces, why); });
    if (!why.empty()) return fail(why);
  }
  std::printf("%s\n", result.dump().c_str());
  return 0;
}

}  // namespace xmig::server
