#include "client/memory/memory_progress.h"

#include <algorithm>
#include <atomic>
#include <set>

#include "client/journal/append.h"
#include "client/memory/memory.h"
#include "journal/layout.h"

namespace xmig::client {

namespace {

// Keys of streams that are no handles. Handles have kHandleTag on top, so the top bits tell them apart.
constexpr uint64_t kLegacy = 1ull << 63;
constexpr uint64_t kPerThread = 1ull << 62;
constexpr uint64_t kOrphans = 1ull << 61;

uint64_t thread_number() {
  static std::atomic<uint64_t> next{1};
  thread_local const uint64_t number = next.fetch_add(1, std::memory_order_relaxed);
  return number;
}

struct Contexts {
  std::mutex lock;
  std::set<uint64_t> known;
};
Contexts& contexts() {
  static auto& all = *new Contexts;
  return all;
}

}  // namespace

void Progress::stream_reached(uint64_t stream_key, uint64_t sequence) {
  const std::lock_guard guard(lock_);
  uint64_t& reached = streams_[stream_key];
  reached = std::max(reached, sequence);
}

void Progress::context_reached(uint64_t context, uint64_t sequence) {
  const std::lock_guard guard(lock_);
  uint64_t& reached = contexts_[context];
  reached = std::max(reached, sequence);
}

bool Progress::covers(const FreedBy& freed) {
  const std::lock_guard guard(lock_);
  const auto stream = streams_.find(freed.stream);
  if (stream != streams_.end() && freed.sequence < stream->second) return true;
  const auto context = contexts_.find(freed.context);
  return context != contexts_.end() && freed.sequence < context->second;
}

Progress& progress() {
  static auto& all = *new Progress;
  return all;
}

uint64_t orphan_key(uint64_t context) { return kOrphans | journal::handle_index(context); }

uint64_t memory_stream_key(CUstream stream) {
  const uint64_t context = journal::handle_index(current_context());
  if (!stream || stream == CU_STREAM_LEGACY) return kLegacy | context;
  if (stream == CU_STREAM_PER_THREAD) return kPerThread | (context << 32) | thread_number();
  return reinterpret_cast<uint64_t>(stream);
}

void note_context(uint64_t context) {
  const std::lock_guard guard(contexts().lock);
  contexts().known.insert(context);
}

void forget_context(uint64_t context) {
  const std::lock_guard guard(contexts().lock);
  contexts().known.erase(context);
}

CUresult synchronize_users(uint64_t owner) {
  std::set<uint64_t> others;
  {
    const std::lock_guard guard(contexts().lock);
    others = contexts().known;
  }
  if (const uint64_t current = current_context()) others.insert(current);
  others.erase(owner);
  if (const CUresult result = synchronize_context(owner); result != CUDA_SUCCESS) return result;
  for (const uint64_t context : others) synchronize_context(context);
  return CUDA_SUCCESS;
}

}  // namespace xmig::client
