#include "client/bootstrap/unsupported.h"

#include <mutex>
#include <set>
#include <string_view>

#include "client/bootstrap/requested.h"
#include "client/bootstrap/message.h"
#include "client/bootstrap/process.h"

namespace xmig::client {

CUresult unsupported(const char* name) {
  if (process.phase.load(std::memory_order_acquire) == Phase::kForked) return CUDA_ERROR_NOT_INITIALIZED;
  static std::mutex& mutex = *new std::mutex;
  static auto& named = *new std::set<std::string_view>;
  const std::lock_guard lock(mutex);
  if (!named.insert(name).second) return CUDA_ERROR_NOT_SUPPORTED;
  note_refused(name);
  say("%s is not supported: the call returned CUDA_ERROR_NOT_SUPPORTED", name);
  return CUDA_ERROR_NOT_SUPPORTED;
}

}  // namespace xmig::client
