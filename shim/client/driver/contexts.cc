// The context stack of each thread, primary contexts, and the settings that only the client knows.
//
// What lies in this folder: functions of the driver that are about all of a process or of a context: its beginning (init), contexts,
// devices, errors, profiler, tensor maps. A context's end reaches into every other folder, so this one stands above them, and has no
// header of its own: nothing but the generated stubs calls it. It has no state; what contexts share is in journal/context.h, under
// the lock that is named there.
#include "client/journal/context.h"

#include <optional>

#include "client/bootstrap/process.h"
#include "client/graph/graph.h"
#include "client/journal/append.h"
#include "client/journal/streams.h"
#include "client/memory/memory.h"
#include "client/memory/peers.h"
#include "client/modules/modules.h"
#include "client/stream/events.h"
#include "local.h"
#include "records.h"

namespace xmig::client {
namespace {

constexpr uint32_t kKnownFlags = CU_CTX_SCHED_MASK | CU_CTX_MAP_HOST | CU_CTX_LMEM_RESIZE_TO_MAX |
                                 CU_CTX_COREDUMP_ENABLE | CU_CTX_USER_COREDUMP_ENABLE | CU_CTX_SYNC_MEMOPS;

// Those that the driver interface names. Which of them this device has, and what it says of others, its driver knows.
bool known(CUlimit limit) { return limit >= 0 && limit < CU_LIMIT_MAX; }

// Everything that was made in the context is gone, on both sides.
CUresult reset(Context& context, bool destroyed) {
  context.storage.clear(context.handle());
  const Args_xmContextReset args{.context = reinterpret_cast<uint64_t>(context.handle()), .destroyed = destroyed};
  CUresult result;
  {
    const WithContext inside(context);
    result = call(Op::xmContextReset, &args, sizeof(args), nullptr, 0);
  }
  forget_limits(context);
  peers_context_reset(context);
  memory_context_reset(args.context);
  streams_context_reset(context);
  events_context_reset(context);
  graphs_context_reset(context);
  modules_context_reset(context);
  return result;
}

void set_top(Thread& thread) { thread.context = thread.stack.empty() ? nullptr : thread.stack.back(); }

}  // namespace

// --- primary contexts -----------------------------------------------------------------------------------------

CUresult cuDevicePrimaryCtxRetain(CUcontext* pctx, CUdevice dev) {
  if (const CUresult error = initialized(); error != CUDA_SUCCESS) return error;
  if (!pctx) return CUDA_ERROR_INVALID_VALUE;
  if (!description(dev)) return CUDA_ERROR_INVALID_DEVICE;
  if (const CUresult error = open_device(dev); error != CUDA_SUCCESS) return error;
  Context& context = primary_context(dev);
  retain(context);
  *pctx = context.handle();
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice dev) {
  if (const CUresult error = initialized(); error != CUDA_SUCCESS) return error;
  if (!description(dev)) return CUDA_ERROR_INVALID_DEVICE;
  Context& context = primary_context(dev);
  const std::optional<uint32_t> retained = unretain(context);
  if (!retained) return CUDA_ERROR_INVALID_CONTEXT;
  if (*retained > 0) return CUDA_SUCCESS;
  const CUresult result = reset(context, true);
  context.alive.store(false, std::memory_order_release);
  return result;
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice dev) {
  if (const CUresult error = initialized(); error != CUDA_SUCCESS) return error;
  if (!description(dev)) return CUDA_ERROR_INVALID_DEVICE;
  Context& context = primary_context(dev);
  if (!context.alive.load()) return CUDA_SUCCESS;
  return reset(context, false);
}

CUresult cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int* flags, int* active) {
  if (const CUresult error = initialized(); error != CUDA_SUCCESS) return error;
  if (!flags || !active) return CUDA_ERROR_INVALID_VALUE;
  if (!description(dev)) return CUDA_ERROR_INVALID_DEVICE;
  const Context& context = primary_context(dev);
  *flags = context.flags.load(std::memory_order_relaxed);
  *active = context.alive.load(std::memory_order_relaxed);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice dev, unsigned int flags) {
  if (const CUresult error = initialized(); error != CUDA_SUCCESS) return error;
  if (!description(dev)) return CUDA_ERROR_INVALID_DEVICE;
  if (flags & ~kKnownFlags) return CUDA_ERROR_INVALID_VALUE;
  primary_context(dev).flags.store(flags);
  return CUDA_SUCCESS;
}

// --- contexts that the program makes --------------------------------------------------------------------------

CUresult cuCtxCreate_v2(CUcontext* pctx, unsigned int flags, CUdevice dev) {
  if (const CUresult error = initialized(); error != CUDA_SUCCESS) return error;
  if (!pctx || (flags & ~kKnownFlags)) return CUDA_ERROR_INVALID_VALUE;
  if (!description(dev)) return CUDA_ERROR_INVALID_DEVICE;
  if (const CUresult error = open_device(dev); error != CUDA_SUCCESS) return error;
  Context* const context = create_context(dev, flags);
  if (!context) return CUDA_ERROR_OUT_OF_MEMORY;
  Thread& thread = this_thread();
  thread.stack.push_back(context);
  set_top(thread);
  *pctx = context->handle();
  return CUDA_SUCCESS;
}

CUresult cuCtxCreate_v3(CUcontext* pctx, CUexecAffinityParam* paramsArray, int numParams, unsigned int flags,
                        CUdevice dev) {
  if (paramsArray || numParams) return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
  return client::cuCtxCreate_v2(pctx, flags, dev);
}

CUresult cuCtxCreate_v4(CUcontext* pctx, CUctxCreateParams* ctxCreateParams, unsigned int flags, CUdevice dev) {
  if (ctxCreateParams && (ctxCreateParams->execAffinityParams || ctxCreateParams->cigParams)) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  return client::cuCtxCreate_v2(pctx, flags, dev);
}

CUresult cuCtxDestroy_v2(CUcontext ctx) {
  if (const CUresult error = initialized(); error != CUDA_SUCCESS) return error;
  Context* const context = find_context(ctx);
  if (!context || context->primary || !context->alive.load()) return CUDA_ERROR_INVALID_CONTEXT;
  const CUresult result = reset(*context, true);
  Thread& thread = this_thread();
  if (!thread.stack.empty() && thread.stack.back() == context) {
    thread.stack.pop_back();
    set_top(thread);
  }
  context->alive.store(false, std::memory_order_release);
  return result;
}

// --- the stack ------------------------------------------------------------------------------------------------

CUresult cuCtxGetCurrent(CUcontext* pctx) {
  if (const CUresult error = initialized(); error != CUDA_SUCCESS) return error;
  if (!pctx) return CUDA_ERROR_INVALID_VALUE;
  const Thread& thread = this_thread();
  *pctx = thread.context ? thread.context->handle() : nullptr;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext ctx) {
  if (const CUresult error = initialized(); error != CUDA_SUCCESS) return error;
  Thread& thread = this_thread();
  Context* const context = find_context(ctx);
  if (ctx && (!context || (!context->alive.load() && !context->primary))) return CUDA_ERROR_INVALID_CONTEXT;
  if (!thread.stack.empty()) thread.stack.pop_back();
  if (context) thread.stack.push_back(context);
  set_top(thread);
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext ctx) {
  if (const CUresult error = initialized(); error != CUDA_SUCCESS) return error;
  Context* const context = find_context(ctx);
  if (!context || (!context->alive.load() && !context->primary)) return CUDA_ERROR_INVALID_CONTEXT;
  Thread& thread = this_thread();
  thread.stack.push_back(context);
  set_top(thread);
  return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext* pctx) {
  if (const CUresult error = initialized(); error != CUDA_SUCCESS) return error;
  Thread& thread = this_thread();
  if (thread.stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (pctx) *pctx = thread.stack.back()->handle();
  thread.stack.pop_back();
  set_top(thread);
  return CUDA_SUCCESS;
}

// --- about the current context --------------------------------------------------------------------------------

namespace {

struct Here {
  Context* context = nullptr;
  CUresult error = CUDA_SUCCESS;
};
Here here() {
  if (const CUresult error = initialized(); error != CUDA_SUCCESS) return {nullptr, error};
  const Current now = current(this_thread());
  return {now.context, now.error};
}

}  // namespace

CUresult cuCtxGetDevice(CUdevice* device) {
  const Here now = here();
  if (now.error != CUDA_SUCCESS) return now.error;
  if (!device) return CUDA_ERROR_INVALID_VALUE;
  *device = now.context->ordinal;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice_v2(CUdevice* device, CUcontext ctx) {
  if (!ctx) return client::cuCtxGetDevice(device);
  if (const CUresult error = initialized(); error != CUDA_SUCCESS) return error;
  const Context* const context = find_context(ctx);
  if (!context) return CUDA_ERROR_INVALID_CONTEXT;
  if (!device) return CUDA_ERROR_INVALID_VALUE;
  *device = context->ordinal;
  return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize_v2(CUcontext ctx) {
  if (!ctx) return client::cuCtxSynchronize();
  if (const CUresult error = initialized(); error != CUDA_SUCCESS) return error;
  Context* const context = find_context(ctx);
  if (!context) return CUDA_ERROR_INVALID_CONTEXT;
  const WithContext inside(*context);
  return client::cuCtxSynchronize();
}

CUresult cuCtxGetFlags(unsigned int* flags) {
  const Here now = here();
  if (now.error != CUDA_SUCCESS) return now.error;
  if (!flags) return CUDA_ERROR_INVALID_VALUE;
  *flags = now.context->flags.load();
  return CUDA_SUCCESS;
}

CUresult cuCtxSetFlags(unsigned int flags) {
  const Here now = here();
  if (now.error != CUDA_SUCCESS) return now.error;
  if (flags & ~kKnownFlags) return CUDA_ERROR_INVALID_VALUE;
  now.context->flags.store(flags);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetApiVersion(CUcontext ctx, unsigned int* version) {
  if (const CUresult error = initialized(); error != CUDA_SUCCESS) return error;
  if (!version) return CUDA_ERROR_INVALID_VALUE;
  if (ctx && !find_context(ctx)) return CUDA_ERROR_INVALID_CONTEXT;
  *version = 3020;  // of the context functions; it has not changed since _v2
  return CUDA_SUCCESS;
}

CUresult cuCtxGetId(CUcontext ctx, unsigned long long* ctxId) {
  if (const CUresult error = initialized(); error != CUDA_SUCCESS) return error;
  if (!ctxId) return CUDA_ERROR_INVALID_VALUE;
  const Context* const context = ctx ? find_context(ctx) : this_thread().context;
  if (!context || !context->alive.load()) return ctx ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_ERROR_INVALID_CONTEXT;
  *ctxId = context->id.load();
  return CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t* pvalue, CUlimit limit) {
  const Here now = here();
  if (now.error != CUDA_SUCCESS) return now.error;
  if (!pvalue) return CUDA_ERROR_INVALID_VALUE;
  uint64_t value = known(limit) ? now.context->limits[limit].load() : kUnknownLimit;
  if (value == kUnknownLimit) {
    const Args_xmLimit args{.limit = static_cast<uint32_t>(limit)};
    if (const CUresult error = call(Op::xmLimit, &args, sizeof(args), &value, sizeof(value)); error != CUDA_SUCCESS) {
      return error;
    }
    if (known(limit)) now.context->limits[limit].store(value);
  }
  *pvalue = value;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
  const Here now = here();
  if (now.error != CUDA_SUCCESS) return now.error;
  const Args_xmLimit args{.limit = static_cast<uint32_t>(limit), .set = 1, .value = value};
  uint64_t is = 0;
  const CUresult result = call(Op::xmLimit, &args, sizeof(args), &is, sizeof(is));
  if (result == CUDA_SUCCESS && known(limit)) now.context->limits[limit].store(is);
  return result;
}

CUresult cuCtxGetCacheConfig(CUfunc_cache* pconfig) {
  const Here now = here();
  if (now.error != CUDA_SUCCESS) return now.error;
  if (!pconfig) return CUDA_ERROR_INVALID_VALUE;
  *pconfig = static_cast<CUfunc_cache>(now.context->cache_config.load());
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCacheConfig(CUfunc_cache config) {
  const Here now = here();
  if (now.error != CUDA_SUCCESS) return now.error;
  if (config < CU_FUNC_CACHE_PREFER_NONE || config > CU_FUNC_CACHE_PREFER_EQUAL) return CUDA_ERROR_INVALID_VALUE;
  now.context->cache_config.store(config);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetSharedMemConfig(CUsharedconfig* pConfig) {
  const Here now = here();
  if (now.error != CUDA_SUCCESS) return now.error;
  if (!pConfig) return CUDA_ERROR_INVALID_VALUE;
  *pConfig = static_cast<CUsharedconfig>(now.context->shared_config.load());
  return CUDA_SUCCESS;
}

CUresult cuCtxSetSharedMemConfig(CUsharedconfig config) {
  const Here now = here();
  if (now.error != CUDA_SUCCESS) return now.error;
  if (config < 0 || config > CU_SHARED_MEM_CONFIG_EIGHT_BYTE_BANK_SIZE) return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;  // as on every device since 2014: the banks have one size
}

CUresult cuCtxGetStreamPriorityRange(int* leastPriority, int* greatestPriority) {
  const Here now = here();
  if (now.error != CUDA_SUCCESS) return now.error;
  if (leastPriority) *leastPriority = kLeastPriority;
  if (greatestPriority) *greatestPriority = greatest_priority(now.context->ordinal);
  return CUDA_SUCCESS;
}

CUresult cuCtxResetPersistingL2Cache() { return here().error; }

CUresult cuCtxGetExecAffinity(CUexecAffinityParam* pExecAffinity, CUexecAffinityType type) {
  const Here now = here();
  if (now.error != CUDA_SUCCESS) return now.error;
  return pExecAffinity ? CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuFlushGPUDirectRDMAWrites(CUflushGPUDirectRDMAWritesTarget target, CUflushGPUDirectRDMAWritesScope scope) {
  return here().error;
}

}  // namespace xmig::client
