// A job's shared memory, as the server sees it.
#pragma once

#include <string>
#include <vector>

#include "common/result.h"
#include "journal/mapping.h"
#include "journal/ring.h"
#include "server/channel/requests.h"

namespace xmig::server {

class Job {
 public:
  // Map what the daemon gave.
  static Result<Job> map(std::string name, int client_pid, JobFds fds, std::vector<uint64_t> quota_slots = {});
  // The program was restored from a dump: other files with the same content, at the same addresses where it matters.
  Result<> rebind(Rebind request);

  const std::string& name() const { return name_; }
  int client_pid() const { return client_pid_; }
  const JobFds& fds() const { return fds_; }
  const std::vector<uint64_t>& quota_slots() const { return quota_slots_; }

  journal::JournalHeader& header() const { return journal_.header(); }
  const journal::JournalMapping& journal() const { return journal_; }
  const journal::Mapping& staging() const { return staging_; }
  const journal::Mapping& pinned() const { return pinned_; }
  // Is [address, address + bytes) page-locked host memory of the program?
  bool is_pinned(uint64_t address, uint64_t bytes) const {
    return address >= journal::kPinnedBase && address - journal::kPinnedBase <= pinned_.size() &&
           bytes <= pinned_.size() - (address - journal::kPinnedBase);
  }

 private:
  Result<> map_shared();

  std::string name_;
  int client_pid_ = 0;
  JobFds fds_;
  std::vector<uint64_t> quota_slots_;
  journal::JournalMapping journal_;
  journal::Mapping staging_, pinned_;
};

}  // namespace xmig::server
