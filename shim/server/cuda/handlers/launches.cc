#include "server/cuda/handlers/launches.h"

#include <cstring>

#include "server/cuda/objects/loading.h"

namespace xmig::server {
namespace {

constexpr uint32_t kMaxLaunchAttributes = 16;

// Does any parameter look like an address of the program's page-locked memory? Such a kernel may read what no journal
// holds; it can only be executed again as long as the program does not know that it was executed.
bool mentions_pinned(const std::byte* parameters, uint32_t bytes) {
  for (uint32_t i = 0; i + sizeof(uint64_t) <= bytes; i += sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, parameters + i, sizeof(word));
    if (word - journal::kPinnedBase < journal::kPinnedBytes) return true;
  }
  return false;
}

template <typename Args>
CUlaunchConfig shape_of(const Args& args) {
  CUlaunchConfig config{};
  config.gridDimX = args.grid_x;
  config.gridDimY = args.grid_y;
  config.gridDimZ = args.grid_z;
  config.blockDimX = args.block_x;
  config.blockDimY = args.block_y;
  config.blockDimZ = args.block_z;
  config.sharedMemBytes = args.shared_bytes;
  return config;
}

template <typename Args>
size_t attribute_bytes(const Args& args) {
  return size_t{args.attributes} * sizeof(CUlaunchAttribute);
}

// Does the payload have what the arguments say, and as many parameters as the kernel takes? Another number is for the driver to
// judge, if it is waited for.
bool is_whole(const Args_xmLaunch& args, const Kernel& kernel, size_t payload_bytes, bool waited_for) {
  const bool odd = args.parameter_bytes != *kernel.parameter_bytes;
  return args.attributes <= kMaxLaunchAttributes && (!odd || waited_for) &&
         attribute_bytes(args) + args.parameter_bytes <= payload_bytes;
}

// Attributes hold handles and unknown things of the future: only those that are plain values pass.
CUresult copy_attributes(CUlaunchAttribute* to, uint32_t count, const std::byte* from) {
  if (count != 0) std::memcpy(static_cast<void*>(to), from, count * sizeof(CUlaunchAttribute));
  for (uint32_t i = 0; i < count; ++i) {
    switch (to[i].id) {
      case CU_LAUNCH_ATTRIBUTE_IGNORE:
      case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
      case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
      case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
      case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
      case CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
      case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
      case CU_LAUNCH_ATTRIBUTE_PRIORITY:
      case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
      case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
      case CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION:
      case CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      case CU_LAUNCH_ATTRIBUTE_NVLINK_UTIL_CENTRIC_SCHEDULING: break;
      default: return CUDA_ERROR_NOT_SUPPORTED;
    }
  }
  return CUDA_SUCCESS;
}

// `to` has room for one more than a record may bring.
CUresult take_attributes(const Args_xmLaunch& args, const std::byte* from, CUlaunchAttribute* to, CUlaunchConfig& config) {
  if (const CUresult result = copy_attributes(to, args.attributes, from); result != CUDA_SUCCESS) return result;
  config.numAttrs = args.attributes;
  if (args.cooperative != 0) {
    CUlaunchAttribute& last = to[config.numAttrs++];
    std::memset(static_cast<void*>(&last), 0, sizeof(last));
    last.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    last.value.cooperative = 1;
  }
  config.attrs = to;
  return CUDA_SUCCESS;
}

}  // namespace

Launches::Launches(const Session& session, Streams& streams, const Variables& variables, Addresses& addresses)
    : driver_(session.device.driver()),
      contexts_(session.services.contexts),
      objects_(session.objects),
      streams_(streams),
      variables_(variables),
      addresses_(addresses) {}

CUresult Launches::on_xmLaunch(Record& record) {
  Args_xmLaunch args;
  return record.arguments(args) ? launch(record, args) : CUDA_ERROR_INVALID_VALUE;
}

// What the driver says at once is the answer; nothing waits for the kernel.
CUresult Launches::on_xmFirstLaunch(Record& record) {
  static_assert(sizeof(Args_xmFirstLaunch) == sizeof(Args_xmLaunch));
  Args_xmLaunch args;
  return record.arguments(args) ? launch(record, args) : CUDA_ERROR_INVALID_VALUE;
}

Kernel* Launches::find_kernel(uint64_t handle) {
  return journal::handle_is(handle, journal::Kind::kFunction) ? objects_.kernel(journal::handle_index(handle)) : nullptr;
}

CUresult Launches::launch(Record& record, const Args_xmLaunch& args) {
  Kernel* const kernel = find_kernel(args.function);
  CUstream stream = nullptr;
  if (!kernel || !streams_.translate(args.stream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  if (!kernel->parameter_bytes) [[unlikely]] describe_parameters(driver_, *kernel);  // after a recovery nobody asks again
  const std::span<std::byte> payload = record.payload();
  if (!is_whole(args, *kernel, payload.size(), record.synchronous())) return CUDA_ERROR_INVALID_VALUE;

  CUlaunchConfig config = shape_of(args);
  config.hStream = stream;
  CUlaunchAttribute attributes[kMaxLaunchAttributes + 1];
  if (args.attributes != 0 || args.cooperative != 0) {
    const CUresult result = take_attributes(args, payload.data(), attributes, config);
    if (result != CUDA_SUCCESS) return result;
  }
  std::byte* parameters = payload.data() + attribute_bytes(args);
  size_t bytes = args.parameter_bytes;
  std::vector<std::byte> translated;
  if (variables_.has_twins()) [[unlikely]] {
    translated = variables_.translated({parameters, args.parameter_bytes});
    if (!translated.empty()) parameters = translated.data();
  }
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, parameters, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes,
                   CU_LAUNCH_PARAM_END};
  if (mentions_pinned(parameters, args.parameter_bytes)) [[unlikely]] addresses_.uses_pinned();
  if (contexts_.count() == 1) [[likely]] return driver_.cuLaunchKernelEx(&config, kernel->real, nullptr, extra);
  // A graph that the client appends record by record can have kernels of other devices than its stream's.
  const uint32_t home = objects_.modules.find(journal::handle_index(args.function) >> kKernelBits)->owner.ordinal;
  return streams_.on_device_of(home, stream, [&](CUstream there) {
    config.hStream = there;
    return driver_.cuLaunchKernelEx(&config, kernel->real, nullptr, extra);
  });
}

CUresult Launches::on_xmClusters(Record& record) {
  Args_xmClusters args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  const Kernel* const kernel = find_kernel(args.function);
  if (!kernel) return CUDA_ERROR_INVALID_HANDLE;
  const std::span<std::byte> payload = record.payload();
  if (args.attributes > kMaxLaunchAttributes || args.attributes * sizeof(CUlaunchAttribute) > payload.size()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  CUlaunchAttribute attributes[kMaxLaunchAttributes];
  if (const CUresult result = copy_attributes(attributes, args.attributes, payload.data()); result != CUDA_SUCCESS) {
    return result;
  }
  CUlaunchConfig config = shape_of(args);
  config.attrs = attributes;
  config.numAttrs = args.attributes;
  int answer = 0;
  const CUresult result = args.potential_size
                              ? driver_.cuOccupancyMaxPotentialClusterSize(&answer, kernel->real, &config)
                              : driver_.cuOccupancyMaxActiveClusters(&answer, kernel->real, &config);
  if (result == CUDA_SUCCESS) record.set_reply(&answer, sizeof(answer));
  return result;
}

}  // namespace xmig::server
