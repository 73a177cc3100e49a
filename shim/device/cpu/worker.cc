#include "device/cpu/worker.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <type_traits>
#include <variant>

#include "device/cpu/clock.h"
#include "device/cpu/context.h"
#include "device/cpu/cpu_device.h"
#include "device/cpu/log.h"
#include "device/cpu/progress.h"

namespace xmig::device::cpu {
namespace {

void fail(const xmig_block*, int error, const char* text, const char* file, int line) {
  leave_guarded(error, text, file, line);
}

// The conditions of the graph that the thread is doing, by handle.
thread_local std::map<uint64_t, uint32_t> t_conditions;

void set_conditional(const xmig_block* block, uint64_t handle, uint32_t value) {
  const auto found = t_conditions.find(handle);
  if (found == t_conditions.end()) {
    block->fail(block, CUDA_ERROR_LAUNCH_FAILED, "the kernel's graph has no such conditional handle", __FILE__, __LINE__);
  } else {
    found->second = value;
  }
}

// Of a graph and of all the bodies in it.
void start_conditions(const GraphBody& graph) {
  t_conditions.insert(graph.conditions.begin(), graph.conditions.end());
  for (const Work& work : graph.work) {
    const auto* const choice = std::get_if<ChoiceWork>(&work);
    if (!choice) continue;
    for (const auto& body : choice->bodies) start_conditions(*body);
  }
}

std::string block_name(const xmig_block& block) {
  char out[64];
  std::snprintf(out, sizeof(out), "block (%u,%u,%u)", block.index.x, block.index.y, block.index.z);
  return out;
}

void run_blocks(RunBlock run, xmig_block& block, const void* parameters, uint64_t count) {
  for (uint64_t done = 0; done < count; ++done) {
    run(&block, parameters);
    if (++block.index.x < block.grid.x) continue;
    block.index.x = 0;
    if (++block.index.y < block.grid.y) continue;
    block.index.y = 0;
    ++block.index.z;
  }
}

void copy_rows(const CopyWork& w, uint64_t from, uint64_t to) {
  for (uint64_t row = from; row < to; ++row)
    std::memmove(reinterpret_cast<void*>(w.destination + row * w.destination_pitch),
                 reinterpret_cast<const void*>(w.source + row * w.source_pitch), w.width);
}

template <typename T>
void fill_row(uint64_t address, T value, uint64_t count) {
  T* const out = reinterpret_cast<T*>(address);
  for (uint64_t i = 0; i < count; ++i) out[i] = value;
}

template <typename T>
T load(uint64_t address) {
  return __atomic_load_n(reinterpret_cast<const T*>(address), __ATOMIC_ACQUIRE);
}

// The comparisons of cuStreamWaitValue. The greater-or-equal one is cyclic.
template <typename T>
bool satisfied(T now, T value, unsigned flags) {
  switch (flags & 3) {
    case CU_STREAM_WAIT_VALUE_GEQ:
      return static_cast<std::make_signed_t<T>>(now - value) >= 0;
    case CU_STREAM_WAIT_VALUE_EQ:
      return now == value;
    case CU_STREAM_WAIT_VALUE_AND:
      return (now & value) != 0;
    default:
      return static_cast<T>(~(now | value)) != 0;
  }
}

std::string hex(uint64_t n) {
  char out[32];
  std::snprintf(out, sizeof(out), "0x%llx", static_cast<unsigned long long>(n));
  return out;
}

}  // namespace

void Worker::run(Work& work) {
  if (context_.dropping()) return;
  std::visit([this](auto& w) { run(w); }, work);
}

std::byte* Worker::shared_memory(size_t bytes) {
  if (bytes > shared_bytes_) {
    const size_t rounded = (bytes + XMIG_SHARED_ALIGNMENT - 1) / XMIG_SHARED_ALIGNMENT * XMIG_SHARED_ALIGNMENT;
    shared_.reset(static_cast<std::byte*>(std::aligned_alloc(XMIG_SHARED_ALIGNMENT, rounded)));
    shared_bytes_ = shared_ ? rounded : 0;
  }
  if (shared_ && bytes != 0) std::memset(shared_.get(), 0, bytes);
  return shared_.get();
}

void Worker::run(KernelWork& work) {
  // A kernel may write to its parameters' place, and may want it aligned for vector types.
  alignas(64) std::byte parameters[XMIG_MAX_PARAMETER_BYTES];
  if (!work.parameters.empty()) std::memcpy(parameters, work.parameters.data(), work.parameters.size());
  const std::string& name = work.function->kernel.name;
  xmig_block block{work.grid, work.block, {0, 0, 0}, work.shared_bytes, shared_memory(work.shared_bytes), fail,
                   set_conditional};
  if (work.shared_bytes > shared_bytes_) {
    context_.raise(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, t_sequence, "kernel " + name + ": no memory for shared memory");
    return;
  }
  if (work.forbidden != 0) {
    context_.raise(CUDA_ERROR_ILLEGAL_ADDRESS, t_sequence,
                   "kernel " + name + ": " + hex(work.forbidden) + " is mapped for other devices only");
    return;
  }
  const uint64_t blocks = uint64_t{work.grid.x} * work.grid.y * work.grid.z;
  const auto injected = context_.shared().injections.take(InjectPoint::kKernel, t_sequence);
  const uint64_t count = injected && blocks > 1 ? blocks / 2 : blocks;
  Trap trap;
  if (!guarded(trap, [&] { run_blocks(work.function->run, block, parameters, count); })) {
    context_.raise(trap.error, t_sequence, "kernel " + name + ": " + trap.describe() + ", " + block_name(block));
    return;
  }
  if (injected) inject(*injected, "kernel " + name + " after " + std::to_string(count) + " blocks");
}

void Worker::run(CopyWork& work) {
  const auto injected = context_.shared().injections.take(InjectPoint::kCopy, t_sequence);
  if (injected) {
    if (work.height > 1) {
      work.height /= 2;
    } else {
      work.width /= 2;
    }
  }
  Trap trap;
  if (!guarded(trap, [&] { copy_rows(work, 0, work.height); })) {
    context_.raise(trap.error, t_sequence,
                   "copy of " + std::to_string(work.width * work.height) + " bytes from " + hex(work.source) + " to " +
                       hex(work.destination) + ": " + trap.describe());
    return;
  }
  if (injected) inject(*injected, "copy after " + std::to_string(work.width * work.height) + " bytes");
}

void Worker::run(FillWork& work) {
  Trap trap;
  const bool filled = guarded(trap, [&] {
    for (uint64_t row = 0; row < work.height; ++row) {
      const uint64_t address = work.destination + row * work.pitch;
      if (work.element == 1) {
        std::memset(reinterpret_cast<void*>(address), static_cast<int>(work.value), work.width);
      } else if (work.element == 2) {
        fill_row(address, static_cast<uint16_t>(work.value), work.width);
      } else {
        fill_row(address, work.value, work.width);
      }
    }
  });
  if (!filled)
    context_.raise(trap.error, t_sequence, "memset at " + hex(work.destination) + ": " + trap.describe());
}

void Worker::run(RecordWork& work) { work.recording->nanoseconds.store(monotonic_nanoseconds()); }

void Worker::run(WaitWork& work) {
  Progress::instance().wait([&] { return work.reach.done() || context_.dropping(); });
}

void Worker::run(WriteValueWork& work) {
  Trap trap;
  const bool written = guarded(trap, [&] {
    if (work.bytes == 4) {
      __atomic_store_n(reinterpret_cast<uint32_t*>(work.address), static_cast<uint32_t>(work.value), __ATOMIC_RELEASE);
    } else {
      __atomic_store_n(reinterpret_cast<uint64_t*>(work.address), work.value, __ATOMIC_RELEASE);
    }
  });
  if (!written)
    context_.raise(trap.error, t_sequence, "write value at " + hex(work.address) + ": " + trap.describe());
}

void Worker::run(WaitValueWork& work) {
  Trap trap;
  bool met = false;
  Progress::instance().poll([&] {
    if (context_.dropping()) return true;
    const bool read = guarded(trap, [&] {
      met = work.bytes == 4 ? satisfied(load<uint32_t>(work.address), static_cast<uint32_t>(work.value), work.flags)
                            : satisfied(load<uint64_t>(work.address), work.value, work.flags);
    });
    return !read || met;
  });
  if (trap.error != 0)
    context_.raise(trap.error, t_sequence, "wait value at " + hex(work.address) + ": " + trap.describe());
}

void Worker::run(HostWork& work) { work.function(work.user); }

void Worker::run(GraphWork& work) {
  t_conditions.clear();
  start_conditions(*work.body);
  run(*work.body);
  t_conditions.clear();
}

void Worker::run(GraphBody& body) {
  for (Work& one : body.work) run(one);
}

void Worker::run(ChoiceWork& work) {
  const auto value = [&] { return t_conditions.at(work.condition); };
  switch (work.type) {
    case CU_GRAPH_COND_TYPE_IF:
      if (value() != 0) {
        run(*work.bodies[0]);
      } else if (work.bodies.size() == 2) {
        run(*work.bodies[1]);
      }
      break;
    case CU_GRAPH_COND_TYPE_WHILE:
      while (value() != 0 && !context_.dropping()) run(*work.bodies[0]);
      break;
    case CU_GRAPH_COND_TYPE_SWITCH:
      if (value() < work.bodies.size()) run(*work.bodies[value()]);
      break;
  }
}

void Worker::inject(const ArmedInjection& armed, const std::string& where) {
  const Injection& injection = armed.injection;
  if (armed.notify) armed.notify(armed.user, injection.id);
  switch (injection.kind) {
    case InjectKind::kKill:
      kill(getpid(), SIGKILL);
      break;
    case InjectKind::kFault:
      context_.raise(injection.error ? injection.error : CUDA_ERROR_ILLEGAL_ADDRESS, t_sequence,
                     "injected fault: " + where);
      break;
    case InjectKind::kFlip: break;  // never here: the server does it, between two records
    case InjectKind::kHang:
      XMIG_CPU_LOG("injected hang: %s", where.c_str());
      Progress::instance().wait([this] { return context_.abandoned(); }, false);
      break;
  }
}

}  // namespace xmig::device::cpu
