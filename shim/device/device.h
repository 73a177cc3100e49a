// A device: what the server drives. Three exist: cpu (complete and real, memory in memfds, kernels in ELF shared
// objects), null (an H200's complete interface, kernels do nothing) and, on machines with a GPU, cuda.
//
// A device is a driver table (the functions of the CUDA driver interface that the server calls, with the driver's
// own meaning) plus the few things below that the driver interface has no word for. All mechanisms of recovery
// (hosting, snapshots, replay) are written against this and know no device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "device/image.h"
#include "driver_table.h"
#include "journal/layout.h"

namespace xmig::device {

// A global variable of a module that lives in device memory given by the program (cpu device: XMIG_GLOBAL).
struct Global {
  std::string name;
  uint64_t bytes;
  uint64_t address;  // where the device put it, or 0: the server places it with bind_global
};

// Where a fault is injected (tests, `xmigctl fault inject`).
enum class InjectPoint { kRecord, kKernel, kCopy, kSnapshot, kReplay, kImport };
enum class InjectKind { kKill, kFault, kHang };  // SIGKILL of the server; a sticky device fault; a kernel without end
struct Injection {
  uint64_t id;        // the daemon's
  InjectPoint point;
  InjectKind kind;
  uint64_t sequence;  // first record it applies to; for kSnapshot, kReplay and kImport: how many chunks, records, imports in
  int error;          // CUresult of a kFault
};

// Errors after which a context answers nothing else.
constexpr bool is_sticky(int error) {
  switch (error) {
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case CUDA_ERROR_CONTAINED:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_CONTEXT_IS_DESTROYED:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_TENSOR_MEMORY_LEAK:
    case CUDA_ERROR_EXTERNAL_DEVICE: return true;
    default: return false;
  }
}

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

class Device {
 public:
  virtual ~Device() = default;

  virtual const DriverTable& driver() const = 0;
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

  // The record whose work the calling thread enqueues from now on: faults are reported with it.
  virtual void set_sequence(uint64_t sequence) = 0;
  // The sticky fault, if there is one. After it every driver function that touches the context returns its error.
  virtual Fault fault() const = 0;
  // Called (from any thread) once, when a sticky fault has happened.
  virtual void on_fault(void (*callback)(void*), void* user) = 0;

  // Where the device hashes and copies, and the caller waits: in a stream of the context that has no work, or, without one, in
  // a stream of the device's own, beside everything that runs.
  using Where = std::optional<CUstream>;
  // XXH3_64bits of each chunk of memory of one device, in order. Nothing writes to them.
  virtual bool hash(std::span<const Chunk> chunks, std::span<uint64_t> hashes, Where where) = 0;
  // Copy between ranges of one device of this process, all at once. Nothing writes to them, and no range is in two moves.
  virtual bool copy(std::span<const Move> moves, Where where) = 0;
  // Both: what is copied is read once, and the hash is that of what was read.
  virtual bool copy_and_hash(std::span<const Move> moves, std::span<uint64_t> hashes, Where where) {
    std::vector<Chunk> chunks;
    for (const Move& move : moves) chunks.push_back({move.from, move.bytes});
    return copy(moves, where) && hash(chunks, hashes, where);
  }

  // cuModuleLoadData for an image whose length is known. An image is hostile, and cuModuleLoadData can only believe
  // what the image says about its own length: use this one for images that come from the program.
  virtual CUresult load_image(CUmodule* module, std::span<const std::byte> image) {
    return driver().cuModuleLoadData(module, image.data());
  }

  // What kernels of this image can write and the driver places, on the device with this ordinal: the names under which it knows
  // them. Where globals() has all of them it is nothing. Where not all of the image can be read, `out` has what was found.
  virtual Result<> placed_variables(uint32_t ordinal, std::span<const std::byte> image, std::vector<ImageVariable>& out) {
    return {};
  }
  // As hash(), of memory that the driver has placed on this device: of any length, at any address.
  virtual bool hash_placed(uint32_t ordinal, std::span<const Chunk> chunks, std::span<uint64_t> hashes, Where where) {
    return hash(chunks, hashes, where);
  }

  virtual std::vector<Global> globals(CUmodule module) = 0;
  // Also gives the global its first content: at a restore, bind before the memory's content is put back.
  virtual bool bind_global(CUmodule module, uint32_t index, uint64_t address) = 0;

  // Puts work into a stream, of the current context, that ends in this sticky error, or (kHang) never: what happens then
  // is what happens with a program's own. A device that does not support it is injected by arm() instead.
  virtual CUresult inject(CUstream stream, uint32_t ordinal, InjectKind kind, int error) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  virtual bool injects() const { return false; }
  // An injection is armed: what inject() needs is to be there.
  virtual void prepare_to_inject() {}

  // The server gets a job. Until then, as a standby, it takes as little of its devices as it can.
  virtual void wake() {}

  // Called by the server before `id` of an armed injection takes effect, so that it is injected only once.
  using Notify = void (*)(void* user, uint64_t id);
  virtual void arm(const Injection& injection, Notify notify, void* user) = 0;
};

// `kind`: "cpu", "null" or "cuda"; `ordinals`: the node's devices that this server drives, in the program's order;
// `memory_bytes`: capacity of each (cpu, null), 0 = the default. Throws Unavailable, or std::runtime_error, with a clear
// sentence.
std::unique_ptr<Device> open(std::string_view kind, std::span<const int> ordinals, uint64_t memory_bytes);

}  // namespace xmig::device
