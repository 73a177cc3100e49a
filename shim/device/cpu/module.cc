#include "device/cpu/module.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>

#include <cerrno>
#include <algorithm>
#include <cstring>

#include "device/cpu/log.h"

#ifndef MFD_EXEC
#define MFD_EXEC 0x0010U
#endif

namespace xmig::device::cpu {
namespace {

constexpr int kDefaultDynamicShared = 49152;

ipc::UniqueFd create_file(Bytes image) {
  constexpr char kName[] = "xmig-module";
  int fd = memfd_create(kName, MFD_CLOEXEC | MFD_EXEC);
  if (fd < 0 && errno == EINVAL) fd = memfd_create(kName, MFD_CLOEXEC);  // Linux before 6.3
  ipc::UniqueFd out(fd);
  for (size_t done = 0; out && done < image.size();) {
    const ssize_t n = write(out.get(), image.data() + done, image.size() - done);
    if (n > 0) {
      done += static_cast<size_t>(n);
    } else if (n == 0 || errno != EINTR) {
      out.reset();
    }
  }
  if (!out) XMIG_CPU_LOG("cannot store a module image of %zu bytes: %s", image.size(), std::strerror(errno));
  return out;
}

// A path that the dynamic linker does not know yet: a library that refused to be unloaded may still have this one.
std::string unused_path(ipc::UniqueFd& fd) {
  std::vector<ipc::UniqueFd> taken;
  for (;;) {
    std::string path = "/proc/self/fd/" + std::to_string(fd.get());
    void* known = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (!known) return path;
    dlclose(known);
    ipc::UniqueFd next(fcntl(fd.get(), F_DUPFD_CLOEXEC, fd.get() + 1));
    if (!next) return "";
    taken.push_back(std::move(fd));
    fd = std::move(next);
  }
}

}  // namespace

CUresult Module::load(Bytes bytes, std::function<void(const Trap&)> unload_fault, std::shared_ptr<Module>& out,
                      Trap& trap) {
  const auto refuse = [&](const Error& error) {
    XMIG_CPU_LOG("a module image of %zu bytes is refused: %s", bytes.size(), error.text.c_str());
    return result_of(error);
  };
  Result<Image> read = read_shared_object(bytes);
  if (!read) return refuse(read.error());
  if (const Result<> loadable = check_loadable(bytes); !loadable) return refuse(loadable.error());
  Image& image = *read;

  std::shared_ptr<Module> module(new Module);
  module->unload_fault_ = std::move(unload_fault);
  module->fd_ = create_file(bytes);
  if (!module->fd_) return CUDA_ERROR_OUT_OF_MEMORY;
  const std::string path = unused_path(module->fd_);
  if (path.empty()) return CUDA_ERROR_OUT_OF_MEMORY;
  void* volatile library = nullptr;
  if (!guarded(trap, [&] { library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL); })) {
    XMIG_CPU_LOG("a module image's initialiser faulted: %s", trap.describe().c_str());
    return static_cast<CUresult>(trap.error);
  }
  module->library_ = library;
  if (!module->library_) {
    XMIG_CPU_LOG("a module image is refused by the dynamic linker: %s", dlerror());
    return CUDA_ERROR_INVALID_IMAGE;
  }
  link_map* map = nullptr;
  if (dlinfo(module->library_, RTLD_DI_LINKMAP, &map) != 0) return CUDA_ERROR_INVALID_IMAGE;
  auto descriptor = [map](uint64_t address) {
    return reinterpret_cast<const xmig_descriptor*>(static_cast<uint64_t>(map->l_addr) + address);
  };
  for (ImageKernel& kernel : image.kernels) {
    const int room = kDefaultDynamicShared - static_cast<int>(kernel.static_shared_bytes);
    const RunBlock run = descriptor(kernel.descriptor)->run;
    module->functions_.push_back({std::move(kernel), run, std::max(room, 0)});
  }
  for (ImageGlobal& global : image.globals) {
    const xmig_descriptor* d = descriptor(global.descriptor);
    module->globals_.push_back({std::move(global), d->cell, d->initial});
  }
  out = std::move(module);
  return CUDA_SUCCESS;
}

Module::~Module() {
  Trap trap;
  if (library_ && !guarded(trap, [this] { dlclose(library_); })) unload_fault_(trap);
}

bool Module::bind(size_t index, uint64_t address) {
  if (index >= globals_.size()) return false;
  GlobalVariable& g = globals_[index];
  Trap trap;
  const bool bound = guarded(trap, [&] {
    std::memcpy(reinterpret_cast<void*>(address), g.initial, g.global.bytes);
    *g.cell = reinterpret_cast<void*>(address);
  });
  if (bound) g.address = address;
  return bound;
}

}  // namespace xmig::device::cpu
