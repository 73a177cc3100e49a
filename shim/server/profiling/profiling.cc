#include "server/profiling/profiling.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

namespace xmig::server {

Result<std::shared_ptr<ProfilingPage>> ProfilingPage::map(ipc::UniqueFd file, size_t least) {
  struct stat found {};
  if (::fstat(file.get(), &found) != 0 || static_cast<size_t>(found.st_size) < least) return Error{"it is too small, or no file"};
  // One that shrinks would end this process.
  if ((::fcntl(file.get(), F_GET_SEALS) & F_SEAL_SHRINK) == 0) return Error{"it is not sealed"};
  const auto size = static_cast<size_t>(found.st_size);
  void* const mapped = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (mapped == MAP_FAILED) return Error{std::string("it cannot be mapped: ") + std::strerror(errno)};
  return std::shared_ptr<ProfilingPage>(new ProfilingPage(static_cast<std::byte*>(mapped), size));
}

ProfilingPage::~ProfilingPage() { ::munmap(bytes_, size_); }

Result<> Profiling::profile(ipc::UniqueFd file, uint32_t every) {
  auto page = ProfilingPage::map(std::move(file), profiling::kProfileBytes);
  if (!page) return page.error();
  const std::lock_guard lock(mutex_);
  wanted_.profile = std::move(*page);
  wanted_.every = every;
  changes_.fetch_add(1, std::memory_order_release);
  return {};
}

Result<> Profiling::trace(ipc::UniqueFd file) {
  auto page = ProfilingPage::map(std::move(file), profiling::kSmallestTrace);
  if (!page) return page.error();
  const std::lock_guard lock(mutex_);
  wanted_.trace = std::move(*page);
  wanted_.end = false;
  changes_.fetch_add(1, std::memory_order_release);
  return {};
}

void Profiling::end_trace() {
  const std::lock_guard lock(mutex_);
  if (!wanted_.trace || wanted_.end) return;
  wanted_.end = true;
  changes_.fetch_add(1, std::memory_order_release);
}

Profiling::Wanted Profiling::wanted() const {
  const std::lock_guard lock(mutex_);
  return wanted_;
}

}  // namespace xmig::server
