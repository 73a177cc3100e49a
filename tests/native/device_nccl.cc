// Communicators of GPUs, with a stand-in for NCCL and a driver that only counts streams.
#include <atomic>
#include <filesystem>

#include "device/cuda/nccl.h"
#include "device_harness.h"

namespace {

std::atomic<int> streams{0};
std::atomic<CUresult> work{CUDA_SUCCESS};  // what a stream says of what was begun in it

DriverTable counting_driver() {
  DriverTable driver{};
  driver.cuStreamCreateWithPriority = [](CUstream* stream, unsigned, int) {
    *stream = reinterpret_cast<CUstream>(static_cast<uintptr_t>(++streams));
    return CUDA_SUCCESS;
  };
  driver.cuStreamDestroy_v2 = [](CUstream) {
    --streams;
    return CUDA_SUCCESS;
  };
  driver.cuStreamQuery = [](CUstream) { return work.load(); };
  driver.cuMemHostRegister_v2 = [](void*, size_t, unsigned) { return CUDA_SUCCESS; };
  driver.cuEventCreate = [](CUevent*, unsigned) { return CUDA_SUCCESS; };
  driver.cuEventRecordWithFlags = [](CUevent, CUstream, unsigned) { return CUDA_SUCCESS; };
  driver.cuCtxSetCurrent = [](CUcontext) { return CUDA_SUCCESS; };
  driver.cuDeviceGetUuid_v2 = [](CUuuid*, CUdevice) { return CUDA_SUCCESS; };
  return driver;
}

struct Alone {
  const DriverTable driver = counting_driver();
  std::unique_ptr<device::Collectives> collectives = device::nccl_collectives(driver);
  std::unique_ptr<device::Communicator> communicator;

  Alone() {
    auto joined = join(1);
    CHECK(joined);
    communicator = std::move(*joined);
  }
  // All of these ranks are of this process.
  Result<std::unique_ptr<device::Communicator>> join(uint32_t ranks) {
    device::Place place;
    place.ranks = ranks;
    place.library = std::filesystem::path(kernels_path()).replace_filename("device_nccl_library.so");
    const auto meet = [&](const std::string& offer) -> Result<std::vector<std::string>> { return std::vector(ranks, offer); };
    return collectives->join(place, meet, [] {});
  }
  Result<> warm() {
    std::vector<device::Part> parts{{communicator.get(), [] {}, nullptr, {}}};
    return collectives->warm(parts, [] { return true; });
  }
};

}  // namespace

TEST(nccl_first_operation) {
  Alone rank;
  CHECK(rank.warm() && streams == 0);
}

// Another rank may never come. The stream is not left behind, nor waited for: it ends when the communicator is aborted.
TEST(nccl_first_operation_that_is_not_done) {
  for (const CUresult state : {CUDA_ERROR_NOT_READY, CUDA_ERROR_LAUNCH_FAILED}) {
    for (const bool aborted : {true, false}) {
      work = state;
      Alone rank;
      CHECK(!rank.warm() && streams == 1);
      if (aborted) rank.communicator->abort();
      rank.communicator.reset();
      while (streams != 0) std::this_thread::yield();
    }
  }
}

// Nor if ranks of one process do not come to their first transfers.
TEST(nccl_first_transfers_that_fail) {
  work = CUDA_SUCCESS;
  Alone rank;
  auto joined = rank.join(2);
  CHECK(joined && streams == 0);
  work = CUDA_ERROR_LAUNCH_FAILED;
  CHECK(!rank.join(2));
  while (streams != 0) std::this_thread::yield();
  work = CUDA_SUCCESS;
}
