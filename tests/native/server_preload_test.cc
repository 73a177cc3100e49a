// How much a standby loads ahead, and the target of a move, on a device whose memory others take at the same time.
#include <fcntl.h>
#include <sys/stat.h>

#include <cstring>

#include "check.h"
#include "cpu_behind.h"
#include "ops.h"
#include "server/cuda/objects/module_preload.h"

namespace {

using namespace xmig;
using namespace xmig::server;

constexpr uint32_t kModules = 100;
constexpr uint64_t kMiB = 1 << 20;
constexpr uint64_t kOfOthers = 100 * kMiB;  // what goes with each module, most of it taken by others
constexpr uint64_t kCounted = 4 * kMiB;     // what is believed to be a small module's own, at most

size_t g_free = 0;
uint64_t g_loaded = 0;

// The cpu device, whose memory becomes less with each module.
class Shrinking final : public device::CpuBehind {
 public:
  explicit Shrinking(std::unique_ptr<Device> cpu) : CpuBehind(std::move(cpu)) {
    table_.cuMemGetInfo_v2 = [](size_t* free, size_t* total) {
      *free = *total = g_free;
      return CUDA_SUCCESS;
    };
  }
  CUresult load_image(CUmodule* module, std::span<const std::byte> image) override {
    ++g_loaded;
    g_free -= kOfOthers;
    return CpuBehind::load_image(module, image);
  }
};

// A snapshot of many modules, all of one image.
SnapshotContent many_modules(const Hosted& image) {
  SnapshotContent content;
  content.images = {{1, image.bytes}};
  for (uint32_t number = 1; number <= kModules; ++number) {
    journal::RecordHeader header{};
    header.op = static_cast<uint16_t>(Op::xmModuleLoad);
    const Args_xmModuleLoad args{journal::make_handle(journal::Kind::kModule, number), 1};
    std::vector<std::byte> bytes(sizeof(header) + sizeof(args));
    std::memcpy(bytes.data(), static_cast<const void*>(&header), sizeof(header));
    std::memcpy(bytes.data() + sizeof(header), &args, sizeof(args));
    content.objects.add(bytes);
  }
  return content;
}

Hosted image_of(const char* path) {
  ipc::UniqueFd fd(::open(path, O_RDONLY | O_CLOEXEC));
  struct stat status {};
  CHECK(fd && ::fstat(fd.get(), &status) == 0);
  return {1, HostedKind::kImage, 0, 0, static_cast<uint64_t>(status.st_size), "image:1", std::move(fd)};
}

// How many modules are loaded, of those that the snapshot has.
uint64_t loaded(device::Device& device, Contexts& contexts, const Hosted& image, uint64_t most) {
  static Daemon daemon;
  static Log log(daemon);
  ModulePreload preload(device, contexts, log);
  g_free = 1ull << 40;
  g_loaded = 0;
  preload.add(image);
  preload.want(many_modules(image));
  while (preload.pending()) preload.step(most);
  CHECK(preload.report().modules == g_loaded);
  CHECK(preload.report().device_bytes == g_loaded * kCounted);
  preload.clear();
  return g_loaded;
}

}  // namespace

int main(int count, char** words) {
  CHECK(count == 2);
  const int ordinal = 0;
  Shrinking device(device::open("cpu", std::span(&ordinal, 1), 1ull << 30));
  Contexts contexts(device, 1);
  CHECK(device.start() && contexts.open(0));
  const Hosted image = image_of(words[1]);
  CHECK(image.bytes < kCounted);
  CHECK(loaded(device, contexts, image, Preload::kMostOfStandby) == Preload::kMostOfStandby / kCounted + 1);
  CHECK(loaded(device, contexts, image, Preload::kMostOfTarget) == kModules);
  return 0;
}
