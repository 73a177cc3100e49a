#include "server/cuda/objects/module_preload.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <set>
#include <utility>

#include "ops.h"
#include "server/cuda/objects/loading.h"

namespace xmig::server {
namespace {

// What a kernel takes at most, about: the driver takes memory for code in pieces of this size.
constexpr uint64_t kPiece = 4ull << 20;

}  // namespace

std::optional<ModulePreload::Identity> ModulePreload::identify(const Hosted& image) {
  struct stat status {};
  if (::fstat(image.fd.get(), &status) != 0) return std::nullopt;
  const auto size = static_cast<uint64_t>(status.st_size);
  if (image.address > size || image.bytes > size - image.address) return std::nullopt;
  return Identity{status.st_dev, status.st_ino, image.address, image.bytes};
}

void ModulePreload::add(const Hosted& image) {
  const auto name = Images::parse_name(image.name);
  const auto identity = identify(image);
  if (!name || !identity || image.bytes == 0 || image.bytes > kMaxImageBytes) return;
  Image here{image.id, *identity, {}, image.address % kPage};
  const size_t length = image.bytes + here.skipped;
  const auto start = static_cast<off_t>(image.address - here.skipped);
  here.mapping = journal::Mapping(::mmap(nullptr, length, PROT_READ, MAP_PRIVATE, image.fd.get(), start), length);
  if (here.mapping) images_[name->number] = std::move(here);
}

void ModulePreload::drop(uint64_t id) {
  std::erase_if(images_, [&](auto& entry) {
    if (entry.second.id != id) return false;
    std::erase_if(modules_, [&](auto& module) {
      if (module.second.image != entry.first) return false;
      unload(module.second);
      return true;
    });
    return true;
  });
}

void ModulePreload::want(const SnapshotContent& content) {
  std::map<uint64_t, uint64_t> received;
  for (const Images::State& image : content.images) received[image.number] = image.received;
  std::set<uint32_t> wanted;
  work_.clear();
  for (const std::span<const std::byte> stored : content.objects) {
    Record record;
    if (!record.load_stored(stored)) return;
    const uint32_t ordinal = record.header().ordinal;
    if (Args_xmModuleLoad args; record.header().op == static_cast<uint16_t>(Op::xmModuleLoad) && record.arguments(args)) {
      const auto image = images_.find(args.image);
      const bool complete = image != images_.end() && received[args.image] == image->second.identity.bytes;
      if (!complete || !journal::handle_is(args.module, journal::Kind::kModule) || ordinal >= contexts_.count()) continue;
      const uint32_t index = journal::handle_index(args.module);
      wanted.insert(index);
      Entry& entry = modules_[index];
      if (entry.module.real && entry.identity == image->second.identity && entry.ordinal == ordinal) continue;
      unload(entry);
      entry = {args.image, ordinal, image->second.identity, {}};
      work_.push_back({index, std::nullopt});
    } else if (Args_xmKernel args; record.header().op == static_cast<uint16_t>(Op::xmKernel) && record.arguments(args)) {
      if (!journal::handle_is(args.function, journal::Kind::kFunction)) continue;
      const uint32_t function = journal::handle_index(args.function);
      const uint32_t index = function >> kKernelBits, kernel = function & (kMaxKernels - 1);
      if (!wanted.contains(index)) continue;
      const Module& module = modules_[index].module;
      if (!module.real || (kernel < module.kernels.size() && !module.kernels[kernel].loaded)) {
        work_.push_back({index, kernel});
      }
    }
  }
  std::erase_if(modules_, [&](auto& entry) {
    if (wanted.contains(entry.first)) return false;
    unload(entry.second);
    return true;
  });
}

void ModulePreload::step(uint64_t most) {
  if (work_.empty()) return;
  const Work work = work_.front();
  work_.pop_front();
  const auto found = modules_.find(work.module);
  if (found == modules_.end() || report_.device_bytes > most) return;
  Entry& entry = found->second;
  contexts_.use(entry.ordinal);
  const DriverTable& driver = device_.driver();
  // The driver tells of the whole device only: what others take meanwhile must not count as taken here.
  size_t before = 0, after = 0, total = 0;
  uint64_t largest = kPiece;
  driver.cuMemGetInfo_v2(&before, &total);
  if (!work.kernel) {
    load(entry);
    largest = std::max(largest, entry.identity.bytes);
  } else if (*work.kernel < entry.module.kernels.size()) {
    report_.kernels += load_kernel(driver, entry.module.kernels[*work.kernel]) == CUDA_SUCCESS;
  }
  driver.cuMemGetInfo_v2(&after, &total);
  if (after < before) report_.device_bytes += std::min<uint64_t>(before - after, largest);
}

// What cannot be loaded now is loaded, or fails, where it is needed.
void ModulePreload::load(Entry& entry) {
  const auto image = images_.find(entry.image);
  if (image == images_.end()) return;
  const std::span<const std::byte> bytes{image->second.mapping.data() + image->second.skipped,
                                         image->second.identity.bytes};
  Module module;
  if (load_module(device_, log_, bytes, module) != CUDA_SUCCESS) return;
  entry.module = std::move(module);
  ++report_.modules;
}

void ModulePreload::unload(const Entry& entry) {
  if (!entry.module.real) return;
  contexts_.use(entry.ordinal);
  device_.driver().cuModuleUnload(entry.module.real);
}

std::optional<Module> ModulePreload::take(uint32_t index, uint32_t ordinal, const Hosted& image) {
  const auto found = modules_.find(index);
  if (found == modules_.end()) return std::nullopt;
  Entry& entry = found->second;
  if (!entry.module.real || entry.ordinal != ordinal || identify(image) != entry.identity) return std::nullopt;
  Module module = std::move(entry.module);
  modules_.erase(found);
  return module;
}

void ModulePreload::clear() {
  work_.clear();
  for (auto& [index, entry] : modules_) unload(entry);
  modules_.clear();
  images_.clear();
}

}  // namespace xmig::server
