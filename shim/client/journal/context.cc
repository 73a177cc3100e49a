#include "client/journal/context.h"

#include <algorithm>
#include <mutex>

#include "client/bootstrap/process.h"

namespace xmig::client {
namespace {

constinit Context contexts[kMaxContexts];  // primary contexts at 1 + ordinal; 0 is none
constexpr uint32_t kFirstCreated = 1 + journal::kMaxDevices;
std::mutex contexts_mutex;
constinit std::atomic<uint64_t> next_id{1};

void open(Context& context, int ordinal) {
  context.ordinal = ordinal;
  context.id = next_id.fetch_add(1);
  context.cache_config = CU_FUNC_CACHE_PREFER_NONE;
  context.shared_config = CU_SHARED_MEM_CONFIG_FOUR_BYTE_BANK_SIZE;
  forget_limits(context);
  context.alive.store(true, std::memory_order_release);
}

}  // namespace

void prepare_contexts() {
  for (uint32_t i = 1; i < kMaxContexts; ++i) {
    contexts[i].index = i;
    contexts[i].primary = i < kFirstCreated;
    if (contexts[i].primary) contexts[i].ordinal = static_cast<int>(i - 1);
  }
}

Context* find_context(CUcontext handle) {
  const auto value = reinterpret_cast<uint64_t>(handle);
  if (!journal::handle_is(value, journal::Kind::kContext)) return nullptr;
  const uint32_t index = journal::handle_index(value);
  if (index == 0 || index >= kMaxContexts) return nullptr;
  Context& context = contexts[index];
  // A primary context has a handle before it is retained.
  const bool known = context.primary ? context.ordinal < process.device_count : context.id.load() != 0;
  return known ? &context : nullptr;
}

Context& primary_context(int ordinal) { return contexts[1 + ordinal]; }

void retain(Context& primary) {
  const std::lock_guard lock(contexts_mutex);
  if (primary.retained++ == 0) open(primary, primary.ordinal);
}

std::optional<uint32_t> unretain(Context& primary) {
  const std::lock_guard lock(contexts_mutex);
  if (primary.retained == 0) return std::nullopt;
  return --primary.retained;
}

Context* create_context(int ordinal, unsigned int flags) {
  const std::lock_guard lock(contexts_mutex);
  auto* const end = contexts + kMaxContexts;
  auto* const context = std::find_if(contexts + kFirstCreated, end, [](const Context& c) { return !c.alive.load(); });
  if (context == end) return nullptr;
  open(*context, ordinal);
  context->flags.store(flags);
  return context;
}

void forget_limits(Context& context) {
  for (auto& limit : context.limits) limit = kUnknownLimit;
}

}  // namespace xmig::client
