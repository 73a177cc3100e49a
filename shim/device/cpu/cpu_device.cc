#include "device/cpu/cpu_device.h"

#include <chrono>
#include <stdexcept>

#include "device/cpu/api.h"
#include "device/cpu/bulk.h"
#include "device/cpu/driver.h"
#include "device/cpu/log.h"
#include "device/cpu/progress.h"
#include "device/description.h"
#include "journal/shadow_layout.h"

namespace xmig::device {
namespace cpu {
namespace {

std::atomic<CpuDevice*> g_opened{nullptr};

std::vector<Ordinal> describe_all(std::span<const int> ordinals, uint64_t memory_bytes) {
  std::vector<Ordinal> out;
  for (const int ordinal : ordinals) out.push_back({describe_cpu(ordinal, memory_bytes), nullptr, 0});
  return out;
}

std::vector<uint64_t> capacities(const std::vector<Ordinal>& ordinals) {
  std::vector<uint64_t> out;
  for (const Ordinal& ordinal : ordinals) out.push_back(ordinal.description.total_bytes);
  return out;
}

}  // namespace

thread_local uint64_t t_sequence = 0;
thread_local int t_ordinal = -1;

CpuDevice* CpuDevice::opened() { return g_opened.load(); }

CpuDevice::CpuDevice(std::span<const int> wanted, uint64_t memory_bytes)
    : ordinals(describe_all(wanted, memory_bytes)), memory(capacities(ordinals), wanted) {
  if (ordinals.empty() || ordinals.size() > journal::kMaxDevices)
    throw std::runtime_error("a server drives between 1 and " + std::to_string(journal::kMaxDevices) + " cpu devices, not " +
                             std::to_string(ordinals.size()));
  CpuDevice* none = nullptr;
  if (!g_opened.compare_exchange_strong(none, this))
    throw std::runtime_error("this process has opened the cpu device already; close it first");
  for (Ordinal& ordinal : ordinals)
    ordinal.context = std::make_shared<Context>(static_cast<int>(&ordinal - ordinals.data()),
                                                ordinal.description.total_bytes, shared_);
  install_fault_handlers();
  add_device_functions(table_);
  add_memory_functions(table_);
  add_stream_functions(table_);
  add_event_functions(table_);
  add_graph_functions(table_);
  add_module_functions(table_);
}

CpuDevice::~CpuDevice() {
  {
    const std::lock_guard lock(mutex);
    for (Ordinal& ordinal : ordinals) ordinal.context->abandon();
    g_opened = nullptr;
  }
  // Their threads touch memory that goes away with the device. One that runs a kernel without end cannot be waited
  // for; it is left behind, and will fault, alone.
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  while (Stream::threads() != 0 && std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  if (Stream::threads() != 0) XMIG_CPU_LOG("closed while %d kernels still run", Stream::threads().load());
}

Fault CpuDevice::fault() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->fault;
}

void CpuDevice::on_fault(void (*callback)(void*), void* user) {
  const std::lock_guard lock(shared_->mutex);
  shared_->on_fault = callback;
  shared_->on_fault_user = user;
}

// As on a GPU: a stream of the current context, that is still there.
bool CpuDevice::can(Where where) {
  const std::lock_guard lock(mutex);
  if (!where) return true;
  const std::shared_ptr<Stream> stream = find_stream(*this, static_cast<CUstream>(*where));
  return stream && stream->context().ordinal() == t_ordinal;
}

// A GPU hashes and copies with kernels of the device in whose range the first address lies.
bool CpuDevice::reaches(uint64_t first, uint64_t address, uint64_t bytes, bool write) const {
  uint64_t ordinal = ordinals.size();
  if (first - journal::kDeviceBase < journal::kMaxDevices * journal::kDeviceSpan) {
    ordinal = (first - journal::kDeviceBase) / journal::kDeviceSpan;
  } else if (first - journal::kShadowBase < journal::kMaxDevices * journal::kShadowSpan) {
    ordinal = (first - journal::kShadowBase) / journal::kShadowSpan;
  }
  return ordinal >= ordinals.size() || memory.accessible(static_cast<int>(ordinal), address, bytes, write);
}

uint64_t CpuDevice::hash_of(std::span<const std::byte> content) const { return hash_content(content); }

bool CpuDevice::hash(std::span<const Chunk> chunks, std::span<uint64_t> hashes, Where where) {
  if (!can(where)) return false;
  {
    const std::lock_guard lock(mutex);
    for (const Chunk& chunk : chunks)
      if (!reaches(chunks[0].address, chunk.address, chunk.bytes, false)) return false;
  }
  return hash_chunks(chunks, hashes);
}

bool CpuDevice::copy(std::span<const Move> moves, Where where) {
  if (!can(where)) return false;
  {
    const std::lock_guard lock(mutex);
    for (const Move& move : moves)
      if (!reaches(moves[0].from, move.from, move.bytes, false) || !reaches(moves[0].from, move.to, move.bytes, true))
        return false;
  }
  return std::all_of(moves.begin(), moves.end(),
                     [](const Move& move) { return copy_bytes(move.to, move.from, move.bytes); });
}

int CpuDevice::ordinal_of(CUcontext context) const {
  const uint64_t index = (number(context) ^ kContextHandle) - 1;
  return index < ordinals.size() && ordinals[index].retained != 0 ? static_cast<int>(index) : -1;
}

void CpuDevice::arm(const Injection& injection, Notify notify, void* user) {
  // The other points are the server's own.
  if (injection.point == InjectPoint::kKernel || injection.point == InjectPoint::kCopy)
    shared_->injections.arm(injection, notify, user);
}

void CpuDevice::reset(Ordinal& ordinal) {
  const std::shared_ptr<Context> old = std::move(ordinal.context);
  ordinal.context = std::make_shared<Context>(old->ordinal(), ordinal.description.total_bytes, shared_);
  streams.remove_if([&](const std::shared_ptr<Stream>& stream) { return &stream->context() == old.get(); });
  events.remove_if([&](const Event& event) { return event.context == old; });
  functions.remove_if([&](const LoadedFunction& function) { return function.context == old; });
  modules.remove_if([&](const LoadedModule& module) { return module.context == old; });
  old->abandon();
  if (old->error() != CUDA_SUCCESS) {
    const std::lock_guard lock(shared_->mutex);
    shared_->fault = {};
  }
}

CUresult CpuDevice::load(Context& context, Bytes image, CUmodule* module) {
  LoadedModule loaded{context.shared_from_this(), nullptr, {}};
  Trap trap;
  auto unload_fault = [owner = std::weak_ptr(loaded.context)](const Trap& fault) {
    if (const auto still = owner.lock()) still->raise(fault.error, t_sequence, "unloading a module: " + fault.describe());
  };
  const CUresult result = Module::load(image, unload_fault, loaded.module, trap);
  if (trap.error != 0) context.raise(trap.error, t_sequence, "loading a module: " + trap.describe());
  if (result != CUDA_SUCCESS) return result;
  for (Function& function : loaded.module->functions())
    loaded.functions.push_back(functions.add({loaded.context, loaded.module, &function}));
  *module = as_handle<CUmodule>(modules.add(std::move(loaded)));
  return CUDA_SUCCESS;
}

std::vector<Global> CpuDevice::globals(CUmodule module) {
  const std::lock_guard lock(mutex);
  std::vector<Global> out;
  if (const LoadedModule* loaded = modules.find(number(module)))
    for (const GlobalVariable& g : loaded->module->globals()) out.push_back({g.global.name, g.global.bytes, g.address});
  return out;
}

bool CpuDevice::bind_global(CUmodule module, uint32_t index, uint64_t address) {
  const std::lock_guard lock(mutex);
  LoadedModule* loaded = modules.find(number(module));
  if (!loaded || index >= loaded->module->globals().size()) return false;
  return memory.is_device(address, loaded->module->globals()[index].global.bytes) &&
         loaded->module->bind(index, address);
}

}  // namespace cpu

std::unique_ptr<Device> open_cpu(std::span<const int> ordinals, uint64_t memory_bytes) {
  return std::make_unique<cpu::CpuDevice>(ordinals, memory_bytes);
}

}  // namespace xmig::device
