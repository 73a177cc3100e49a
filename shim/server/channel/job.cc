#include "server/channel/job.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace xmig::server {
namespace {

// The program maps these files too. One that it could make shorter would kill the server (SIGBUS) wherever it reads.
Result<> seal(int fd, const char* what) {
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals >= 0 && (seals & F_SEAL_SHRINK)) return {};
  if (seals >= 0 && ::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0) return {};
  return Error{std::string("the ") + what + " file can be made shorter and cannot be sealed (" + std::strerror(errno) +
               "): it must be a memfd made with MFD_ALLOW_SEALING"};
}

uint64_t file_bytes(int fd) {
  struct stat status {};
  return ::fstat(fd, &status) == 0 ? static_cast<uint64_t>(status.st_size) : 0;
}

Error failed(const char* what) { return {std::string("cannot map the ") + what + ": " + std::strerror(errno)}; }

}  // namespace

Result<Job> Job::map(std::string name, int client_pid, JobFds fds, std::vector<uint64_t> quota_slots) {
  Job job;
  job.name_ = std::move(name);
  job.client_pid_ = client_pid;
  job.fds_ = std::move(fds);
  job.quota_slots_ = std::move(quota_slots);
  if (Result<> mapped = job.map_shared(); !mapped) return mapped.error();
  return job;
}

Result<> Job::map_shared() {
  if (Result<> sealed = seal(fds_.journal.get(), "journal"); !sealed) return sealed;
  if (Result<> sealed = seal(fds_.staging.get(), "staging"); !sealed) return sealed;
  if (Result<> sealed = seal(fds_.pinned.get(), "pinned"); !sealed) return sealed;
  auto journal = journal::JournalMapping::map(fds_.journal.get());
  if (!journal) return failed("journal");
  if (file_bytes(fds_.staging.get()) < journal::kStagingBytes) return Error{"the staging file is too short"};
  auto staging = journal::Mapping::anywhere(fds_.staging.get(), journal::kStagingBytes);
  if (!staging) return failed("staging slots");
  const uint64_t pinned_bytes = std::min(file_bytes(fds_.pinned.get()), journal::kPinnedBytes);
  pinned_.reset();  // a new file goes to the same address
  auto pinned = journal::Mapping::at(journal::kPinnedBase, fds_.pinned.get(), pinned_bytes);
  if (!pinned) return failed("pinned memory");
  journal_ = std::move(*journal);
  staging_ = std::move(staging);
  pinned_ = std::move(pinned);
  return {};
}

Result<> Job::rebind(Rebind request) {
  const uint64_t ring_bytes = journal_.ring_bytes();
  fds_.journal = std::move(request.journal);
  fds_.staging = std::move(request.staging);
  fds_.pinned = std::move(request.pinned);
  if (request.client_pid != 0) client_pid_ = request.client_pid;
  if (Result<> mapped = map_shared(); !mapped) return mapped;
  if (journal_.ring_bytes() == ring_bytes) return {};
  return Error{"the journal has another size than before"};
}

}  // namespace xmig::server
