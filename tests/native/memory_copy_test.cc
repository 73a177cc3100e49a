// Copies of every kind, whole and by rows, small and larger than any piece, and pinned memory.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "journal/layout.h"
#include "local.h"
#include "memory_fake.h"

namespace client = xmig::client;
using namespace xmig::client;
using fake::server;

namespace {

constexpr uint64_t kMiB = 1ull << 20;

void map_pinned() {
  const int fd = ::memfd_create("pinned", MFD_CLOEXEC);
  CHECK(fd >= 0 && ::ftruncate(fd, xmig::journal::kPinnedBytes) == 0);
  void* const at = reinterpret_cast<void*>(xmig::journal::kPinnedBase);
  constexpr int kFlags = MAP_SHARED | MAP_FIXED_NOREPLACE | MAP_NORESERVE;
  CHECK(::mmap(at, xmig::journal::kPinnedBytes, PROT_READ | PROT_WRITE, kFlags, fd, 0) == at);
  ::close(fd);
}

CUdeviceptr address(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

// Three places for bytes: device, pinned, pageable.
struct Memory {
  enum Kind { kDevice, kPinned, kPageable };
  Memory(Kind kind, size_t bytes) : kind(kind), bytes(bytes) {
    if (kind == kDevice) CHECK(client::cuMemAlloc_v2(&at, bytes) == CUDA_SUCCESS);
    if (kind == kPinned) {
      void* pointer = nullptr;
      CHECK(client::cuMemHostAlloc(&pointer, bytes, 0) == CUDA_SUCCESS);
      at = address(pointer);
    }
    if (kind == kPageable) {
      own.resize(bytes);
      at = address(own.data());
    }
  }
  ~Memory() {
    if (kind == kDevice) CHECK(client::cuMemFree_v2(at) == CUDA_SUCCESS);
    if (kind == kPinned) CHECK(client::cuMemFreeHost(data()) == CUDA_SUCCESS);
  }
  Memory(const Memory&) = delete;
  unsigned char* data() { return reinterpret_cast<unsigned char*>(at); }
  void fill(uint64_t seed) {
    std::mt19937_64 random(seed);
    for (size_t i = 0; i < bytes; i += 8) {
      const uint64_t eight = random();
      std::memcpy(data() + i, &eight, std::min<size_t>(8, bytes - i));
    }
  }
  Kind kind;
  size_t bytes;
  CUdeviceptr at = 0;
  std::vector<unsigned char> own;
};

const Memory::Kind kKinds[] = {Memory::kDevice, Memory::kPinned, Memory::kPageable};

void one_dimension() {
  for (const size_t bytes : {size_t{1}, size_t{4096}, size_t{16 << 10}, (size_t{16} << 10) + 1, size_t{5 * kMiB + 3}}) {
    for (const auto from : kKinds) {
      for (const auto to : kKinds) {
        Memory source(from, bytes), destination(to, bytes);
        for (int form = 0; form < 2; ++form) {
          source.fill(bytes + static_cast<uint64_t>(form));
          const CUresult result = form ? client::cuMemcpyAsync(destination.at, source.at, bytes, fake::stream(1))
                                       : client::cuMemcpy(destination.at, source.at, bytes);
          CHECK(result == CUDA_SUCCESS);
          CHECK(std::memcmp(destination.data(), source.data(), bytes) == 0);
        }
        const bool from_device = from != Memory::kPageable, to_device = to != Memory::kPageable;
        const auto expect = [](bool allowed) { return allowed ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; };
        CHECK(client::cuMemcpyHtoD_v2(destination.at, source.data(), bytes) == expect(to_device));
        CHECK(client::cuMemcpyDtoH_v2(destination.data(), source.at, bytes) == expect(from_device));
        CHECK(client::cuMemcpyDtoD_v2(destination.at, source.at, bytes) == expect(from_device && to_device));
      }
    }
  }
}

void two_dimensions() {
  constexpr size_t kPitch = 700, kWidth = 333, kHeight = 900, kX = 11, kY = 5;
  constexpr size_t kOtherPitch = 1024;
  for (const auto from : kKinds) {
    for (const auto to : kKinds) {
      Memory source(from, kPitch * (kHeight + kY)), destination(to, kOtherPitch * kHeight);
      source.fill(3);
      std::memset(destination.data(), 0, destination.bytes);
      CUDA_MEMCPY2D c{};
      c.srcMemoryType = c.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
      c.srcDevice = source.at;
      c.srcPitch = kPitch;
      c.srcXInBytes = kX;
      c.srcY = kY;
      c.dstDevice = destination.at;
      c.dstPitch = kOtherPitch;
      c.WidthInBytes = kWidth;
      c.Height = kHeight;
      CHECK(client::cuMemcpy2D_v2(&c) == CUDA_SUCCESS);
      for (size_t row = 0; row < kHeight; ++row) {
        const unsigned char* const expected = source.data() + (row + kY) * kPitch + kX;
        CHECK(std::memcmp(destination.data() + row * kOtherPitch, expected, kWidth) == 0);
        CHECK(destination.data()[row * kOtherPitch + kWidth] == 0);
      }
      c.Height = kHeight + 1;
      if (from != Memory::kPageable) CHECK(client::cuMemcpy2D_v2(&c) == CUDA_ERROR_INVALID_VALUE);
      c.Height = 2;
      c.srcPitch = kWidth;
      CHECK(client::cuMemcpy2DAsync_v2(&c, nullptr) == CUDA_ERROR_INVALID_VALUE);  // kX does not fit
    }
  }
  // Rows that are larger than any piece.
  Memory source(Memory::kDevice, 2 * (3 * kMiB)), destination(Memory::kPageable, 2 * (2 * kMiB + 5));
  source.fill(4);
  CUDA_MEMCPY2D c{};
  c.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  c.dstMemoryType = CU_MEMORYTYPE_HOST;
  c.srcDevice = source.at;
  c.srcPitch = 3 * kMiB;
  c.dstHost = destination.data();
  c.WidthInBytes = 2 * kMiB + 5;
  c.Height = 2;
  CHECK(client::cuMemcpy2D_v2(&c) == CUDA_SUCCESS);
  CHECK(std::memcmp(destination.data() + c.WidthInBytes, source.data() + 3 * kMiB, c.WidthInBytes) == 0);
}

void three_dimensions() {
  constexpr size_t kPitch = 64, kRows = 10, kDepth = 4, kWidth = 48, kHeight = 7;
  Memory source(Memory::kPageable, kPitch * kRows * kDepth), device(Memory::kDevice, kPitch * kRows * kDepth),
      destination(Memory::kPinned, kWidth * kHeight * kDepth);
  source.fill(5);
  CHECK(client::cuMemcpyHtoD_v2(device.at, source.data(), source.bytes) == CUDA_SUCCESS);
  CUDA_MEMCPY3D c{};
  c.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  c.srcDevice = device.at;
  c.srcPitch = kPitch;
  c.srcHeight = kRows;
  c.srcZ = 1;
  c.dstMemoryType = CU_MEMORYTYPE_HOST;
  c.dstHost = destination.data();
  c.dstPitch = kWidth;
  c.dstHeight = kHeight;
  c.WidthInBytes = kWidth;
  c.Height = kHeight;
  c.Depth = kDepth - 1;
  CHECK(client::cuMemcpy3D_v2(&c) == CUDA_SUCCESS);
  for (size_t z = 0; z + 1 < kDepth; ++z) {
    for (size_t y = 0; y < kHeight; ++y) {
      CHECK(std::memcmp(destination.data() + (z * kHeight + y) * kWidth,
                        source.data() + ((z + 1) * kRows + y) * kPitch, kWidth) == 0);
    }
  }
  c.srcMemoryType = CU_MEMORYTYPE_ARRAY;
  CHECK(client::cuMemcpy3D_v2(&c) == CUDA_ERROR_NOT_SUPPORTED);
}

void errors() {
  Memory device(Memory::kDevice, 1000), host(Memory::kPageable, 2000);
  CHECK(client::cuMemcpyHtoD_v2(device.at, host.data(), 1001) == CUDA_ERROR_INVALID_VALUE);
  CHECK(client::cuMemcpyHtoD_v2(device.at, nullptr, 10) == CUDA_ERROR_INVALID_VALUE);
  CHECK(client::cuMemcpyHtoD_v2(0, host.data(), 10) == CUDA_ERROR_INVALID_VALUE);
  CHECK(client::cuMemcpyDtoH_v2(host.data(), device.at + 990, 11) == CUDA_ERROR_INVALID_VALUE);
  CHECK(client::cuMemcpyDtoH_v2(host.data(), device.at, ~0ull) == CUDA_ERROR_INVALID_VALUE);
  CHECK(client::cuMemcpyDtoH_v2(nullptr, 0, 0) == CUDA_SUCCESS);
  CHECK(client::cuMemcpyHtoDAsync_v2(device.at, host.data(), 10, reinterpret_cast<CUstream>(0x1234)) ==
        CUDA_ERROR_INVALID_HANDLE);
  // An error in the middle of a copy by pieces: it is returned, and the slots are free again.
  Memory large(Memory::kDevice, 9 * kMiB), target(Memory::kPageable, 9 * kMiB);
  for (int i = 0; i < 8; ++i) {
    server.fail_next = "xmCopyToHost";
    CHECK(client::cuMemcpyDtoH_v2(target.data(), large.at, large.bytes) == CUDA_ERROR_UNKNOWN);
  }
  CHECK(client::cuMemcpyDtoH_v2(target.data(), large.at, large.bytes) == CUDA_SUCCESS);
}

void memsets() {
  Memory device(Memory::kDevice, 1024), pinned(Memory::kPinned, 1024);
  for (Memory* memory : {&device, &pinned}) {
    CHECK(client::cuMemsetD16_v2(memory->at + 2, 0xabcd, 4) == CUDA_SUCCESS);
    CHECK(memory->data()[2] == 0xcd && memory->data()[9] == 0xab);
    CHECK(client::cuMemsetD16_v2(memory->at + 1, 1, 1) == CUDA_ERROR_INVALID_VALUE);
    CHECK(client::cuMemsetD32_v2(memory->at, 1, 257) == CUDA_ERROR_INVALID_VALUE);
    CHECK(client::cuMemsetD2D8_v2(memory->at, 100, 1, 101, 2) == CUDA_ERROR_INVALID_VALUE);
  }
}

void pinned() {
  unsigned int flags = 0;
  void* pointer = nullptr;
  CHECK(client::cuMemHostAlloc(&pointer, 5 * kMiB, CU_MEMHOSTALLOC_PORTABLE) == CUDA_SUCCESS);
  CHECK(address(pointer) % (2 * kMiB) == 0);
  CHECK(client::cuMemHostGetFlags(&flags, pointer) == CUDA_SUCCESS);
  CHECK(flags == (CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
  CUdeviceptr device = 0;
  CHECK(client::cuMemHostGetDevicePointer_v2(&device, static_cast<char*>(pointer) + 3, 0) == CUDA_SUCCESS);
  CHECK(device == address(pointer) + 3);
  std::memset(pointer, 9, 5 * kMiB);
  const size_t waits = server.count("cuCtxSynchronize");
  CHECK(client::cuMemFreeHost(pointer) == CUDA_SUCCESS);
  CHECK(server.count("cuCtxSynchronize") == waits + 1);
  CHECK(*static_cast<char*>(pointer) == 0);  // its pages went back to the system
  CHECK(client::cuMemFreeHost(pointer) == CUDA_ERROR_INVALID_VALUE);
  CHECK(client::cuMemHostAlloc(&pointer, 1ull << 45, 0) == CUDA_ERROR_OUT_OF_MEMORY);
  CHECK(client::cuMemHostAlloc(&pointer, 200ull << 30, 0) == CUDA_ERROR_OUT_OF_MEMORY);  // with one clear line
  CHECK(client::cuMemHostAlloc(&pointer, 0, 0) == CUDA_ERROR_INVALID_VALUE);
}

void threads() {
  std::vector<std::thread> all;
  for (uint64_t seed = 0; seed < 6; ++seed) {
    all.emplace_back([seed] {
      Memory device(Memory::kDevice, 6 * kMiB), source(Memory::kPageable, 6 * kMiB), back(Memory::kPageable, 6 * kMiB);
      source.fill(seed);
      CHECK(client::cuMemcpyHtoD_v2(device.at, source.data(), source.bytes) == CUDA_SUCCESS);
      for (int i = 0; i < 5; ++i) {
        std::memset(back.data(), 0, back.bytes);
        CHECK(client::cuMemcpyDtoHAsync_v2(back.data(), device.at, back.bytes, nullptr) == CUDA_SUCCESS);
        CHECK(std::memcmp(back.data(), source.data(), back.bytes) == 0);
      }
    });
  }
  for (std::thread& thread : all) thread.join();
}

}  // namespace

int main() {
  map_pinned();
  one_dimension();
  two_dimensions();
  three_dimensions();
  errors();
  memsets();
  pinned();
  threads();
  CHECK(server.live.empty());
}
