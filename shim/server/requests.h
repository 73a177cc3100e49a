// What the daemon may ask of a server: its messages, checked and typed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "device/device.h"
#include "ipc/fd.h"
#include "server/hosted.h"

namespace xmig::server {

enum class AssignMode { kFresh, kRecover, kLost };

// A fault that belongs to the program: redo up to this record, then hand it over.
struct Delivery {
  uint64_t sequence;
  int error;
};

// The records after `after`, up to `until`: one by one, to find the one whose work faults.
struct Careful {
  uint64_t after;
  uint64_t until;
};

struct JobFds {
  ipc::UniqueFd journal, staging, pinned, cut[2];
};

struct Assign {
  std::string job;
  AssignMode mode = AssignMode::kFresh;
  int client_pid = 0;
  double cut_budget = 0.01;
  double hang_timeout = 0;  // seconds; 0: never
  std::optional<Delivery> deliver;
  std::optional<Careful> careful;
  std::vector<device::Injection> injections;
  int error = 0;  // kLost
  std::string text;
  JobFds fds;
};
struct MemoryAdd {
  Hosted memory;
};
struct Go {};
struct Inject {
  device::Injection injection;
};
struct TakeCut {};
struct Pause {};
struct Rebind {
  ipc::UniqueFd journal, staging, pinned;
  int client_pid = 0;  // 0: as before
};
struct Continue {};
struct Stop {
  std::string reason;
};

using Request = std::variant<Assign, MemoryAdd, Go, Inject, TakeCut, Pause, Rebind, Continue, Stop>;

inline constexpr size_t kMaxMessageBytes = 64 << 10;
inline constexpr size_t kMaxRequestFds = 5;

// Nothing, and `why`, if the message does not fit its schema.
std::optional<Request> parse_request(std::span<const std::byte> message, std::vector<ipc::UniqueFd> fds,
                                     std::string& why);

}  // namespace xmig::server
