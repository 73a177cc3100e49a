// Kernel launches: the call that everything else waits behind.
//
// What a program can get wrong is found here, so that the error comes from the launch that caused it. Then the record
// is written where it stays: the parameters are copied once, from where they are into the ring.
#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "client/bootstrap/message.h"
#include "client/journal/diversion.h"
#include "client/journal/ring_writer.h"
#include "client/journal/streams.h"
#include "client/modules/launch_checks.h"
#include "client/modules/modules.h"
#include "client/stream/events.h"
#include "local.h"

namespace xmig::client {
namespace {

struct Grid {
  unsigned int grid[3];
  unsigned int block[3];
  unsigned int shared_bytes;
};

CUresult check_grid(const Function& function, int ordinal, const Grid& grid) {
  const int32_t* const limits = process.devices[ordinal].attributes;
  static_assert(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z == CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X + 2);
  static_assert(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z == CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X + 2);
  uint64_t threads = 1;
  for (int i = 0; i < 3; ++i) {
    // One less, so that zero is too large as well.
    if (grid.grid[i] - 1 >= static_cast<unsigned int>(limits[CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X + i]) ||
        grid.block[i] - 1 >= static_cast<unsigned int>(limits[CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X + i])) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    threads *= grid.block[i];
  }
  if (threads > static_cast<uint64_t>(limits[CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK])) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const auto value = [&](CUfunction_attribute which) {
    return static_cast<uint64_t>(function.attributes[which].load(std::memory_order_relaxed));
  };
  if (threads > value(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)) {
    // Measured: a kernel with launch bounds refuses the value; one that runs out of registers says so.
    const uint64_t registers = threads * value(CU_FUNC_ATTRIBUTE_NUM_REGS);
    return registers > static_cast<uint64_t>(limits[CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK])
               ? CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
               : CUDA_ERROR_INVALID_VALUE;
  }
  if (grid.shared_bytes > value(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)) return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
}

// The attributes that a record can carry: plain values. Anything else is refused here, where the program can hear it.
CUresult check_attributes(int ordinal, const CUlaunchAttribute* attributes, unsigned int count, bool cooperative) {
  const bool can_cooperate = attribute(ordinal, CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH);
  if (cooperative && !can_cooperate) return CUDA_ERROR_NOT_SUPPORTED;
  for (unsigned int i = 0; i < count; ++i) {
    const CUlaunchAttributeValue& value = attributes[i].value;
    switch (attributes[i].id) {
      case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
        if (value.cooperative && !can_cooperate) return CUDA_ERROR_NOT_SUPPORTED;
        break;
      case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION: {
        const bool one = value.clusterDim.x == 1 && value.clusterDim.y == 1 && value.clusterDim.z == 1;
        if (!one && !attribute(ordinal, CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH)) return CUDA_ERROR_INVALID_CLUSTER_SIZE;
        break;
      }
      case CU_LAUNCH_ATTRIBUTE_IGNORE:
      case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
      case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
      case CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
      case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
      case CU_LAUNCH_ATTRIBUTE_PRIORITY:
      case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
      case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
      case CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION:
      case CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      case CU_LAUNCH_ATTRIBUTE_NVLINK_UTIL_CENTRIC_SCHEDULING:
        break;
      default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
  }
  return CUDA_SUCCESS;
}

constexpr unsigned int kMaxAttributes = 16;  // what the server takes

// Events that a launch completes: when its blocks have begun, or when they say so. To the program the end of the kernel
// is only a late moment of the same kind, and one that a recovery can tell; so they are recorded behind it.
struct LaunchEvents {
  struct {
    CUevent event;
    unsigned int flags;
  } all[kMaxAttributes];
  unsigned int count = 0;
};

// Copies the attributes without those that name events, which it gathers.
CUresult take_events(const CUlaunchAttribute* from, unsigned int count, CUlaunchAttribute* to, LaunchEvents& events) {
  for (unsigned int i = 0; i < count; ++i) {
    to[i] = from[i];
    const bool programmatic = from[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT;
    if (!programmatic && from[i].id != CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT) continue;
    const auto& value = from[i].value;
    const CUevent event = programmatic ? value.programmaticEvent.event : value.launchCompletionEvent.event;
    const int flags = programmatic ? value.programmaticEvent.flags : value.launchCompletionEvent.flags;
    if (!valid_event(event)) return CUDA_ERROR_INVALID_HANDLE;
    if (has_timing(event)) return CUDA_ERROR_INVALID_VALUE;
    events.all[events.count++] = {event, static_cast<unsigned int>(flags)};
    to[i] = {};
    to[i].id = CU_LAUNCH_ATTRIBUTE_IGNORE;
  }
  return CUDA_SUCCESS;
}

void complain_of(const Function& function, const Grid& grid, CUresult error) {
  complain("kernel %s cannot be launched with %u x %u x %u blocks of %u x %u x %u threads and %u bytes of dynamic shared "
           "memory: CUDA error %d", function.name.c_str(), grid.grid[0], grid.grid[1], grid.grid[2], grid.block[0],
           grid.block[1], grid.block[2], grid.shared_bytes, error);
}

// The parameters as one block that the program has packed itself.
struct Packed {
  const void* data = nullptr;
  size_t bytes = 0;
  CUresult error = CUDA_SUCCESS;
};
constexpr size_t kMaxPackedBytes = 32 << 10;  // more than any kernel takes

Packed unpack_extra(void** extra) {
  Packed packed;
  for (; *extra != CU_LAUNCH_PARAM_END; extra += 2) {
    if (extra[0] == CU_LAUNCH_PARAM_BUFFER_POINTER) {
      packed.data = extra[1];
    } else if (extra[0] == CU_LAUNCH_PARAM_BUFFER_SIZE) {
      packed.bytes = *static_cast<const size_t*>(extra[1]);
    } else {
      return {.error = CUDA_ERROR_INVALID_VALUE};
    }
  }
  if (packed.bytes && !packed.data) return {.error = CUDA_ERROR_INVALID_VALUE};
  packed.bytes = std::min(packed.bytes, kMaxPackedBytes);  // a driver that is shown too much need not see all of it
  return packed;
}

inline void copy_parameters(const Function& function, void* const* from, std::byte* to) {
  for (const journal::ParameterInfo& parameter : function.parameters) {
    const void* const value = *from++;
    std::byte* const place = to + parameter.offset;
    switch (parameter.size) {  // a call of memcpy would take longer than the copy
      case 8:
        std::memcpy(place, value, 8);
        break;
      case 4:
        std::memcpy(place, value, 4);
        break;
      default:
        std::memcpy(place, value, parameter.size);
    }
  }
}

// A launch that was recorded. It returns when its kernel has ended, with what became of it, if the program wants that; not
// while anything is captured, when nothing may wait.
CUresult launched(CUstream stream, CUresult result) {
  if (!process.launch_blocking || result != CUDA_SUCCESS || diverting()) [[likely]] return result;
  return client::cuStreamSynchronize(stream);
}

// One launch, and how it becomes a record: checked, then written where it stays, or gathered for who takes it in the journal's place.
struct Launch {
  const Function& function;
  const Grid& grid;
  CUstream stream;
  void** parameters;
  const CUlaunchAttribute* attributes;
  uint32_t attribute_count;
  bool cooperative;
  uint32_t parameter_bytes = function.parameter_bytes;
  bool is_packed = false;  // by the program
  Packed packed{};

  size_t attribute_bytes() const { return attribute_count * sizeof(CUlaunchAttribute); }
  // What a driver says of another number of bytes than the kernel takes is known to the driver only.
  bool odd() const { return parameter_bytes != function.parameter_bytes; }
  Shape shape() const {
    return {Op::xmLaunch, 0, sizeof(Args_xmLaunch), static_cast<uint32_t>(attribute_bytes() + parameter_bytes), 0};
  }
  void write(std::byte* arguments, std::byte* payload) const {
    new (arguments) Args_xmLaunch{
        .function = function.handle,
        .grid_x = grid.grid[0],
        .grid_y = grid.grid[1],
        .grid_z = grid.grid[2],
        .block_x = grid.block[0],
        .block_y = grid.block[1],
        .block_z = grid.block[2],
        .shared_bytes = grid.shared_bytes,
        .attributes = attribute_count,
        .parameter_bytes = parameter_bytes,
        .cooperative = cooperative,
        .stream = reinterpret_cast<uint64_t>(stream),
    };
    if (attribute_count) [[unlikely]] std::memcpy(payload, attributes, attribute_bytes());
    std::byte* const to = payload + attribute_bytes();
    if (is_packed) [[unlikely]] {
      if (parameter_bytes) std::memcpy(to, packed.data, parameter_bytes);
    } else {
      copy_parameters(function, parameters, to);
    }
  }
  // use(arguments, payload), not in the ring.
  template <typename Use>
  auto gathered(Use&& use) const {
    std::array<std::byte, sizeof(Args_xmLaunch)> arguments;
    std::vector<std::byte> payload(shape().payload);
    write(arguments.data(), payload.data());
    const Slice slice{payload.data(), payload.size()};
    return use(std::span<const std::byte>(arguments), std::span(&slice, 1));
  }
};

inline CUresult check_shape(const Launch& launch, int ordinal) {
  CUresult error = check_grid(launch.function, ordinal, launch.grid);
  if (error == CUDA_SUCCESS && (launch.cooperative || launch.attribute_count)) [[unlikely]] {
    error = check_attributes(ordinal, launch.attributes, launch.attribute_count, launch.cooperative);
  }
  if (error != CUDA_SUCCESS) [[unlikely]] complain_of(launch.function, launch.grid, error);
  return error;
}

inline CUresult check_stream(CUstream stream, const Context& context) {
  if (special(stream)) return CUDA_SUCCESS;
  const Stream* const known = find_stream(stream);
  if (!known || known->context != &context) [[unlikely]] return CUDA_ERROR_INVALID_HANDLE;
  return CUDA_SUCCESS;
}

// The program has packed them itself.
CUresult take_packed(Launch& launch, void** extra) {
  if (launch.parameters) return CUDA_ERROR_INVALID_VALUE;
  launch.is_packed = true;
  launch.packed = unpack_extra(extra);
  if (launch.packed.error != CUDA_SUCCESS) return launch.packed.error;
  if (diverting()) return launch.packed.bytes < launch.parameter_bytes ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
  launch.parameter_bytes = static_cast<uint32_t>(launch.packed.bytes);
  return CUDA_SUCCESS;
}

inline CUresult take_parameters(Launch& launch, void** extra) {
  if (extra) [[unlikely]] return take_packed(launch, extra);
  const bool missing = !launch.parameters && !launch.function.parameters.empty();
  if (missing) [[unlikely]] return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
}

// Something that only the device can judge: the first launch of its kind waits for what the device says. Nothing, if that is known.
std::optional<CUresult> ask_device(const Launch& launch) {
  LaunchShape requested{.function = launch.function.handle,
                    .grid = std::to_array(launch.grid.grid),
                    .block = std::to_array(launch.grid.block),
                    .shared_bytes = launch.grid.shared_bytes,
                    .cooperative = launch.cooperative};
  const bool judged = launch.odd() ||
                      (device_must_judge(launch.function, {launch.attributes, launch.attribute_count}, requested) &&
                       !accepted_before(requested));
  if (!judged) return std::nullopt;
  const CUresult error = launch.gathered([](std::span<const std::byte> arguments, std::span<const Slice> payload) {
    Pending pending = start(Op::xmFirstLaunch, arguments.data(), arguments.size(), payload, 0);
    return finish(pending, nullptr, 0);
  });
  if (error != CUDA_SUCCESS) {
    complain_of(launch.function, launch.grid, error);
  } else if (!launch.odd()) {
    accepted(requested);
  }
  return error;
}

// While work is captured, or collected otherwise. Nothing, if this is to be launched all the same. Not inline: what it needs would
// take registers from every launch.
[[gnu::noinline]] std::optional<CUresult> divert_launch(Thread& thread, const Launch& launch) {
  return launch.gathered([&](std::span<const std::byte> arguments, std::span<const Slice> payload) {
    return diversion().divert(thread, Op::xmLaunch, arguments.data(), arguments.size(), payload);
  });
}

CUresult launch(CUfunction f, const Grid& grid, CUstream stream, void** parameters, void** extra,
                const CUlaunchAttribute* attributes, unsigned int attribute_count, bool cooperative) {
  const Admitted admitted = admit(Op::xmLaunch);
  if (admitted.error != CUDA_SUCCESS) [[unlikely]] return admitted.error;
  Context& context = *admitted.context;
  const FunctionHere here = find_function(f, context);
  if (!here.function) [[unlikely]] return here.error;
  Launch launch{*here.function, grid, stream, parameters, attributes, attribute_count, cooperative};
  if (const CUresult error = check_shape(launch, context.ordinal); error != CUDA_SUCCESS) [[unlikely]] return error;
  if (const CUresult error = check_stream(stream, context); error != CUDA_SUCCESS) [[unlikely]] return error;
  if (const CUresult error = take_parameters(launch, extra); error != CUDA_SUCCESS) [[unlikely]] return error;
  if (diverting()) [[unlikely]] {
    if (const auto diverted = divert_launch(admitted.thread, launch)) return *diverted;
  } else if (cooperative || attribute_count || launch.function.clustered() || launch.odd()) [[unlikely]] {
    if (const auto answered = ask_device(launch)) return launched(stream, *answered);
  }
  const auto write = [&](std::byte* arguments, std::byte* payload) { launch.write(arguments, payload); };
  return launched(stream, write_record(admitted.thread, &context, launch.shape(), write).error);
}

}  // namespace

CUresult cuLaunchKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
                        unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ,
                        unsigned int sharedMemBytes, CUstream hStream, void** kernelParams, void** extra) {
  const Grid grid{{gridDimX, gridDimY, gridDimZ}, {blockDimX, blockDimY, blockDimZ}, sharedMemBytes};
  return launch(f, grid, hStream, kernelParams, extra, nullptr, 0, false);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction f, void** kernelParams, void** extra) {
  if (!config || (config->numAttrs && !config->attrs) || config->numAttrs > kMaxAttributes) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const Grid grid{{config->gridDimX, config->gridDimY, config->gridDimZ},
                  {config->blockDimX, config->blockDimY, config->blockDimZ},
                  config->sharedMemBytes};
  const CUstream stream = resolve(config->hStream);
  CUlaunchAttribute attributes[kMaxAttributes];
  LaunchEvents events;
  if (const CUresult error = take_events(config->attrs, config->numAttrs, attributes, events); error != CUDA_SUCCESS) {
    return error;
  }
  CUresult result = launch(f, grid, stream, kernelParams, extra, attributes, config->numAttrs, false);
  for (unsigned int i = 0; i < events.count && result == CUDA_SUCCESS; ++i) {
    result = client::cuEventRecordWithFlags(events.all[i].event, stream, events.all[i].flags);
  }
  return result;
}

CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
                                   unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ,
                                   unsigned int sharedMemBytes, CUstream hStream, void** kernelParams) {
  const Grid grid{{gridDimX, gridDimY, gridDimZ}, {blockDimX, blockDimY, blockDimZ}, sharedMemBytes};
  return launch(f, grid, hStream, kernelParams, nullptr, nullptr, 0, true);
}

// Launches of CUDA 2, whose block and parameters were set by functions that are not supported.
CUresult cuLaunch(CUfunction f) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuLaunchGrid(CUfunction f, int grid_width, int grid_height) { return CUDA_ERROR_NOT_SUPPORTED; }

}  // namespace xmig::client
