// The journal's memfd in the address space: the header, and the ring twice in a row, so that a record that runs over
// the ring's end is one piece of memory all the same.
#pragma once

#include <sys/stat.h>

#include <cerrno>
#include <optional>

#include "journal/layout.h"
#include "journal/mapping.h"

namespace xmig::journal {

inline constexpr uint64_t kMinRingBytes = 4ull << 20;  // some of the longest records
inline constexpr uint64_t kMaxRingBytes = 1ull << 36;
static_assert(kMinRingBytes >= 2 * (kMaxPayload + kInlineReplyBytes));

class JournalMapping {
 public:
  JournalMapping() = default;

  // The ring's size follows from the file's; the header's ring_bytes is for the caller to compare. Nothing on failure,
  // with errno: EINVAL if the file cannot be a journal.
  static std::optional<JournalMapping> map(int fd) {
    struct stat status {};
    if (::fstat(fd, &status) != 0) return std::nullopt;
    const uint64_t ring = static_cast<uint64_t>(status.st_size) - kHeaderBytes;
    if (static_cast<uint64_t>(status.st_size) < kHeaderBytes + kMinRingBytes || ring > kMaxRingBytes ||
        ring % kPageBytes != 0) {
      errno = EINVAL;
      return std::nullopt;
    }
    JournalMapping journal;
    const size_t bytes = kHeaderBytes + 2 * ring;
    journal.mapping_ = Mapping(
        ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0), bytes);
    if (!journal.mapping_) return std::nullopt;
    std::byte* const base = journal.mapping_.data();
    const int protection = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_FIXED;
    if (::mmap(base, kHeaderBytes + ring, protection, flags, fd, 0) == MAP_FAILED ||
        ::mmap(base + kHeaderBytes + ring, ring, protection, flags, fd, kHeaderBytes) == MAP_FAILED) {
      return std::nullopt;
    }
    journal.ring_bytes_ = ring;
    return journal;
  }

  JournalHeader& header() const { return *reinterpret_cast<JournalHeader*>(mapping_.data()); }
  std::byte* ring() const { return mapping_.data() + kHeaderBytes; }
  uint64_t ring_bytes() const { return ring_bytes_; }
  // Up to ring_bytes() from here are one piece.
  std::byte* at(uint64_t position) const { return ring() + position % ring_bytes_; }
  std::byte* data() const { return mapping_.data(); }
  size_t size() const { return mapping_.size(); }

 private:
  static constexpr uint64_t kPageBytes = 4096;
  Mapping mapping_;
  uint64_t ring_bytes_ = 0;
};

}  // namespace xmig::journal
