#include "client/compat/compile_cache.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "ipc/fd.h"
#include "ipc/whole.h"

namespace xmig::client {
namespace {

constexpr uint64_t kDefaultLimit = 1ull << 30;  // the driver's, from 12.2 on
constexpr uint64_t kLargest = 256ull << 20;     // of keys and of results

struct Header {  // before the key, and that before the result
  char magic[8] = {'x', 'm', 'i', 'g', 'j', 'i', 't', '1'};
  uint64_t key_bytes = 0;
  uint64_t data_bytes = 0;
  uint64_t data_hash = 0;
};

bool make_folders(const std::string& path) {
  for (size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    if (::mkdir(path.substr(0, end).c_str(), 0700) != 0 && errno != EEXIST) return false;
    if (end == std::string::npos) return true;
  }
}

std::string_view variable(const char* name) {
  const char* const value = std::getenv(name);
  return value ? value : "";
}

}  // namespace

std::optional<CompileCache> CompileCache::of_environment() {
  if (const std::string_view disabled = variable("CUDA_CACHE_DISABLE"); !disabled.empty() && disabled != "0") return {};
  uint64_t limit = kDefaultLimit;
  if (const std::string_view size = variable("CUDA_CACHE_MAXSIZE"); !size.empty()) {
    limit = std::strtoull(size.data(), nullptr, 10);
  }
  std::string folder;
  if (const std::string_view path = variable("CUDA_CACHE_PATH"); !path.empty()) {
    folder = std::string(path) + "/xmig";
  } else if (const std::string_view caches = variable("XDG_CACHE_HOME"); caches.starts_with('/')) {
    folder = std::string(caches) + "/xmig/compiled";
  } else if (const std::string_view home = variable("HOME"); home.starts_with('/')) {
    folder = std::string(home) + "/.cache/xmig/compiled";
  } else {
    return {};
  }
  return CompileCache(std::move(folder), limit);
}

std::string CompileCache::path(Key key) const {
  char name[17];
  std::snprintf(name, sizeof(name), "%016llx", static_cast<unsigned long long>(XXH3_64bits(key.data(), key.size())));
  return folder_ + "/" + name;
}

std::optional<std::vector<std::byte>> CompileCache::find(Key key) const {
  const ipc::UniqueFd fd(::open(path(key).c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  struct stat status {};
  if (!fd || ::fstat(fd.get(), &status) != 0 || !S_ISREG(status.st_mode) || status.st_uid != ::geteuid()) return {};
  Header header, expected;
  if (!ipc::read_all(fd.get(), std::as_writable_bytes(std::span(&header, 1)))) return {};
  if (std::memcmp(header.magic, expected.magic, sizeof(header.magic)) != 0 || header.key_bytes != key.size() ||
      header.data_bytes > kLargest ||
      static_cast<uint64_t>(status.st_size) != sizeof(header) + header.key_bytes + header.data_bytes) {
    return {};
  }
  std::vector<std::byte> its_key(key.size()), data(header.data_bytes);
  if (!ipc::read_all(fd.get(), its_key, sizeof(header)) || !std::ranges::equal(its_key, key)) return {};
  if (!ipc::read_all(fd.get(), data, sizeof(header) + key.size())) return {};
  if (XXH3_64bits(data.data(), data.size()) != header.data_hash) return {};
  ::futimens(fd.get(), nullptr);  // it was used now
  return data;
}

bool CompileCache::add(Key key, std::span<const std::byte> data) const {
  if (key.size() > kLargest || data.size() > kLargest) return false;
  Header header;
  header.key_bytes = key.size();
  header.data_bytes = data.size();
  header.data_hash = XXH3_64bits(data.data(), data.size());
  if (!make_folders(folder_) || !make_room(sizeof(header) + key.size() + data.size())) return false;
  std::string temporary = folder_ + "/new-XXXXXX";  // mkostemp's pattern
  const ipc::UniqueFd fd(::mkostemp(temporary.data(), O_CLOEXEC));
  if (!fd) return false;
  const bool written = ipc::write_all(fd.get(), std::as_bytes(std::span(&header, 1))) &&
                       ipc::write_all(fd.get(), key, sizeof(header)) &&
                       ipc::write_all(fd.get(), data, sizeof(header) + key.size());
  if (written && ::rename(temporary.c_str(), path(key).c_str()) == 0) return true;
  ::unlink(temporary.c_str());
  return false;
}

bool CompileCache::make_room(uint64_t bytes) const {
  if (bytes > limit_) return false;
  struct File {
    timespec used;
    uint64_t bytes;
    std::string name;
  };
  std::vector<File> files;
  uint64_t total = 0;
  DIR* const folder = ::opendir(folder_.c_str());
  if (!folder) return false;
  while (const dirent* const entry = ::readdir(folder)) {
    struct stat status {};
    if (::fstatat(::dirfd(folder), entry->d_name, &status, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(status.st_mode)) continue;
    files.push_back({status.st_mtim, static_cast<uint64_t>(status.st_size), entry->d_name});
    total += files.back().bytes;
  }
  std::ranges::sort(files, {}, [](const File& file) { return std::pair(file.used.tv_sec, file.used.tv_nsec); });
  for (const File& file : files) {
    if (total + bytes <= limit_) break;
    if (::unlinkat(::dirfd(folder), file.name.c_str(), 0) == 0) total -= file.bytes;
  }
  ::closedir(folder);
  return total + bytes <= limit_;
}

}  // namespace xmig::client
