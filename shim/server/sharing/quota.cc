#include "server/sharing/quota.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "server/clock.h"

namespace xmig::server {
namespace {

using journal::kGranule;
using quota::kSequenceBits;

constexpr uint64_t kSequenceMask = (1ull << kSequenceBits) - 1;
// A server has the lock for less than a microsecond. One that was stopped with it is not waited for: the allocation fails.
constexpr uint64_t kLockPatience = 1'000'000'000;
// Records. What a word has of a number is unique among many more, and a journal holds far fewer.
constexpr uint64_t kOld = 1ull << 32;

uint64_t word(uint64_t bytes, uint64_t sequence) {
  return std::min(bytes / kGranule, quota::kMostGranules) << kSequenceBits | (sequence & kSequenceMask);
}

uint64_t bytes_in(uint64_t claim) { return (claim >> kSequenceBits) * kGranule; }

// The number with these last bits that is nearest to `near`.
uint64_t sequence_in(uint64_t claim, uint64_t near) {
  const int64_t ahead = static_cast<int64_t>((claim - near) << (64 - kSequenceBits)) >> (64 - kSequenceBits);
  return ahead < 0 && near < static_cast<uint64_t>(-ahead) ? 0 : near + static_cast<uint64_t>(ahead);
}

// Of this process, not of the open file: that one is the same in the daemon.
class Lock {
 public:
  explicit Lock(int file) : file_(file) {
    const uint64_t until = now_ns() + kLockPatience;
    while (!(held_ = change(F_WRLCK)) && now_ns() < until) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  ~Lock() {
    if (held_) change(F_UNLCK);
  }
  Lock(const Lock&) = delete;
  explicit operator bool() const { return held_; }

 private:
  bool change(short type) const {
    struct flock all {};
    all.l_type = type;
    all.l_whence = SEEK_SET;
    return ::fcntl(file_, F_SETLK, &all) == 0;
  }

  const int file_;
  bool held_ = false;
};

}  // namespace

Result<> Quota::use(int file, std::span<const uint64_t> slots, uint64_t bytes) {
  struct stat found {};
  if (::fstat(file, &found) != 0 || static_cast<size_t>(found.st_size) < sizeof(quota::Page)) return Error{"the quota's page is too small, or no file"};
  // One that shrinks would end this process.
  const int seals = ::fcntl(file, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) return Error{"the quota's page is not sealed"};
  page_ = journal::Mapping::anywhere(file, sizeof(quota::Page));
  if (!page_) return Error{std::string("the quota's page cannot be mapped: ") + std::strerror(errno)};
  if (page().header.magic != quota::kMagic) return Error{"the quota's page has another layout"};
  file_ = file;
  bytes_ = bytes;
  devices_ = static_cast<uint32_t>(slots.size());
  std::ranges::transform(slots, slots_.begin(), [](uint64_t slot) { return static_cast<uint32_t>(slot); });
  return {};
}

// What all others of the device have, in bytes.
uint64_t Quota::others(uint32_t ordinal) const {
  const quota::Page& all = page();
  const uint32_t own = slots_[ordinal], used = std::min(all.header.used.load(), quota::kSlots);
  const uint64_t device = mine(ordinal).device.load();
  uint64_t granules = 0;
  for (uint32_t i = 0; i < used; ++i) {
    const quota::Slot& slot = all.slots[i];
    if (i != own && slot.state.load() != 0 && slot.device.load() == device) granules += slot.claim.load() >> kSequenceBits;
  }
  return granules * kGranule;
}

uint64_t Quota::claimed(uint32_t ordinal) const { return bytes_in(mine(ordinal).claim.load()); }

uint64_t Quota::left(uint32_t ordinal) const {
  const uint64_t taken = others(ordinal) + claimed(ordinal);
  return bytes_ - std::min(bytes_, taken);
}

bool Quota::claim(uint32_t ordinal, uint64_t bytes, uint64_t sequence) {
  const Lock lock(file_);
  if (!lock || bytes > bytes_ || bytes / kGranule > quota::kMostGranules || others(ordinal) > bytes_ - bytes) return false;
  set(ordinal, bytes, sequence);
  return true;
}

void Quota::set(uint32_t ordinal, uint64_t bytes, uint64_t sequence) {
  mine(ordinal).claim.store(word(bytes, sequence));
  stored_[ordinal] = sequence;
}

void Quota::take_over(uint32_t ordinal, uint64_t bytes, uint64_t sequence) {
  const uint64_t claim = mine(ordinal).claim.load();
  if (claim == 0) set(ordinal, bytes, sequence);  // nobody had claimed anything
  stored_[ordinal] = counted_[ordinal] = claim == 0 ? sequence : sequence_in(claim, sequence);
}

void Quota::refresh(uint64_t sequence) {
  for (uint32_t ordinal = 0; ordinal < devices_; ++ordinal) {
    if (counted(ordinal, sequence) || sequence - stored_[ordinal] < kOld) continue;
    set(ordinal, bytes_in(mine(ordinal).claim.load()), sequence);
  }
}

}  // namespace xmig::server
