// Contexts: a number, a device, and a few settings that only the client knows. The server makes its side of a context
// when it meets the first record of it. They lie in one table and are never destroyed.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "client/journal/context_storage.h"
#include "client/journal/thread.h"
#include "journal/layout.h"

namespace xmig::client {

// Alive at the same time, the devices' primary contexts included.
inline constexpr uint32_t kMaxContexts = 64;
inline constexpr uint64_t kUnknownLimit = ~0ull;

struct Context {
  uint32_t index = 0;
  int ordinal = 0;
  bool primary = false;
  std::atomic<bool> alive{false};  // primary: retained
  std::atomic<uint32_t> flags{0};
  std::atomic<uint32_t> cache_config{CU_FUNC_CACHE_PREFER_NONE};
  std::atomic<uint32_t> shared_config{0};
  std::atomic<uint64_t> id{0};
  std::atomic<uint64_t> limits[CU_LIMIT_MAX] = {};  // kUnknownLimit until somebody has requested
  uint32_t retained = 0;  // primary; under the table's mutex
  ContextStorage storage;

  CUcontext handle() const {
    return reinterpret_cast<CUcontext>(journal::make_handle(journal::Kind::kContext, index));
  }
};

// The context of a handle, alive or not; nullptr if there never was one. nullptr for a null handle too.
Context* find_context(CUcontext handle);
Context& primary_context(int ordinal);
// Before the first use of any.
void prepare_contexts();

// A primary context is open from the first retain() to the last unretain().
void retain(Context& primary);
// How often it is retained still; nothing: it was not.
std::optional<uint32_t> unretain(Context& primary);
// One that the program makes; nullptr: there are as many as there can be.
Context* create_context(int ordinal, unsigned int flags);
void forget_limits(Context& context);

// The calling thread's context, if it is alive; otherwise the error to return.
struct Current {
  Context* context;
  CUresult error;
};
inline Current current(const Thread& thread) {
  if (!thread.context) [[unlikely]] return {nullptr, CUDA_ERROR_INVALID_CONTEXT};
  if (!thread.context->alive.load(std::memory_order_relaxed)) [[unlikely]] {
    return {nullptr, CUDA_ERROR_CONTEXT_IS_DESTROYED};
  }
  return {thread.context, CUDA_SUCCESS};
}

// For as long as one lives, the calling thread's current context is another.
class WithContext {
 public:
  explicit WithContext(Context& context) : thread_(this_thread()), before_(thread_.context) {
    thread_.context = &context;
  }
  ~WithContext() { thread_.context = before_; }
  WithContext(const WithContext&) = delete;
  WithContext& operator=(const WithContext&) = delete;

 private:
  Thread& thread_;
  Context* before_;
};

}  // namespace xmig::client
