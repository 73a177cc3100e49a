// The cpu device: a CUDA driver whose memory is memfds and whose kernels are C functions.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "device/cpu/collectives.h"
#include "device/cpu/context.h"
#include "device/cpu/handles.h"
#include "device/cpu/memory.h"
#include "device/cpu/module.h"
#include "device/device.h"

namespace xmig::device {

std::unique_ptr<Device> open_cpu(std::span<const int> ordinals, uint64_t memory_bytes);

namespace cpu {

struct Event {
  std::shared_ptr<Context> context;
  unsigned flags = 0;
  std::shared_ptr<Recording> last;
};
struct LoadedModule {
  std::shared_ptr<Context> context;
  std::shared_ptr<Module> module;
  std::vector<uint64_t> functions;  // handles, in the image's order
};
struct LoadedFunction {
  std::shared_ptr<Context> context;
  std::shared_ptr<Module> module;
  Function* function = nullptr;
};
struct Ordinal {
  journal::DeviceDescription description;
  std::shared_ptr<Context> context;
  int retained = 0;
};
inline constexpr uint64_t kContextHandle = 0x43ull << 56;

// The record that the calling thread works for, and the device of its current context (-1: none).
extern thread_local uint64_t t_sequence;
extern thread_local int t_ordinal;

class CpuDevice final : public Device {
 public:
  CpuDevice(std::span<const int> ordinals, uint64_t memory_bytes);
  ~CpuDevice() override;

  // The driver's functions have no argument that names the device: a process has at most one.
  static CpuDevice* opened();

  const DriverTable& driver() const override { return table_; }
  journal::DeviceDescription describe(int ordinal) const override { return ordinals.at(ordinal).description; }
  uint32_t mark_every() const override { return 16; }  // its kernels take long, and a mark nothing
  void set_sequence(uint64_t sequence) override { t_sequence = sequence; }
  Fault fault() const override;
  void on_fault(void (*callback)(void*), void* user) override;
  bool hash(std::span<const Chunk> chunks, std::span<uint64_t> hashes, Where where) override;
  uint64_t hash_of(std::span<const std::byte> content) const override;
  bool copy(std::span<const Move> moves, Where where) override;
  CUresult load_image(CUmodule* module, std::span<const std::byte> image) override;
  Collectives& collectives() override { return *collectives_; }
  std::vector<Global> globals(CUmodule module) override;
  bool bind_global(CUmodule module, uint32_t index, uint64_t address) override;
  void arm(const Injection& injection, Notify notify, void* user) override;

  // Everything below belongs to `mutex`. It is held for the time of a call that enqueues, never while waiting.
  std::mutex mutex;
  bool initialised = false;
  std::vector<Ordinal> ordinals;
  Memory memory;
  Handles<std::shared_ptr<Stream>, 0x53> streams;
  Handles<Event, 0x45> events;
  Handles<LoadedModule, 0x40> modules;
  Handles<LoadedFunction, 0x46> functions;
  Handles<std::shared_ptr<GraphBody>, 0x47> graphs;  // and executable ones, which share the work

  // The device of a context that is retained; -1: there is none.
  int ordinal_of(CUcontext context) const;
  // Destroys a context's objects and its error; the context itself starts afresh.
  void reset(Ordinal& ordinal);
  CUresult load(Context& context, Bytes image, CUmodule* module);

 private:
  bool can(Where where);
  bool reaches(uint64_t device, uint64_t address, uint64_t bytes, bool write) const;

  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  DriverTable table_{};
  const std::unique_ptr<Collectives> collectives_ = host_collectives(table_, Content::kMemory);
};

}  // namespace cpu
}  // namespace xmig::device
