// The device itself answers once for each kernel and configuration (libraries ask the same again and again); the rest
// follows from that.
#include "client/modules/occupancy.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>

#include "client/journal/append.h"
#include "client/journal/ring_writer.h"
#include "client/modules/modules.h"
#include "local.h"
#include "records.h"

namespace xmig::client {
namespace {

using Requested = std::tuple<uint64_t, int, size_t, unsigned int>;  // function, block, dynamic shared memory, flags
std::mutex answers_mutex;
std::map<Requested, int>& answers = *new std::map<Requested, int>;

std::optional<int> remembered(const Requested& requested) {
  const std::lock_guard lock(answers_mutex);
  const auto found = answers.find(requested);
  return found == answers.end() ? std::nullopt : std::optional(found->second);
}

FunctionHere here(CUfunction func) {
  Thread& thread = this_thread();
  if (const CUresult error = enter(thread); error != CUDA_SUCCESS) return {nullptr, error};
  const Current now = current(thread);
  if (!now.context) return {nullptr, now.error};
  return find_function(func, *now.context);
}

}  // namespace

void forget_occupancy(const Function& function) {
  const std::lock_guard lock(answers_mutex);
  const auto first = answers.lower_bound({function.handle, 0, 0, 0});
  const auto last = answers.lower_bound({function.handle + 1, 0, 0, 0});
  answers.erase(first, last);
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* numBlocks, CUfunction func, int blockSize,
                                                              size_t dynamicSMemSize, unsigned int flags) {
  if (!numBlocks || blockSize <= 0 || (flags & ~static_cast<unsigned int>(CU_OCCUPANCY_DISABLE_CACHING_OVERRIDE))) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const FunctionHere found = here(func);
  if (!found.function) return found.error;
  const Requested requested{found.function->handle, blockSize, dynamicSMemSize, flags};
  if (const std::optional<int> answer = remembered(requested)) {
    *numBlocks = *answer;
    return CUDA_SUCCESS;
  }
  const auto function = reinterpret_cast<CUfunction>(found.function->handle);
  const CUresult result = record::cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(numBlocks, function, blockSize,
                                                                                       dynamicSMemSize, flags);
  if (result != CUDA_SUCCESS) return result;
  const std::lock_guard lock(answers_mutex);
  answers.emplace(requested, *numBlocks);
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* numBlocks, CUfunction func, int blockSize,
                                                     size_t dynamicSMemSize) {
  return client::cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(numBlocks, func, blockSize, dynamicSMemSize, 0);
}

// The block size with the most threads on a multiprocessor; among equal ones the largest.
CUresult cuOccupancyMaxPotentialBlockSizeWithFlags(int* minGridSize, int* blockSize, CUfunction func,
                                                   CUoccupancyB2DSize blockSizeToDynamicSMemSize,
                                                   size_t dynamicSMemSize, int blockSizeLimit, unsigned int flags) {
  if (!minGridSize || !blockSize || blockSizeLimit < 0) return CUDA_ERROR_INVALID_VALUE;
  const FunctionHere found = here(func);
  if (!found.function) return found.error;
  const int ordinal = found.function->module->context->ordinal;
  const int warp = std::max(1, attribute(ordinal, CU_DEVICE_ATTRIBUTE_WARP_SIZE));
  int most = std::min(attribute(ordinal, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK),
                      found.function->attributes[CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK].load());
  if (blockSizeLimit > 0) most = std::min(most, blockSizeLimit);
  int best_threads = 0, best_block = 0, best_blocks = 0;
  for (int block = most; block > 0; block = block % warp ? block - block % warp : block - warp) {
    const size_t shared = blockSizeToDynamicSMemSize ? blockSizeToDynamicSMemSize(block) : dynamicSMemSize;
    int blocks = 0;
    const CUresult error =
        client::cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(&blocks, func, block, shared, flags);
    if (error != CUDA_SUCCESS) return error;
    if (blocks * block > best_threads) {
      best_threads = blocks * block;
      best_block = block;
      best_blocks = blocks;
    }
    if (best_threads >= attribute(ordinal, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)) break;
  }
  *blockSize = best_block;
  *minGridSize = best_blocks * attribute(ordinal, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxPotentialBlockSize(int* minGridSize, int* blockSize, CUfunction func,
                                          CUoccupancyB2DSize blockSizeToDynamicSMemSize, size_t dynamicSMemSize,
                                          int blockSizeLimit) {
  return client::cuOccupancyMaxPotentialBlockSizeWithFlags(minGridSize, blockSize, func, blockSizeToDynamicSMemSize,
                                                   dynamicSMemSize, blockSizeLimit, 0);
}

CUresult cuOccupancyAvailableDynamicSMemPerBlock(size_t* dynamicSmemSize, CUfunction func, int numBlocks,
                                                 int blockSize) {
  if (!dynamicSmemSize || numBlocks <= 0 || blockSize <= 0) return CUDA_ERROR_INVALID_VALUE;
  const FunctionHere found = here(func);
  if (!found.function) return found.error;
  const int ordinal = found.function->module->context->ordinal;
  const int reserved = attribute(ordinal, CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK);
  const int fixed = found.function->attributes[CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES].load();
  const int share =
      attribute(ordinal, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR) / numBlocks - reserved - fixed;
  // Natively no more than the function may have, which without being requested is what every device has.
  const int allowed = found.function->attributes[CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES].load();
  const int most =
      std::min(allowed, attribute(ordinal, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN) - fixed);
  *dynamicSmemSize = static_cast<size_t>(std::max(0, std::min(share, most)));
  return CUDA_SUCCESS;
}

namespace {

CUresult clusters(int* answer, CUfunction func, const CUlaunchConfig* config, bool potential_size) {
  if (!answer || !config || (config->numAttrs && !config->attrs)) return CUDA_ERROR_INVALID_VALUE;
  const FunctionHere found = here(func);
  if (!found.function) return found.error;
  const int ordinal = found.function->module->context->ordinal;
  if (!attribute(ordinal, CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH)) return CUDA_ERROR_NOT_SUPPORTED;
  const Args_xmClusters args{.function = found.function->handle,
                             .grid_x = config->gridDimX,
                             .grid_y = config->gridDimY,
                             .grid_z = config->gridDimZ,
                             .block_x = config->blockDimX,
                             .block_y = config->blockDimY,
                             .block_z = config->blockDimZ,
                             .shared_bytes = config->sharedMemBytes,
                             .attributes = config->numAttrs,
                             .potential_size = potential_size};
  const Slice attributes{config->attrs, config->numAttrs * sizeof(CUlaunchAttribute)};
  Pending pending = start(Op::xmClusters, &args, sizeof(args), {&attributes, 1}, sizeof(*answer));
  return finish(pending, answer, sizeof(*answer));
}

}  // namespace

CUresult cuOccupancyMaxActiveClusters(int* numClusters, CUfunction func, const CUlaunchConfig* config) {
  return clusters(numClusters, func, config, false);
}

CUresult cuOccupancyMaxPotentialClusterSize(int* clusterSize, CUfunction func, const CUlaunchConfig* config) {
  return clusters(clusterSize, func, config, true);
}

}  // namespace xmig::client
