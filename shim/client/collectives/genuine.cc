#include "client/collectives/genuine.h"

#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <sys/stat.h>

#include <cstdlib>
#include <mutex>
#include <vector>

#include "client/bootstrap/native.h"
#include "client/bootstrap/process.h"
#include "nccl_client.h"

namespace xmig::client {
namespace {

constexpr const char* kSoname = "libnccl.so.2";
constexpr int kParents = 4;  // of site-packages, above a framework's library

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos || slash == 0 ? std::string() : path.substr(0, slash);
}

// Of this process's own: the one of ours is in the shim's folder.
std::string own_folder() {
  Dl_info own{};
  return ::dladdr(&process, &own) && own.dli_fname ? folder_of(own.dli_fname) : std::string();
}

std::vector<std::string> loaded_folders() {
  std::vector<std::string> folders;
  ::dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* user) {
        if (info->dlpi_name && info->dlpi_name[0] == '/') static_cast<std::vector<std::string>*>(user)->push_back(folder_of(info->dlpi_name));
        return 0;
      },
      &folders);
  return folders;
}

std::string usable(const std::string& path, const std::string& own) {
  char whole[PATH_MAX];
  struct stat status {};
  if (!::realpath(path.c_str(), whole) || ::stat(whole, &status) != 0 || !S_ISREG(status.st_mode)) return {};
  return folder_of(whole) == own ? std::string() : std::string(whole);
}

std::string find() {
  const std::string own = own_folder();
  if (const char* const given = std::getenv("XMIG_NATIVE_LIBNCCL"); given && *given) return usable(given, own);
  std::string last;
  for (const std::string& folder : loaded_folders()) {
    if (folder == last) continue;
    last = folder;
    if (std::string found = usable(folder + "/" + kSoname, own); !found.empty()) return found;
    std::string above = folder;
    for (int i = 0; i < kParents && !above.empty(); ++i, above = folder_of(above)) {
      if (std::string found = usable(above + "/nvidia/nccl/lib/" + kSoname, own); !found.empty()) return found;
    }
  }
  for (const std::string& path : installed_paths(kSoname)) {
    if (std::string found = usable(path, own); !found.empty()) return found;
  }
  return {};
}

}  // namespace

// Looked for again as long as there is none: the framework that brings it may be loaded later.
std::string genuine_nccl() {
  static std::mutex& mutex = *new std::mutex;
  static std::string& found = *new std::string;
  const std::lock_guard lock(mutex);
  if (found.empty()) found = find();
  return found;
}

const char* native_nccl() {
  if (process.phase.load(std::memory_order_acquire) != Phase::kNative) return nullptr;
  static const std::string& path = *new std::string(genuine_nccl());
  return path.empty() ? nullptr : path.c_str();
}

}  // namespace xmig::client
