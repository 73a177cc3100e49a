#include "server/sharing/sharing.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

namespace xmig::server {
namespace {

Result<std::shared_ptr<journal::Mapping>> map(const ipc::UniqueFd& file, int protection) {
  struct stat found {};
  if (::fstat(file.get(), &found) != 0 || static_cast<size_t>(found.st_size) < sizeof(sharing::Page)) return Error{"it is too small, or no file"};
  // One that shrinks would end this process.
  if ((::fcntl(file.get(), F_GET_SEALS) & F_SEAL_SHRINK) == 0) return Error{"it is not sealed"};
  auto mapping = std::make_shared<journal::Mapping>(journal::Mapping::anywhere(file.get(), sizeof(sharing::Page), protection));
  if (!*mapping) return Error{std::string("it cannot be mapped: ") + std::strerror(errno)};
  if (Sharing::Place::page(*mapping).header.magic != sharing::kMagic) return Error{"it has another layout"};
  return mapping;
}

}  // namespace

Result<> Sharing::share(Share request) {
  Place place;
  place.slot = request.slot;
  auto own = map(request.own, PROT_READ | PROT_WRITE);
  if (!own) return own.error();
  place.own = std::move(*own);
  if (request.as == SharingClass::kBestEffort) {
    auto critical = map(request.critical, PROT_READ);
    if (!critical) return critical.error();
    place.critical = std::move(*critical);
  }
  const std::lock_guard lock(mutex_);
  wanted_.as = request.as;
  wanted_.backlog = request.backlog;
  wanted_.backlog_ns = request.backlog_ns;
  wanted_.longest_wait = request.longest_wait;
  wanted_.slice = request.slice;
  wanted_.places[request.ordinal] = std::move(place);
  changes_.fetch_add(1, std::memory_order_release);
  return {};
}

Sharing::Wanted Sharing::wanted() const {
  const std::lock_guard lock(mutex_);
  return wanted_;
}

}  // namespace xmig::server
