// The layout of the memory that a client and its server share.
//
// Three memfds, made by the daemon, mapped by both sides at handshake:
//
//   journal   JournalHeader, padded to kHeaderBytes, then the ring. The ring is mapped twice in a row so that a
//             record never wraps. It is queue and replay log at once: a record stays from append until a snapshot has
//             made it unnecessary.
//   staging   staging_copy slots for large copies to pageable client memory.
//   pinned    page-locked host memory of the program, sparse, mapped at kPinnedBase in both processes.
//
// Invariants:
//   trimmed <= executed <= tail, tail - trimmed <= ring_bytes. Positions count bytes since the job began and never
//   wrap; `position % ring_bytes` is the place in the ring.
//   Only the client moves `tail`. Only the server moves `executed` and `trimmed`.
//   Everything here is hostile input to the reader on the other side: copy, then check, then act.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace xmig::journal {

inline constexpr uint64_t kMagic = 0x314c4e4a47494d58;  // "XMIGJNL1"
inline constexpr uint32_t kLayoutVersion = 3;

inline constexpr uint32_t kMaxDevices = 8;
inline constexpr uint32_t kMaxThreads = 1024;
inline constexpr uint32_t kMaxEvents = 1u << 17;
inline constexpr uint32_t kCallbackSlots = 1024;
inline constexpr uint32_t kAttributes = 160;
inline constexpr uint32_t kMaxCommunicators = 1024;  // of a program, at a time

// One address range per device ordinal, at the same place in every client and every server. Under ThreadSanitizer
// the application may map only parts of the address space, so the sanitizer build lives elsewhere, and smaller.
#if defined(__SANITIZE_THREAD__)
inline constexpr uint64_t kDeviceBase = 0x7e8000000000;
inline constexpr uint64_t kDeviceSpan = 1ull << 34;
inline constexpr uint64_t kPinnedBase = kDeviceBase + kMaxDevices * kDeviceSpan;
inline constexpr uint64_t kPinnedBytes = 1ull << 34;
inline constexpr uint64_t kShadowSpan = kDeviceSpan;
#else
inline constexpr uint64_t kDeviceBase = 0x200000000000;
// PyTorch's expandable segments reserve 9/8 of a device's memory each. It keeps one for each kind of block and stream, and
// of a request that no segment is long enough for, two more each time, for ever: of an H200's there is room for 26.
// Programs are loaded at 85 TiB.
inline constexpr uint64_t kDeviceSpan = 4ull << 40;
// A server tells addresses of page-locked memory among a kernel's parameters by their value alone, and two numbers side
// by side must not look like one: right behind the devices that would be any number before 16384, a frequent size.
inline constexpr uint64_t kPinnedBase = kDeviceBase + kMaxDevices * kDeviceSpan + 0x1b75c000000;
inline constexpr uint64_t kPinnedBytes = 1ull << 38;
inline constexpr uint64_t kShadowSpan = 1ull << 40;  // it holds no more than a device's memory
#endif
// Where servers keep what snapshots preserve: like the device ranges, one range per ordinal.
inline constexpr uint64_t kShadowBase = kPinnedBase + kPinnedBytes;
inline constexpr uint64_t kGranule = 2ull << 20;  // physical memory and content chunks

inline constexpr uint64_t kStagingSlotBytes = 4ull << 20;
inline constexpr uint32_t kStagingSlots = 4;
inline constexpr uint64_t kStagingBytes = kStagingSlotBytes * kStagingSlots;

inline constexpr uint64_t kMaxPayload = 1ull << 20;      // of one record; longer data is split by the client
inline constexpr uint64_t kInlineReplyBytes = 16 << 10;  // copies to the host up to this size come back in the record

// What a device ordinal looks like to the program; written by the server before the client is let in, and constant
// for the life of the job, whatever the job runs on later.
struct DeviceDescription {
  char name[128];
  uint8_t uuid[16];
  uint64_t total_bytes;
  uint32_t attribute_count;
  int32_t attributes[kAttributes];  // indexed by CUdevice_attribute
  uint32_t reserved;
};

// How a device reaches the memory of another one, in one word (JournalHeader::peers).
enum PeerAccess : uint32_t {
  kPeerReaches = 1,      // kernels read and write it once the program has requested that
  kPeerAtomics = 2,      // with every atomic operation
  kPeerSomeAtomics = 4,  // with some
};
inline constexpr uint32_t kPeerRankShift = 8;  // above: the driver's performance rank

// What happens to the job. Written by the server (or, for kLost, by the standby that the daemon tells to), read by
// the client wherever it waits; `state` is a futex word.
enum class ServerState : uint32_t {
  kStarting = 0,
  kRunning = 1,
  kRecovering = 2,  // a new server is replaying; waiting calls go on waiting
  kLost = 3,        // cannot be recovered: every call returns context_error
  kSuspended = 4,   // no server has it, on purpose: calls wait until one gets it again
};

// JournalHeader::server_sleeping.
enum Sleeping : uint32_t {
  kAwake = 0,
  kAsleep = 1,
  kAsleepOn = 2,  // + the number of the processor
};

// Per client thread. `waiting` is the position of the synchronous record whose reply the thread has not read yet, or
// kNotWaiting: the server does not trim past the oldest of them. `processor` is the one that the thread ran on when it last
// rang or waited, + 1; 0: not known. The server may sleep there.
inline constexpr uint64_t kNotWaiting = ~0ull;
struct alignas(64) ThreadSlot {
  std::atomic<uint64_t> waiting;
  uint32_t tid;  // the client's, 0 = free
  std::atomic<uint32_t> processor;
};

// The expected stall, for whoever shows it and for the job's next server (server/snapshot/stall.h). Written by the server. In ns;
// moments are of CLOCK_MONOTONIC. A server died at `t` with `constant + (replay + (working ? t - reported_at : 0)) * correction /
// 1000` to come.
struct alignas(64) StallWords {
  std::atomic<uint64_t> reported_at;     // 0: by no server yet
  std::atomic<uint64_t> working;     // 1: since then there has been work, so that the replay grows with time
  std::atomic<uint64_t> replay;      // as it was at reported_at, not corrected
  std::atomic<uint64_t> correction;  // of the replay, in thousandths
  std::atomic<uint64_t> constant;    // the rest of a recovery
  std::atomic<uint64_t> bound;       // what snapshots are to keep it below
  std::atomic<uint64_t> peak;        // what was expected right before the last snapshot
  std::atomic<uint64_t> spent;       // on snapshots, since the job began
  std::atomic<uint64_t> recoveries;  // that the constant part was learnt from
};

// A line for the job's log. The client fills slot `notices_posted % kNotices` and then counts it; the daemon takes what lies
// between `notices_taken` and there. What finds no free slot is only counted: nobody waits for a line.
struct Notice {
  uint64_t unix_ns;
  uint32_t bytes;  // of text
  uint32_t reserved;
  char text[1008];
};
inline constexpr uint32_t kNotices = 64;

struct JournalHeader {
  // Constant after the handshake.
  uint64_t magic;
  uint32_t version;
  uint32_t device_count;
  uint64_t ring_bytes;
  uint64_t job[2];
  uint32_t client_pid;
  uint32_t driver_version;
  DeviceDescription devices[kMaxDevices];

  // Written by the client.
  alignas(64) std::atomic<uint64_t> tail;
  std::atomic<uint64_t> next_sequence;  // of the next record; informative

  // Written by the server.
  alignas(64) std::atomic<uint64_t> executed;
  alignas(64) std::atomic<uint64_t> trimmed;
  std::atomic<uint32_t> trimmed_futex;   // changes with every trim; the client sleeps on it when the ring is full
  std::atomic<uint32_t> trimmed_waiters; // client threads that sleep on it

  // The server sleeps on `doorbell` after setting `server_sleeping`; the client, after moving `tail`, reads
  // server_sleeping (sequentially consistent) and, if set, clears it, increments doorbell and wakes.
  alignas(64) std::atomic<uint32_t> doorbell;
  std::atomic<uint32_t> server_sleeping;  // Sleeping; from kAsleepOn on: it can run on one processor only
  // Written by the server when it runs again: `doorbell` as it was then. A client that has rung on the server's processor and
  // waits gives way until it is there. Where that does not come, where the client goes on, or runs on another processor, it wakes
  // a thread of the server that sleeps on `usher`, somewhere else, and which moves the server.
  std::atomic<uint32_t> heard;
  std::atomic<uint32_t> usher;
  std::atomic<uint32_t> late;         // by the client: how often that was no way to save time
  std::atomic<uint32_t> caller;       // by the client that wakes `usher`: as ThreadSlot::processor
  std::atomic<uint64_t> heard_at;     // CLOCK_MONOTONIC, in ns
  std::atomic<uint64_t> gave_way_at;  // when the server, on the client's processor, had done what there was
  std::atomic<uint64_t> rung_at;      // by the client: when it last woke a server that slept anywhere

  alignas(64) std::atomic<uint32_t> state;  // ServerState, futex word
  std::atomic<uint32_t> server_pid;         // 0 = none
  std::atomic<uint32_t> daemon_pid;
  std::atomic<uint32_t> generation;         // counts the servers that have had this job

  // A fault that belongs to the program: every later call on the device returns it until the context is reset.
  std::atomic<uint32_t> context_error;  // CUresult
  std::atomic<uint32_t> context_error_ordinal;
  std::atomic<uint64_t> context_error_sequence;

  // The last committed snapshot: bits 63..1 its number, bit 0 which of the two snapshot memfds holds it. 0 = no snapshot yet: the
  // job starts from nothing at position 0.
  alignas(64) std::atomic<uint64_t> snapshot;
  std::atomic<uint64_t> snapshot_position;
  // Not 0 while a snapshot is being taken at this position + 1: the device was drained there, nothing executes, and the
  // device memory itself is the state at that position. A recovery that finds it set replays the snapshot, not the work.
  std::atomic<uint64_t> committing;
  // Changes of what a server holds for the job: memory added, memory dropped, another server. Who kept copies of all of
  // it (the daemon's service manager) tells by this whether they are all that there was.
  std::atomic<uint64_t> memory_changes;

  // Host functions: the server posts positions of xmHostFunc records, the client's callback thread takes them.
  // A lost server may post one twice; the record's state decides (see CallbackState).
  alignas(64) std::atomic<uint64_t> callbacks_posted;
  alignas(64) std::atomic<uint64_t> callbacks_taken;
  std::atomic<uint32_t> callback_doorbell;
  std::atomic<uint64_t> callbacks[kCallbackSlots];

  ThreadSlot threads[kMaxThreads];

  // Sequence of the last record of this event that has completed on the device (0: none). Indexed by event handle
  // index: cuEventQuery is answered from here.
  std::atomic<uint64_t> events[kMaxEvents];

  // [device * kMaxDevices + peer]: how it is between the devices that the job runs on now (PeerAccess). Written by every
  // server that takes the job.
  std::atomic<uint32_t> peers[kMaxDevices * kMaxDevices];
  // The same pairs, a bit each: the program was informed that the device reaches the peer. Written by the client. Whoever takes
  // the job later must be able to keep it.
  std::atomic<uint64_t> peers_promised;

  StallWords stall;

  // Behind everything else: a client or a daemon of an earlier version has nothing here, and neither misses it.
  alignas(64) std::atomic<uint64_t> notices_posted;  // by the client, ever
  std::atomic<uint64_t> notices_dropped;             // by the client, for want of a slot
  alignas(64) std::atomic<uint64_t> notices_taken;   // by the daemon, ever
  Notice notices[kNotices];

  // By the handle's index: what has become of a communicator that was made (CollectiveResult). Written by the server.
  alignas(64) std::atomic<uint32_t> communicators[kMaxCommunicators];

  // Of a job in communicators (server/snapshot/group_snapshot.h). Written by the server: the round whose snapshot `committing` is of, 0: of none;
  // and the last one that was decided, for all ranks. Which that is, any rank's journal may say: the daemon reads them all.
  alignas(64) std::atomic<uint64_t> round_prepared;
  std::atomic<uint64_t> round_decided;
  // 1: the last snapshot was taken without the other ranks, and fits none of theirs.
  std::atomic<uint64_t> round_forsaken;
  // The last round at which one of the ranks left its server for another, and the others took communicators with that. A rank that does not
  // know of it cannot go on from there, only be recovered.
  std::atomic<uint64_t> round_renewed;
  // The round at which the process was suspended with the other ranks; 0: it is not, or it was alone.
  std::atomic<uint64_t> round_suspended;
  // As `communicators`: the last round that the process held in which other ranks had ended the communicator. It is not made again.
  std::atomic<uint64_t> communicators_lacking[kMaxCommunicators];

  // By ordinal: bytes of the device, about, that communicators take which servers have made ahead, of this process or another. A program
  // may count them as free. Written by the daemon: when they are made, and before they are given up; zero while there is no daemon.
  alignas(64) std::atomic<uint64_t> standby_bytes[kMaxDevices];

  // Bytes that the program sees as each device's memory, where that is less; 0: all. Written by the first server, constant.
  uint64_t memory_quota;

  // A bit for each ordinal: servers have opened a context there, since the program uses the device. Written by the server that has the
  // job; whoever takes it opens the same. 0: none, or by a server of an earlier version.
  std::atomic<uint64_t> devices_open;
};
static_assert(kMaxDevices * kMaxDevices <= 64);

inline constexpr uint64_t kHeaderBytes = 2ull << 20;
static_assert(sizeof(JournalHeader) <= kHeaderBytes);
// What the daemon reads in journals of every version (xmigd/devices/header.py).
static_assert(offsetof(JournalHeader, tail) == 6464 && offsetof(JournalHeader, trimmed) == 6592 && offsetof(JournalHeader, snapshot) == 6784);
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

// ---------------------------------------------------------------------------------------------------------------
// Records

// Low byte of Record::state for synchronous records.
enum ReplyState : uint32_t {
  kPending = 0,
  kReplied = 1,
};
// For xmHostFunc records. The client moves kPosted -> kRunning by compare-and-swap, then kRunning -> kAcknowledged
// and wakes: a function is never run twice, however often its position is posted.
enum CallbackState : uint32_t {
  kNotPosted = 0,
  kPosted = 1,
  kRunningCallback = 2,
  kAcknowledged = 3,
};
// For queued copies out of the device (xmCopyToPinned) and copies whose source is pinned (xmCopyFromPinned).
enum CopyState : uint32_t {
  kNotCopied = 0,
  kCopied = 1,  // what was copied is kept where reply_hash says (a place of the server's; 0: it is not)
};
inline constexpr uint32_t kWaiter = 1u << 31;  // set in `state` by a client thread before it sleeps on it

enum RecordFlags : uint16_t {
  kSynchronous = 1,  // the appending thread waits for a reply
  kKnown = 2,        // it does not: the program has seen in shared memory that what it would wait for is done
};

struct RecordHeader {
  uint32_t size;  // of the whole record: header, arguments, payload, reply space; a multiple of 8
  uint16_t op;    // xmig::Op
  uint16_t flags;
  uint64_t sequence;  // 1 for the first record of the job, then +1 each
  uint32_t thread;    // index of the client's ThreadSlot
  uint16_t ordinal;   // device ordinal of the current context
  uint16_t answered;  // tail_mark() of the journal when the program got the answer, or its host function: written by the server
  uint32_t context;   // handle index of the current context
  uint32_t payload;  // bytes; starts after the arguments, 8-aligned
  uint32_t reply;    // bytes of space for the reply; starts after the payload, 8-aligned
  std::atomic<uint32_t> state;
  // The reply, written by the server before `state`; kept for comparison at a replay as long as the record is.
  uint32_t result;       // CUresult
  uint32_t reply_bytes;  // used of the reply space
  uint64_t reply_hash;   // XXH3_64bits of the reply, or of the bytes copied to the host
};
static_assert(sizeof(RecordHeader) == 64 || sizeof(RecordHeader) == 56);

// Records that the program has appended before it had an answer do not depend on it; those from that tail on may.
constexpr uint16_t tail_mark(uint64_t tail) { return static_cast<uint16_t>(tail >> 3); }
// The first position behind `position` with this mark: that tail, or an earlier one if more than 512 KiB were appended meanwhile.
constexpr uint64_t marked_tail(uint64_t position, uint16_t mark) {
  return position + 8 * uint64_t{static_cast<uint16_t>(mark - tail_mark(position))};
}

// Arguments follow the header: the POD Args_<op> of the generated ops.h. Then payload, then reply space.
constexpr uint64_t align8(uint64_t n) { return (n + 7) & ~uint64_t{7}; }

// ---------------------------------------------------------------------------------------------------------------
// Handles: opaque to the program, chosen by the client, mapped through flat tables on both sides.

enum class Kind : uint8_t {
  kContext = 1,
  kStream = 2,
  kEvent = 3,
  kModule = 4,
  kFunction = 5,  // index = module index << kKernelBits | kernel's number in the module
  kPool = 6,
  kMemory = 7,    // CUmemGenericAllocationHandle
  kGraph = 8,
  kGraphExec = 9,
  kGraphNode = 10,
  kLibrary = 11,
  kCommunicator = 12,
};
// 0x0058'KK00'IIII'IIII: never null, never 1 or 2 (the special streams), never a valid pointer's top bits.
inline constexpr uint64_t kHandleTag = 0x0058ull << 48;
constexpr uint64_t make_handle(Kind kind, uint32_t index) {
  return kHandleTag | (static_cast<uint64_t>(kind) << 40) | index;
}
constexpr bool handle_is(uint64_t handle, Kind kind) {
  return (handle >> 40) == ((kHandleTag >> 40) | static_cast<uint64_t>(kind)) && ((handle >> 32) & 0xff) == 0;
}
constexpr uint32_t handle_index(uint64_t handle) { return static_cast<uint32_t>(handle); }

inline constexpr uint32_t kKernelBits = 16;
inline constexpr uint32_t kMaxKernels = 1u << kKernelBits;  // of a module

}  // namespace xmig::journal
