// Physical memory that outlives the server: made here, mapped here, its descriptor sent to the daemon.
//
// A standby maps its process's memory ahead, so that a recovery finds it mapped (docs/decisions/0033). Until the job is its
// own it neither reads nor writes it.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <vector>

#include "common/result.h"
#include "device/runtime.h"
#include "journal/layout.h"
#include "journal/shadow_layout.h"
#include "server/channel/daemon.h"
#include "server/channel/hosted.h"

namespace xmig::server {

using device::Problem;
using device::Status;

using journal::kShadowBase;
using journal::kShadowSpan;

constexpr uint64_t device_base(uint32_t ordinal) { return journal::kDeviceBase + ordinal * journal::kDeviceSpan; }
constexpr uint64_t shadow_base(uint32_t ordinal) { return kShadowBase + ordinal * kShadowSpan; }
// Of what it keeps in host memory.
constexpr uint64_t host_shadow_base(uint32_t ordinal) { return shadow_base(ordinal) + journal::kHostShadowAt; }
// Is [address, address + bytes) inside the device range of this ordinal?
constexpr bool in_device_range(uint32_t ordinal, uint64_t address, uint64_t bytes) {
  return address >= device_base(ordinal) && address - device_base(ordinal) <= journal::kDeviceSpan &&
         bytes <= journal::kDeviceSpan - (address - device_base(ordinal));
}
// The ordinal in whose range an address lies; more than there are if in none.
constexpr uint32_t ordinal_of_device_address(uint64_t address) {
  const uint64_t ordinal = (address - journal::kDeviceBase) / journal::kDeviceSpan;
  return address < journal::kDeviceBase || ordinal >= journal::kMaxDevices ? journal::kMaxDevices
                                                                          : static_cast<uint32_t>(ordinal);
}
// The same of an address that may be in a shadow as well.
constexpr uint32_t ordinal_of_address(uint64_t address) {
  return address < kShadowBase ? ordinal_of_device_address(address)
                               : static_cast<uint32_t>((address - kShadowBase) / kShadowSpan);
}
constexpr bool whole_granules(uint64_t address, uint64_t bytes) {
  return bytes != 0 && address % journal::kGranule == 0 && bytes % journal::kGranule == 0;
}

// Does what the daemon hands over lie where memory of its kind does? What is plain has an address that is its number only.
constexpr bool in_place(HostedKind kind, uint32_t ordinal, uint64_t address, uint64_t bytes) {
  if (ordinal >= journal::kMaxDevices || !whole_granules(address, bytes)) return false;
  if (kind == HostedKind::kDevice) return in_device_range(ordinal, address, bytes);
  const uint64_t base = shadow_base(ordinal);
  return kind == HostedKind::kShadow && address >= base && address - base < kShadowSpan &&
         bytes <= kShadowSpan - (address - base);
}

struct Extent {
  uint64_t address;
  uint64_t bytes;
};

class Physical {
 public:
  Physical(device::Runtime& device, Daemon& daemon, Log& log) : device_(device), daemon_(daemon), log_(log) {}
  ~Physical();
  Physical(const Physical&) = delete;

  // Keep the device and shadow ranges of `devices` ordinals free of anything else. Once is enough.
  Status reserve(uint32_t devices);

  // Memory of the device, mapped at `address`, held by the daemon. On failure nothing is left behind.
  // kBeforehand, here and below: the caller logs a failure, and tells the daemon of what was made, when nobody else can be
  // telling it of everything.
  enum class When { kNow, kBeforehand };
  Result<Hosted> create(HostedKind kind, uint32_t ordinal, uint64_t address, uint64_t bytes, When when = When::kNow);
  // The same from host memory that the device reaches, which takes long: each page is taken and locked.
  Result<Hosted> create_host(HostedKind kind, uint32_t ordinal, uint64_t address, uint64_t bytes);
  // Plain memory (Hosted::plain): host memory, or a file in the directory that keep_files_in() named. Beforehand host
  // memory takes its pages when they are written, which may fail, and otherwise at once.
  // `given`: memory that may be used for it, long enough or not.
  Result<Hosted> create_memfd(HostedKind kind, uint32_t ordinal, uint64_t address, uint64_t bytes, When when = When::kNow,
                              ipc::UniqueFd given = {});
  Result<Hosted> create_file(HostedKind kind, uint32_t ordinal, uint64_t address, uint64_t bytes, When when = When::kNow);
  void keep_files_in(ipc::UniqueFd directory) { directory_ = std::move(directory); }
  // Map what an earlier server made, unless it is mapped already.
  Status adopt(const Hosted& memory);

  // Map it before there is a job, if it is a device's: host memory would be page-locked by two processes. Its device's context
  // is current. What cannot be mapped now is mapped, or fails, when it is adopted.
  void map_ahead(Hosted memory, uint32_t devices);
  void drop_ahead(uint64_t id);
  // The same of what was made here, and is mapped. The daemon hears of it now.
  void made_ahead(Hosted memory);
  // The job is here, with this memory: what else has been mapped goes. Before anything is adopted.
  void keep_ahead(const std::vector<Hosted>& given);
  // Unmap, tell the daemon, forget.
  void release(Hosted& memory);
  // Unmap what belongs to another server.
  void let_go(Hosted& memory);

  // The program's memory of `ordinal` is mapped for this device too, from here on, or no longer; what is mapped already is
  // the caller's to change with set_access().
  void share(uint32_t ordinal, uint32_t device, bool on);
  bool shares(uint32_t ordinal, uint32_t device) const { return (sharers_[ordinal] >> device & 1) != 0; }
  Status set_access(uint64_t address, uint64_t bytes, uint32_t device, bool on);

  uint64_t next_id() { return next_id_++; }
  void taken(uint64_t id) { next_id_ = std::max(next_id_.load(), id + 1); }
  Daemon& daemon() { return daemon_; }
  // What the device reported where a result says why.
  Status status(const Error& error) const { return device_.status(error.number); }

 private:
  Status map(HostedKind kind, uint32_t ordinal, uint64_t address, uint64_t bytes, device::MemoryHandle handle);
  Status map_again(const Hosted& memory);
  static bool long_enough(const ipc::UniqueFd& fd, uint64_t bytes);
  static Status map_host(const Hosted& memory);
  void lock_pages(const Hosted& memory);
  Error failed(std::string why, Status status, When when);
  Error no_memory(Status reported, Status result, uint64_t bytes, When when);
  Error no_pages(const char* where, uint64_t bytes, When when);

  device::Runtime& device_;
  Daemon& daemon_;
  Log& log_;
  std::atomic<uint64_t> next_id_{1};
  std::vector<Extent> reserved_;       // with the driver
  std::vector<Extent> reserved_host_;  // with the kernel
  ipc::UniqueFd directory_;
  std::array<std::atomic<uint32_t>, journal::kMaxDevices> sharers_{};  // a bit for each other device, by ordinal
  std::map<uint64_t, Hosted> ahead_;                                   // by id
};

}  // namespace xmig::server
