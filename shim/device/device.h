// A device with the CUDA driver's interface. Three exist: cpu (complete and real, memory in memfds, kernels in ELF shared
// objects), null (an H200's complete interface, kernels do nothing) and, on machines with a GPU, cuda.
//
// A device is a driver table (the functions of the CUDA driver interface that the server calls, with the driver's
// own meaning) plus the few things below that the driver interface has no word for. What all mechanisms of recovery
// are written against is runtime.h, which is implemented here, over the table, for all three.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "device/collectives.h"
#include "device/image.h"
#include "device/runtime.h"
#include "driver_table.h"

namespace xmig::device {

// A global variable of a module that lives in device memory given by the program (cpu device: XMIG_GLOBAL).
struct Global {
  std::string name;
  uint64_t bytes;
  uint64_t address;  // where the device put it, or 0: the server places it with bind_global
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
    case CUDA_ERROR_EXTERNAL_DEVICE:
    case CUDA_ERROR_MPS_CONNECTION_FAILED:
    case CUDA_ERROR_MPS_RPC_FAILURE:
    case CUDA_ERROR_MPS_SERVER_NOT_READY:
    case CUDA_ERROR_MPS_CLIENT_TERMINATED: return true;
    default: return false;
  }
}

// What a driver's result means to who knows no vendor, and the other way.
Status status_of(CUresult result);
CUresult result_of(Status status);

class Device : public Runtime {
 public:
  virtual const DriverTable& driver() const = 0;

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

  virtual Collectives& collectives() = 0;

  virtual std::vector<Global> globals(CUmodule module) = 0;
  // Also gives the global its first content: at a restore, bind before the memory's content is put back.
  virtual bool bind_global(CUmodule module, uint32_t index, uint64_t address) = 0;

  // --- Runtime, over the table

  Status status(int number) const override { return status_of(static_cast<CUresult>(number)); }
  int number_of(Status status) const override { return result_of(status); }
  std::string text(Status status) const override { return "CUDA error " + std::to_string(result_of(status)); }
  int not_ready() const override { return CUDA_ERROR_NOT_READY; }
  int unknown() const override { return CUDA_ERROR_UNKNOWN; }
  bool is_sticky(int number) const override { return device::is_sticky(number); }

  Status start() override;
  Status open_context(uint32_t ordinal, ContextHandle& out) override;
  void close_context(uint32_t ordinal) override;
  void use(ContextHandle context) override;
  Status synchronize() override;

  Status reserve(uint64_t wanted, uint64_t bytes, uint64_t alignment, uint64_t& got) override;
  void unreserve(uint64_t address, uint64_t bytes) override;
  Status create(uint32_t ordinal, uint64_t bytes, MemoryHandle& out) override;
  Status export_memory(MemoryHandle memory, int& fd) override;
  Status import_memory(int fd, MemoryHandle& out) override;
  void release(MemoryHandle memory) override;
  Status map(uint64_t address, uint64_t bytes, MemoryHandle memory) override;
  void unmap(uint64_t address, uint64_t bytes) override;
  Status set_access(uint64_t address, uint64_t bytes, std::span<const uint32_t> ordinals, bool on) override;
  Status lock_host(void* memory, size_t bytes, bool mapped) override;
  void unlock_host(void* memory) override;

  Status create_stream(StreamHandle& out) override;
  void destroy(StreamHandle stream) override;
  Status synchronize(StreamHandle stream) override;
  Status create_event(EventHandle& out) override;
  void destroy_event(EventHandle event) override;
  Status record(EventHandle event, StreamHandle stream) override;
  Status wait(StreamHandle stream, EventHandle event) override;
  Status synchronize_event(EventHandle event) override;
  Status query(EventHandle event) override;
  Status clear(uint64_t address, uint64_t bytes, StreamHandle stream) override;
  Status copy_to_host(void* to, uint64_t from, uint64_t bytes, StreamHandle stream) override;
  Status copy_from_host(uint64_t to, const void* from, uint64_t bytes, StreamHandle stream) override;
};

// `kind`: "cpu", "null" or "cuda"; `ordinals`: the node's devices that this server drives, in the program's order;
// `memory_bytes`: capacity of each (cpu, null), 0 = the default. Throws Unavailable, or std::runtime_error, with a clear
// sentence.
std::unique_ptr<Device> open(std::string_view kind, std::span<const int> ordinals, uint64_t memory_bytes);

}  // namespace xmig::device
