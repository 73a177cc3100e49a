#include "client/bootstrap/native.h"

#include <dlfcn.h>
#include <sys/stat.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "client/bootstrap/requested.h"
#include "client/bootstrap/message.h"

// By this symbol a copy of the shim is distinguished from the genuine driver.
extern "C" __attribute__((visibility("default"))) const char xmigShim[] = "xMIG";

namespace xmig::client {

constinit std::atomic<bool> detour{true};

namespace {

constinit std::atomic<void* const*> native_functions{nullptr};

// The loader's own list of where libraries are: /etc/ld.so.cache in the format of glibc 2.32 and later, or earlier ones
// with the old table in front. Only the offsets of names and paths are of interest.
struct CacheHeader {
  char magic[20];  // "glibc-ld.so.cache1.1"
  uint32_t count;
  uint32_t strings_bytes;
  uint32_t unused[5];
};
struct CacheEntry {
  int32_t flags;
  uint32_t key;
  uint32_t value;
  uint32_t os_version;
  uint64_t hardware;
};

std::vector<std::string> cached_paths(const std::string& soname) {
  std::ifstream file("/etc/ld.so.cache", std::ios::binary);
  const std::string all{std::istreambuf_iterator<char>(file), {}};
  const size_t start = all.find("glibc-ld.so.cache1.1");
  std::vector<std::string> paths;
  if (start == std::string::npos || all.size() - start < sizeof(CacheHeader)) return paths;
  const std::string cache = all.substr(start);
  CacheHeader header;
  std::memcpy(&header, cache.data(), sizeof(header));
  const auto text = [&](uint32_t offset) {
    return offset < cache.size() ? std::string(cache.c_str() + offset) : std::string();
  };
  for (uint32_t i = 0; i < header.count; ++i) {
    const size_t at = sizeof(header) + i * sizeof(CacheEntry);
    if (at + sizeof(CacheEntry) > cache.size()) break;
    CacheEntry entry;
    std::memcpy(&entry, cache.data() + at, sizeof(entry));
    if (text(entry.key) == soname) paths.push_back(text(entry.value));
  }
  return paths;
}

std::vector<std::string> candidates() {
  if (const char* given = std::getenv("XMIG_NATIVE_LIBCUDA"); given && *given) return {given};
  return installed_paths("libcuda.so.1");
}

bool is_this_library(const std::string& path) {
  Dl_info own{};
  struct stat a {}, b {};
  return ::dladdr(&detour, &own) && own.dli_fname && ::stat(own.dli_fname, &a) == 0 &&
         ::stat(path.c_str(), &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

}  // namespace

std::vector<std::string> installed_paths(const std::string& soname) {
  std::vector<std::string> paths = cached_paths(soname);
  for (const char* folder : {"/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib",
                             "/usr/local/nvidia/lib64", "/usr/lib/wsl/lib", "/run/opengl-driver/lib"}) {
    paths.push_back(std::string(folder) + "/" + soname);
  }
  return paths;
}

void* take_detour(int slot) {
  void* const* const functions = native_functions.load(std::memory_order_acquire);
  if (requested_wanted()) {
    note_called(slot);
  } else if (!functions) {
    detour.store(false, std::memory_order_release);
    // Somebody may have loaded the genuine driver since.
    if (native_functions.load(std::memory_order_seq_cst)) detour.store(true, std::memory_order_release);
  }
  return functions ? functions[slot] : nullptr;
}

bool load_native() {
  std::string tried;
  for (const std::string& path : candidates()) {
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0 || is_this_library(path)) continue;
    // By its full path: the plain name is this library's own SONAME.
    void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library || ::dlsym(library, "xmigShim")) {
      const char* const why = library ? "it is not the genuine driver" : ::dlerror();
      tried += (tried.empty() ? "" : "; ") + path + ": " + (why ? why : "unknown error");
      continue;
    }
    auto& functions = *new std::vector<void*>(static_cast<size_t>(kNativeCount));
    for (int slot = 0; slot < kNativeCount; ++slot) functions[slot] = ::dlsym(library, kNativeNames[slot]);
    native_functions.store(functions.data());
    detour.store(true);
    return true;
  }
  tell_starter("XMIG_WITHOUT_DAEMON=native, but no genuine libcuda.so.1 could be loaded (%s); set XMIG_NATIVE_LIBCUDA to "
               "its path", tried.empty() ? "none found" : tried.c_str());
  return false;
}

}  // namespace xmig::client
