// Memory, copies, fills, hashing.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <numeric>

#include "device_harness.h"
#include "xxhash.h"

TEST(memory_maps) {
  Rig rig;
  const auto& d = rig.d();
  const uint64_t granule = journal::kGranule;
  CUmemAllocationProp prop = Rig::property();
  CUmemGenericAllocationHandle handle = 0;
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuMemCreate(&handle, granule + 1, &prop, 0));
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuMemCreate(&handle, 0, &prop, 0));
  prop.location.id = 1;
  CHECK_RESULT(CUDA_ERROR_INVALID_DEVICE, d.cuMemCreate(&handle, granule, &prop, 0));
  prop.location.id = 0;
  size_t free_before = 0, free_after = 0, total = 0;
  OK(d.cuMemGetInfo_v2(&free_before, &total));
  CHECK(total == 256 << 20 && free_before == total);
  OK(d.cuMemCreate(&handle, 2 * granule, &prop, 0));

  const CUdeviceptr at = Rig::kBase + 8 * granule;
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuMemMap(0x1000000, granule, 0, handle, 0));        // not reserved
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuMemMap(at, 3 * granule, 0, handle, 0));           // more than there is
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuMemMap(at + 4096, granule, 0, handle, 0));        // between granules
  OK(d.cuMemMap(at, 2 * granule, 0, handle, 0));
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuMemMap(at + granule, granule, 0, handle, 0));     // taken
  CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuMemSetAccess(at, 4 * granule, &access, 1));
  OK(d.cuMemSetAccess(at, 2 * granule, &access, 1));
  rig.poke<uint64_t>(at + granule, 77);

  // Another handle of the same memory, as a successor gets it.
  int fd = -1;
  OK(d.cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  CHECK(fcntl(fd, F_GETFD) & FD_CLOEXEC);
  CHECK(ftruncate(fd, 0) != 0);  // nobody can take the memory away
  OK(d.cuMemRelease(handle));
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuMemRelease(handle));
  CHECK(rig.peek<uint64_t>(at + granule) == 77);  // the mapping keeps it
  CUmemGenericAllocationHandle imported = 0;
  void* const os_handle = reinterpret_cast<void*>(static_cast<intptr_t>(fd));
  OK(d.cuMemImportFromShareableHandle(&imported, os_handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  OK(d.cuMemUnmap(at, 2 * granule));
  OK(d.cuMemMap(at, 2 * granule, 0, imported, 0));
  OK(d.cuMemSetAccess(at, 2 * granule, &access, 1));
  CHECK(rig.peek<uint64_t>(at + granule) == 77);
  close(fd);
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuMemUnmap(at, granule));  // half a mapping
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuMemAddressFree(Rig::kBase, Rig::kSpan));
  OK(d.cuMemUnmap(at, 2 * granule));
  OK(d.cuMemRelease(imported));
  OK(d.cuMemGetInfo_v2(&free_after, nullptr));
  CHECK(free_after == free_before);

  // What is no memory of ours is refused: it could shrink.
  const int foreign = memfd_create("foreign", MFD_CLOEXEC);
  CHECK(ftruncate(foreign, static_cast<off_t>(granule)) == 0);
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE,
               d.cuMemImportFromShareableHandle(&imported, reinterpret_cast<void*>(static_cast<intptr_t>(foreign)),
                                                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  close(foreign);

  // A hint that cannot be honoured is an error, not another address.
  CUdeviceptr got = 0;
  CHECK_RESULT(CUDA_ERROR_OUT_OF_MEMORY, d.cuMemAddressReserve(&got, granule, 0, Rig::kBase, 0));
  OK(d.cuMemAddressReserve(&got, granule, 64 << 20, 0, 0));
  CHECK(got % (64 << 20) == 0);
  OK(d.cuMemAddressFree(got, granule));
}

TEST(memory_runs_out) {
  Rig rig("cpu", 8 << 20);
  const CUmemAllocationProp prop = Rig::property();
  std::vector<CUmemGenericAllocationHandle> handles(4);
  for (auto& handle : handles) OK(rig.d().cuMemCreate(&handle, 2 << 20, &prop, 0));
  CUmemGenericAllocationHandle more = 0;
  CHECK_RESULT(CUDA_ERROR_OUT_OF_MEMORY, rig.d().cuMemCreate(&more, 2 << 20, &prop, 0));
  OK(rig.d().cuMemRelease(handles.back()));
  OK(rig.d().cuMemCreate(&more, 2 << 20, &prop, 0));

  // No descriptors, and no memory in the machine: the same answer, from the same call.
  const pid_t child = fork();
  if (child == 0) {
    OK(rig.d().cuMemRelease(more));
    const rlimit files{3, 3};
    setrlimit(RLIMIT_NOFILE, &files);
    CHECK_RESULT(CUDA_ERROR_OUT_OF_MEMORY, rig.d().cuMemCreate(&more, 2 << 20, &prop, 0));
    const rlimit open{1024, 1024};
    setrlimit(RLIMIT_NOFILE, &open);
    std::_Exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && status == 0);

  const pid_t second = fork();
  if (second == 0) {
    OK(rig.d().cuMemRelease(more));
    signal(SIGXFSZ, SIG_IGN);
    const rlimit size{1 << 20, 1 << 20};
    setrlimit(RLIMIT_FSIZE, &size);
    CHECK_RESULT(CUDA_ERROR_OUT_OF_MEMORY, rig.d().cuMemCreate(&more, 2 << 20, &prop, 0));
    std::_Exit(0);
  }
  CHECK(waitpid(second, &status, 0) == second && status == 0);
}

TEST(copies) {
  Rig rig;
  const auto& d = rig.d();
  const CUdeviceptr a = rig.memory(1 << 20), b = rig.memory(1 << 20);
  std::vector<uint8_t> data(1 << 20), got(1 << 20);
  std::iota(data.begin(), data.end(), 0);
  const CUstream stream = rig.stream();
  {
    // Pageable memory is read before the call returns, also if the stream is far behind.
    Gate gate(rig, stream);
    std::vector<uint8_t> source = data;
    OK(d.cuMemcpyHtoDAsync_v2(a, source.data(), source.size(), stream));
    std::fill(source.begin(), source.end(), 0xee);
    OK(d.cuMemcpyDtoDAsync_v2(b, a, data.size(), stream));
    OK(d.cuMemcpyDtoHAsync_v2(got.data(), b, got.size(), stream));
    gate.open();
    OK(d.cuStreamSynchronize(stream));
    CHECK(got == data);
  }
  {
    // Page-locked memory is read when the copy runs.
    std::vector<uint8_t> source(4096, 1);
    OK(d.cuMemHostRegister_v2(source.data(), source.size(), 0));
    CHECK_RESULT(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, d.cuMemHostRegister_v2(source.data() + 8, 8, 0));
    Gate gate(rig, stream);
    OK(d.cuMemcpyHtoDAsync_v2(a, source.data(), source.size(), stream));
    std::fill(source.begin(), source.end(), 2);
    gate.open();
    OK(d.cuStreamSynchronize(stream));
    CHECK(rig.peek<uint8_t>(a + 4095) == 2);
    OK(d.cuMemHostUnregister(source.data()));
    CHECK_RESULT(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, d.cuMemHostUnregister(source.data()));
  }
  CUDA_MEMCPY2D copy{};
  copy.srcMemoryType = CU_MEMORYTYPE_HOST;
  copy.srcHost = data.data();
  copy.srcPitch = 100;
  copy.srcXInBytes = 3;
  copy.srcY = 2;
  copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.dstDevice = a;
  copy.dstPitch = 64;
  copy.WidthInBytes = 50;
  copy.Height = 20;
  OK(d.cuMemcpy2DAsync_v2(&copy, stream));
  OK(d.cuStreamSynchronize(stream));
  for (unsigned row = 0; row < 20; ++row)
    CHECK(std::memcmp(reinterpret_cast<void*>(a + row * 64), data.data() + (row + 2) * 100 + 3, 50) == 0);
  copy.dstPitch = 49;
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuMemcpy2DAsync_v2(&copy, stream));
  copy.dstPitch = 64;
  copy.Height = ~0ull / 32;
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuMemcpy2DAsync_v2(&copy, stream));
  copy.srcMemoryType = CU_MEMORYTYPE_ARRAY;
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuMemcpy2DAsync_v2(&copy, stream));

  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuMemcpyDtoDAsync_v2(a, 0x1234560000, 8, stream));
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuMemcpyHtoDAsync_v2(a, nullptr, 8, stream));
  OK(d.cuMemcpyHtoDAsync_v2(a, nullptr, 0, stream));
  CHECK_RESULT(CUDA_ERROR_INVALID_HANDLE,
               d.cuMemcpyDtoDAsync_v2(a, b, 8, reinterpret_cast<CUstream>(0x5300000000009999)));
}

TEST(fills) {
  Rig rig;
  const auto& d = rig.d();
  const CUdeviceptr a = rig.memory(1 << 20);
  OK(d.cuMemsetD8Async(a, 0x11, 1 << 20, nullptr));
  OK(d.cuMemsetD16Async(a + 2, 0x2222, 3, nullptr));
  OK(d.cuMemsetD32Async(a + 12, 0x33333333, 2, nullptr));
  OK(d.cuMemsetD2D8Async(a + 4096, 64, 0x44, 8, 4, nullptr));
  OK(d.cuMemsetD2D16Async(a + 8192, 64, 0x5555, 8, 4, nullptr));
  OK(d.cuMemsetD2D32Async(a + 12288, 64, 0x66666666, 8, 4, nullptr));
  OK(d.cuCtxSynchronize());
  const auto* p = reinterpret_cast<const uint8_t*>(a);
  CHECK(p[0] == 0x11 && p[1] == 0x11 && p[2] == 0x22 && p[7] == 0x22 && p[8] == 0x11 && p[12] == 0x33 &&
        p[19] == 0x33 && p[20] == 0x11);
  CHECK(p[4096 + 3 * 64 + 7] == 0x44 && p[4096 + 3 * 64 + 8] == 0x11 && p[4096 + 4 * 64] == 0x11);
  CHECK(p[8192 + 64 + 15] == 0x55 && p[8192 + 64 + 16] == 0x11);
  CHECK(p[12288 + 64 + 31] == 0x66 && p[12288 + 64 + 32] == 0x11);
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuMemsetD16Async(a + 1, 0, 1, nullptr));
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuMemsetD32Async(a + 2, 0, 1, nullptr));
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuMemsetD32Async(a, 0, ~0ull / 2, nullptr));
}

TEST(hash_and_copy) {
  Rig rig;
  const uint64_t chunk = journal::kGranule, chunks = 16;
  const CUdeviceptr a = rig.memory(chunk * chunks), b = rig.memory(chunk * chunks);
  for (uint64_t i = 0; i < chunks; ++i) rig.poke<uint64_t>(a + i * chunk + 8 * i, i + 1);
  std::vector<device::Chunk> list;
  for (uint64_t i = 0; i < chunks; ++i) list.push_back({a + i * chunk, i % 3 == 0 ? chunk - 512 : chunk});
  std::vector<uint64_t> hashes(chunks);
  CHECK(rig.device->hash(list, hashes, {}));
  for (uint64_t i = 0; i < chunks; ++i)
    CHECK(hashes[i] == rig.device->hash_of({reinterpret_cast<const std::byte*>(list[i].address), list[i].bytes}));
  CHECK(rig.copy(b, a, chunk * chunks - 3));
  CHECK(std::memcmp(reinterpret_cast<void*>(a), reinterpret_cast<void*>(b), chunk * chunks - 3) == 0);
  rig.d().cuMemsetD8Async(b, 0, chunk * chunks, nullptr);
  rig.d().cuCtxSynchronize();
  std::vector<device::Move> moves;
  for (uint64_t i = 0; i < chunks; ++i) moves.push_back({b + (chunks - 1 - i) * chunk, list[i].address, list[i].bytes});
  std::vector<uint64_t> copied(chunks);
  CHECK(rig.device->copy_and_hash(moves, copied, {}));
  CHECK(copied == hashes);
  for (const device::Move& move : moves)
    CHECK(std::memcmp(reinterpret_cast<void*>(move.to), reinterpret_cast<void*>(move.from), move.bytes) == 0);
  moves.push_back({b, rig.hole(), chunk});
  copied.resize(moves.size());
  CHECK(!rig.device->copy_and_hash(moves, copied, {}));
  list.push_back({rig.hole(), chunk});
  hashes.resize(list.size());
  CHECK(!rig.device->hash(list, hashes, {}));
  CHECK(!rig.copy(rig.hole(), a, chunk));
  CHECK(rig.device->fault().error == 0);  // the device is not to blame
}

TEST(two_devices) {
  Rig rig("cpu", 64 << 20, 2);
  const auto& d = rig.d();
  CUcontext other = nullptr;
  int count = 0;
  OK(d.cuDeviceGetCount(&count));
  CHECK(count == 2);
  OK(d.cuDevicePrimaryCtxRetain(&other, 1));
  CHECK_RESULT(CUDA_ERROR_INVALID_DEVICE, d.cuDevicePrimaryCtxRetain(&other, 2));
  CUuuid first{}, second{};
  OK(d.cuDeviceGetUuid_v2(&first, 0));
  OK(d.cuDeviceGetUuid_v2(&second, 1));
  CHECK(std::memcmp(&first, &second, sizeof(first)) != 0);
  CHECK(std::memcmp(first.bytes, rig.device->describe(0).uuid, 16) == 0);
  // A stream belongs to its context, whichever is current; an event of one may be awaited in the other.
  const CUstream stream = rig.stream();
  const CUevent event = rig.event();
  OK(d.cuCtxSetCurrent(other));
  const CUstream there = rig.stream();
  CHECK_RESULT(CUDA_ERROR_INVALID_HANDLE, d.cuEventRecordWithFlags(event, there, 0));
  Gate gate(rig, stream);
  OK(d.cuEventRecordWithFlags(event, stream, 0));
  OK(d.cuStreamWaitEvent(there, event, 0));
  CHECK_RESULT(CUDA_ERROR_NOT_READY, d.cuStreamQuery(there));
  gate.open();
  OK(d.cuStreamSynchronize(there));
  // Memory counts for the device that it is of, also when it comes from outside.
  CUmemAllocationProp prop = Rig::property(1);
  CUmemGenericAllocationHandle handle = 0;
  OK(d.cuMemCreate(&handle, 4 << 20, &prop, 0));
  size_t free = 0;
  OK(d.cuMemGetInfo_v2(&free, nullptr));
  CHECK(free == 60 << 20);
}

// What is mapped for one device is not there for another one, until it is mapped for that one too.
TEST(memory_of_another_device) {
  Rig rig("cpu", 64 << 20, 2);
  const auto& d = rig.d();
  CUcontext other = nullptr;
  OK(d.cuDevicePrimaryCtxRetain(&other, 1));
  const CUdeviceptr a = rig.memory(4096), b = rig.memory(4096);
  const CUmemAccessDesc none{{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_NONE};
  const CUmemAccessDesc second{{CU_MEM_LOCATION_TYPE_DEVICE, 1}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  const CUmemAccessDesc reads{{CU_MEM_LOCATION_TYPE_DEVICE, 1}, CU_MEM_ACCESS_FLAGS_PROT_READ};
  OK(d.cuMemSetAccess(b, journal::kGranule, &second, 1));
  OK(d.cuMemSetAccess(b, journal::kGranule, &none, 1));  // the second device's alone
  rig.poke<uint64_t>(a, 7);
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuMemcpyDtoDAsync_v2(b, a, 8, nullptr));
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuMemcpyDtoDAsync_v2(a, b, 8, nullptr));
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuMemsetD8Async(b, 1, 8, nullptr));
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuMemcpyHtoDAsync_v2(b, &rig, 8, nullptr));
  uint64_t word = 0;
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuMemcpyDtoHAsync_v2(&word, b, 8, nullptr));
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuStreamWriteValue64_v2(nullptr, b, 1, 0));
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuMemcpyPeerAsync(b, rig.context, a, rig.context, 8, nullptr));
  OK(d.cuMemcpyPeerAsync(b, other, a, rig.context, 8, nullptr));
  OK(d.cuStreamSynchronize(nullptr));
  CHECK(rig.peek<uint64_t>(b) == 7);

  // Reading is not writing.
  OK(d.cuMemSetAccess(a, journal::kGranule, &reads, 1));
  OK(d.cuCtxSetCurrent(other));
  OK(d.cuMemcpyDtoDAsync_v2(b, a, 8, nullptr));
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuMemcpyDtoDAsync_v2(a, b, 8, nullptr));
  OK(d.cuStreamSynchronize(nullptr));

  OK(d.cuCtxSetCurrent(rig.context));
  rig.load();
  rig.launch("add", {2, 64}, a, uint64_t{8}, uint64_t{1});
  OK(d.cuStreamSynchronize(nullptr));
  rig.launch("add", {2, 64}, b, uint64_t{8}, uint64_t{1});
  CHECK_RESULT(CUDA_ERROR_ILLEGAL_ADDRESS, d.cuStreamSynchronize(nullptr));
  CHECK(rig.peek<uint64_t>(b) == 7);
  CHECK(rig.device->fault().text.find("mapped for other devices") != std::string::npos);
}
