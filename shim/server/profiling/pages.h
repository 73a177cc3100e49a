// What a server writes down of its program's work, in memory that the daemon gives it and reads: a profile, which is always there, and
// a trace, which is there while somebody has requested one. Each is a memfd of a fixed size, so neither can grow; a server that dies
// leaves in it what it has written. docs/profiling.md describes both; xmigd/profiling/pages.py reads them, and believes nothing.
//
// One writer, the executor's thread. Numbers are little-endian, times are CLOCK_MONOTONIC in ns.
#pragma once

#include <cstddef>
#include <cstdint>

namespace xmig::server::profiling {

// What an operation is. The daemon has the same numbers.
enum class Kind : uint32_t {
  kKernel,
  kToDevice,
  kToHost,
  kOnDevice,
  kBetweenDevices,
  kFill,
  kGraph,
  kCollective,
  kSnapshot,  // xMIG's own from here on
  kReplay,
  kRestore,
};

inline constexpr uint32_t kVersion = 1;

// --- the profile: a header, entries, a ring of what was launched, a ring of times

inline constexpr uint64_t kProfileMagic = 0x31666f7270676d78;  // "xmgprof1"
inline constexpr uint32_t kEntries = 1024;
inline constexpr uint32_t kLaunches = 1 << 16;
inline constexpr uint32_t kTicks = 1 << 12;
inline constexpr uint32_t kRecent = 48;

struct ProfileHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t entries;     // that are written
  uint64_t began;
  uint64_t launches;    // kernels, graphs and collectives since then: as many have been put into the ring
  uint64_t ticks;       // that have been put into the other ring
  uint64_t live_bytes;  // of the program's memory
  uint64_t peak_bytes;  // since the server has the process
  uint64_t unlisted;    // operations for which no entry was left
  uint64_t samples;     // operations that were timed
  uint64_t dropped;     // of these, without a result: too many were under way
};

// Operations of one kind, name and shape, on one device.
struct ProfileEntry {
  uint64_t calls;
  uint64_t timed;     // of these
  uint64_t total_ns;  // of those that were timed
  uint64_t bytes;     // copied, filled, sent and received, by all calls; 0: a kernel's
  uint64_t reachable_bytes;  // of a kernel: allocations that the parameters of the last call that was timed point into
  uint32_t kind;
  uint32_t ordinal;
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared_bytes;
  uint32_t blocks_per_processor;  // that a multiprocessor holds at once, by the driver; 0: not known
  uint32_t processors;            // of the device; likewise
  uint32_t threads_per_processor;
  uint32_t memory_mbps;  // MB/s that its memory gives at most, by the driver; 0: not known
  float recent_ns[kRecent];  // of the last calls that were timed: [timed % kRecent] is the next one
  char name[228];
};
static_assert(sizeof(ProfileEntry) == 512);

// How many launches there had been at a time.
struct Tick {
  uint64_t launches;
  uint64_t at;
};

inline constexpr size_t kEntriesAt = 4096;
inline constexpr size_t kLaunchesAt = kEntriesAt + kEntries * sizeof(ProfileEntry);
inline constexpr size_t kTicksAt = kLaunchesAt + kLaunches * sizeof(uint32_t);
inline constexpr size_t kProfileBytes = kTicksAt + kTicks * sizeof(Tick);

// --- the trace: a header, then pieces one after another

inline constexpr uint64_t kTraceMagic = 0x3165636172676d78;  // "xmgtrac1"
inline constexpr size_t kPiecesAt = 4096;
inline constexpr size_t kSmallestTrace = kPiecesAt + (64 << 10);

struct TraceHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t ended;    // 1: the daemon has requested the end, and all is written
  uint64_t began;
  uint64_t written;  // bytes of whole pieces
  uint64_t dropped;  // operations that are not in it: there was no room, or too many were under way
};

enum class Piece : uint32_t { kName = 1, kEvent = 2 };
struct PieceHeader {
  uint32_t type;
  uint32_t bytes;  // all of it, a multiple of 8
};
// The text follows.
struct NamePiece {
  PieceHeader header;
  uint32_t number;
  uint32_t length;
};
struct EventPiece {
  PieceHeader header;
  uint32_t kind;
  uint32_t name;
  uint32_t ordinal;
  uint32_t stream;  // a number of its own for each stream; 0: none, work of xMIG's
  uint64_t began;
  uint64_t took;  // ns
  uint64_t bytes;
  uint64_t sequence;  // of the record; 0: none
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared_bytes;
  uint32_t replayed;  // 1: it was executed before, by a server that is lost
};
static_assert(sizeof(EventPiece) == 88);

inline constexpr size_t kLongestName = 1000;

}  // namespace xmig::server::profiling
