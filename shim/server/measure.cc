#include "server/measure.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <vector>

#include "device/device.h"
#include "ipc/fd.h"
#include "journal/layout.h"
#include "journal/mapping.h"
#include "server/channel/hosted.h"
#include "server/clock.h"
#include "server/contexts.h"
#include "server/memory/staging_copy.h"
#include "server/options.h"

namespace xmig::server {
namespace {

using journal::kGranule;

constexpr int kHashes = 9;
constexpr int kCopies = 3;

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
uint64_t allocate(device::Runtime& device, uint64_t bytes) {
  device::MemoryHandle handle = 0;
  uint64_t address = 0;
  const uint32_t ordinal = 0;
  const bool fine = device.create(0, bytes, handle) && device.reserve(journal::kDeviceBase, bytes, kGranule, address) &&
                    device.map(address, bytes, handle) && device.set_access(address, bytes, std::span(&ordinal, 1), true);
  return fine ? address : 0;
}

// As a suspended job's memory is: new, or kept ready as the daemon does (xmigd/memory/host_pool.py).
class HostMemory {
 public:
  HostMemory(uint64_t bytes, uint64_t device, bool kept) {
    for (uint64_t at = 0; at < bytes; at += kPlainBytes) {
      const uint64_t size = std::min(kPlainBytes, bytes - at);
      const int fd = memfds_.emplace_back(::memfd_create("xmig-measure", MFD_CLOEXEC)).get();
      const uint64_t mapped = kept ? keep_ready(fd, size) : 0;
      for (uint64_t in = 0; in < size; in += kGranule) {
        pieces_.push_back({device + at + in, fd, in, 0, mapped == 0 ? 0 : mapped + in});
      }
    }
  }
  const std::vector<StagingCopy::Piece>& pieces() const { return pieces_; }

 private:
  // Huge pages, or small ones where the kernel makes none. Where it is mapped.
  uint64_t keep_ready(int fd, uint64_t size) {
    if (::ftruncate(fd, static_cast<off_t>(size)) != 0) return 0;
    const char nothing = 0;
    for (uint64_t at = 0; at < size; at += kGranule) {
      if (::pwrite(fd, &nothing, 1, static_cast<off_t>(at)) != 1) return 0;
    }
    const journal::Mapping& reserved = mapped_.emplace_back(
        ::mmap(nullptr, size + kGranule, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), size + kGranule);
    if (!reserved) return 0;
    const auto start = (reinterpret_cast<uintptr_t>(reserved.data()) + kGranule - 1) / kGranule * kGranule;
    void* const mapped = ::mmap(reinterpret_cast<void*>(start), size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
    if (mapped == MAP_FAILED) return 0;
    if (::madvise(mapped, size, kCollapse) != 0) ::fallocate(fd, 0, 0, static_cast<off_t>(size));
    return start;
  }

  static constexpr int kCollapse = 25;  // MADV_COLLAPSE, which the C library's header may be too old for
  std::vector<ipc::UniqueFd> memfds_;
  std::vector<journal::Mapping> mapped_;
  std::vector<StagingCopy::Piece> pieces_;
};

}  // namespace

int measure(const std::string& name, uint64_t mib) {
  Options options;
  if (!parse_device(name, options)) return fail("'" + name + "' is no device");
  const uint64_t granules = std::max<uint64_t>(1, (mib << 20) / kGranule), bytes = granules * kGranule;
  const uint64_t start = now_ns();
  const auto device = device::open(options.device_kind, options.ordinals, bytes + (64ull << 20));
  Contexts contexts(*device, 1);
  if (!device->start() || !contexts.open(0)) return fail("the device cannot be used");
  const uint64_t opened = now_ns();
  contexts.use(0);
  const uint64_t memory = allocate(*device, bytes);
  if (memory == 0) return fail("the device has no room for " + std::to_string(mib) + " MiB");
  device->driver().cuMemsetD32Async(memory, 1, bytes / 4, nullptr);
  static_cast<void>(device->synchronize());

  std::vector<device::Chunk> chunks;
  std::vector<uint64_t> hashes(granules);
  for (uint64_t i = 0; i < granules; ++i) chunks.push_back({memory + i * kGranule, kGranule});
  nlohmann::json result = {{"bytes", bytes}, {"open_ms", static_cast<double>(opened - start) / 1e6}};
  result["hash_gb_s"] = speed(bytes, kHashes, [&] { return device->hash(chunks, hashes, {}); });

  // As a snapshot copies: the first half to the second, where no two neighbours stay neighbours.
  std::vector<device::Move> moves;
  const uint64_t half = granules / 2;
  for (uint64_t i = 0; i < half; ++i) {
    const uint64_t to = i % 2 == 0 ? i / 2 : half - 1 - i / 2;
    moves.push_back({memory + (half + to) * kGranule, memory + i * kGranule, kGranule});
  }
  result["copy_and_hash_gb_s"] = speed(half * kGranule, kHashes, [&] { return device->copy_and_hash(moves, hashes, {}); });

  std::string why;
  const auto good = [&why](const Result<>& copied) {
    if (!copied) why = copied.why();
    return static_cast<bool>(copied);
  };
  for (const size_t threads : {8, 16}) {
    StagingCopy staging_copy(*device, [&](uint32_t ordinal) { contexts.use(ordinal); }, threads);
    auto& reported = result["threads"][std::to_string(threads)];
    const auto take = [&](const std::string& way, int runs, const std::function<bool()>& run) {
      staging_copy.spent();
      reported[way + "_gb_s"] = speed(bytes, runs, run);
      const StagingCopy::Spent spent = staging_copy.spent();
      reported[way + "_thread_ms"] = {{"copying", spent.copying_ns / 1'000'000}, {"device", spent.waiting_ns / 1'000'000},
                                  {"buffers", spent.making_ns / 1'000'000}};
    };
    {
      const HostMemory fresh(bytes, memory, false);
      take("to_new", 1, [&] { return good(staging_copy.to_plain(fresh.pieces())); });
    }
    const HostMemory kept(bytes, memory, true);
    take("to_kept", kCopies, [&] { return good(staging_copy.to_plain(kept.pieces())); });
    take("from_kept", kCopies, [&] { return good(staging_copy.to_device(kept.pieces())); });
    if (!why.empty()) return fail(why);
  }
  std::printf("%s\n", result.dump().c_str());
  return 0;
}

}  // namespace xmig::server
