// A device, as the parts of a server see it that know no vendor: journal, snapshots, recovery, moves, memory that outlives a server,
// faults. They hold a Runtime; none of a vendor's types, error numbers or functions is known here.
//
// What programs do with a device is not here: records have handlers of the vendor's own. Implemented once for all devices with the
// CUDA driver's interface (device.h); docs/decisions/0041 says what another vendor's device would be.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "journal/layout.h"

namespace xmig::device {

// What a call came to, as far as anybody asks who knows no vendor.
enum class Problem : uint8_t {
  kNone,
  kNotReady,     // work is not done yet
  kInvalid,      // an argument
  kNoMemory,
  kTaken,        // the address range is something else's
  kMapped,       // there is memory at the address already
  kNoFile,
  kBadImage,
  kUnreachable,  // a device has no way to another one's memory
  kOther,
};

// The same with the vendor's own number, which goes to the program and into texts as it is. 0 in a status that was not made by a
// vendor's call: then Runtime::number_of() says how the vendor calls such a problem.
class [[nodiscard]] Status {
 public:
  constexpr Status() = default;
  constexpr Status(Problem problem, int number = 0) : problem_(problem), number_(number) {}
  constexpr explicit operator bool() const { return problem_ == Problem::kNone; }
  constexpr Problem problem() const { return problem_; }
  constexpr int number() const { return number_; }

 private:
  Problem problem_ = Problem::kNone;
  int number_ = 0;
};

// The device's own handles. Null: no such object; as a stream: the default one.
using StreamHandle = void*;
using EventHandle = void*;
using ContextHandle = void*;
using MemoryHandle = uint64_t;  // physical, and not mapped yet

// Where a fault is injected (tests, `xmigctl fault inject`).
enum class InjectPoint { kRecord, kKernel, kCopy, kSnapshot, kReplay, kImport };
// SIGKILL of the server; a sticky device fault; a kernel without end; one bit of device memory that is another, without any error.
enum class InjectKind { kKill, kFault, kHang, kFlip };
struct Injection {
  uint64_t id;        // the daemon's
  InjectPoint point;
  InjectKind kind;
  uint64_t sequence;  // first record it applies to; for kSnapshot, kReplay and kImport: how many chunks, records, imports in
  int error;          // of a kFault, the vendor's number
  uint64_t address = 0;  // of a kFlip, whose point is kRecord: the lowest bit of this byte
};

// The sticky fault of a device: error, and the journal sequence of the record whose work faulted (0: not known).
struct Fault {
  int error = 0;
  uint64_t sequence = 0;
  std::string text;
};

struct Chunk {
  uint64_t address;
  uint64_t bytes;
};

struct Move {
  uint64_t to;
  uint64_t from;
  uint64_t bytes;
};

// The device cannot be used: the error that a program would get of it natively, and one clear sentence.
class Unavailable : public std::runtime_error {
 public:
  Unavailable(int error, const std::string& text) : std::runtime_error(text), error_(error) {}
  int error() const { return error_; }

 private:
  int error_;
};

class Runtime {
 public:
  virtual ~Runtime() = default;

  // --- the device

  virtual journal::DeviceDescription describe(int ordinal) const = 0;
  // How `ordinal` reaches the memory of `peer`: journal::PeerAccess, and the rank.
  virtual uint32_t peer(int ordinal, int peer) const {
    return ordinal == peer ? 0 : journal::kPeerReaches | journal::kPeerAtomics;
  }
  // Device memory that this process took by opening it (contexts, kernels of ours); about, 0: not known.
  virtual uint64_t own_bytes() const { return 0; }

  // Before any recovery has been measured: about how long it takes from the death of a server, of which the kernel and the
  // driver have to take much apart, until another one has its memory and the last snapshot's content, ns.
  virtual uint64_t recovery_ns() const { return 40'000'000; }

  // How many records' work a stream gets before it gets a mark that tells how far the device has come. One on a GPU costs the time of
  // a short kernel.
  virtual uint32_t mark_every() const { return 128; }

  // The server gets a job. Until then, as a standby, it takes as little of its devices as it can.
  virtual void wake() {}

  // --- the vendor's numbers

  // What a number means, and which number a problem has. The text is for people.
  virtual Status status(int number) const = 0;
  virtual int number_of(Status status) const = 0;
  virtual std::string text(Status status) const = 0;
  // Of work that is not done yet, and of a fault that nobody knows more of.
  virtual int not_ready() const = 0;
  virtual int unknown() const = 0;
  // Does a context answer nothing else after this?
  virtual bool is_sticky(int number) const = 0;

  // --- faults

  // The record whose work the calling thread enqueues from now on: faults are reported with it.
  virtual void set_sequence(uint64_t sequence) = 0;
  // The sticky fault, if there is one. After it every driver function that touches the context returns its error.
  virtual Fault fault() const = 0;
  // Called (from any thread) once, when a sticky fault has happened.
  virtual void on_fault(void (*callback)(void*), void* user) = 0;

  // Puts work into a stream, of the current context, that ends in this sticky error, or (kHang) never: what happens then
  // is what happens with a program's own. A device that does not support it is injected by arm() instead.
  virtual Status inject(StreamHandle stream, uint32_t ordinal, InjectKind kind, int error) { return Problem::kOther; }
  virtual bool injects() const { return false; }
  // An injection is armed: what inject() needs is to be there.
  virtual void prepare_to_inject() {}
  // Called by the server before `id` of an armed injection takes effect, so that it is injected only once.
  using Notify = void (*)(void* user, uint64_t id);
  virtual void arm(const Injection& injection, Notify notify, void* user) = 0;

  // --- contexts: one of each ordinal; calls below are of the calling thread's current one

  virtual Status start() = 0;
  virtual Status open_context(uint32_t ordinal, ContextHandle& out) = 0;
  virtual void close_context(uint32_t ordinal) = 0;
  virtual void use(ContextHandle context) = 0;
  virtual Status synchronize() = 0;

  // --- physical memory, which has a descriptor, and where it is mapped

  // Keep addresses free. `got` may be others than those that are wanted.
  virtual Status reserve(uint64_t wanted, uint64_t bytes, uint64_t alignment, uint64_t& got) = 0;
  virtual void unreserve(uint64_t address, uint64_t bytes) = 0;
  // A mapping keeps the memory: the handle is released once it is mapped.
  virtual Status create(uint32_t ordinal, uint64_t bytes, MemoryHandle& out) = 0;
  virtual Status export_memory(MemoryHandle memory, int& fd) = 0;
  virtual Status import_memory(int fd, MemoryHandle& out) = 0;
  virtual void release(MemoryHandle memory) = 0;
  virtual Status map(uint64_t address, uint64_t bytes, MemoryHandle memory) = 0;
  virtual void unmap(uint64_t address, uint64_t bytes) = 0;
  // These devices may read and write it from now on, or no longer.
  virtual Status set_access(uint64_t address, uint64_t bytes, std::span<const uint32_t> ordinals, bool on) = 0;

  // Host memory that devices read and write; `mapped`: at its own address, for kernels, too.
  virtual Status lock_host(void* memory, size_t bytes, bool mapped) = 0;
  virtual void unlock_host(void* memory) = 0;

  // --- work, in streams that wait for no other

  virtual Status create_stream(StreamHandle& out) = 0;
  virtual void destroy(StreamHandle stream) = 0;
  virtual Status synchronize(StreamHandle stream) = 0;
  virtual Status create_event(EventHandle& out) = 0;
  virtual void destroy_event(EventHandle event) = 0;
  virtual Status record(EventHandle event, StreamHandle stream) = 0;
  virtual Status wait(StreamHandle stream, EventHandle event) = 0;  // what comes later in the stream waits
  virtual Status synchronize_event(EventHandle event) = 0;
  virtual Status query(EventHandle event) = 0;

  virtual Status clear(uint64_t address, uint64_t bytes, StreamHandle stream) = 0;
  virtual Status copy_to_host(void* to, uint64_t from, uint64_t bytes, StreamHandle stream) = 0;
  virtual Status copy_from_host(uint64_t to, const void* from, uint64_t bytes, StreamHandle stream) = 0;

  // Where the device hashes and copies, and the caller waits: in a stream of the context that has no work, or, without one, in
  // a stream of the device's own, beside everything that runs.
  using Where = std::optional<StreamHandle>;
  // A 64-bit hash of each chunk of memory of one device, in order; which one is the device's own. Nothing writes to them.
  virtual bool hash(std::span<const Chunk> chunks, std::span<uint64_t> hashes, Where where) = 0;
  // The same of content that is in host memory: what hash() gives for memory of the device with it.
  virtual uint64_t hash_of(std::span<const std::byte> content) const = 0;
  // Copy between ranges of one device of this process, all at once. Nothing writes to them, and no range is in two moves.
  virtual bool copy(std::span<const Move> moves, Where where) = 0;
  // Both: what is copied is read once, and the hash is that of what was read.
  virtual bool copy_and_hash(std::span<const Move> moves, std::span<uint64_t> hashes, Where where) {
    std::vector<Chunk> chunks;
    for (const Move& move : moves) chunks.push_back({move.from, move.bytes});
    return copy(moves, where) && hash(chunks, hashes, where);
  }
};

}  // namespace xmig::device
