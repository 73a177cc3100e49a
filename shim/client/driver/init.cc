// The beginning: a process gets a job at its first cuInit, or the genuine driver, or neither.
#include <pthread.h>

#include <cstdlib>
#include <mutex>
#include <new>
#include <string_view>

#include "client/bootstrap/handshake.h"
#include "client/bootstrap/native.h"
#include "client/bootstrap/process.h"
#include "client/journal/context.h"
#include "ipc/visible.h"
#include "local.h"

namespace xmig::client {
namespace {

std::mutex init_mutex;

void in_forked_child() {
  // The journal belongs to the parent (and is not even mapped here). A child of a process that has not
  // initialised yet starts afresh.
  if (process.phase.load() == Phase::kRunning) process.phase.store(Phase::kForked);
  new (&init_mutex) std::mutex;  // another thread of the parent may have held it
}

bool native_wanted() {
  const char* const value = std::getenv("XMIG_WITHOUT_DAEMON");
  return value && std::string_view(value) == "native";
}

bool devices_hidden() {
  const char* const value = std::getenv("CUDA_VISIBLE_DEVICES");
  return value && !names_devices(value);
}

bool launch_blocking_wanted() {
  const char* const value = std::getenv("CUDA_LAUNCH_BLOCKING");
  return value && std::atoi(value) != 0;
}

}  // namespace

CUresult cuInit(unsigned int Flags) {
  if (Flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (process.phase.load(std::memory_order_acquire) == Phase::kRunning) return CUDA_SUCCESS;
  if (process.phase.load() == Phase::kForked) return CUDA_ERROR_NOT_INITIALIZED;
  const std::lock_guard lock(init_mutex);
  if (process.phase.load() == Phase::kRunning) return CUDA_SUCCESS;
  static const int registered = ::pthread_atfork(nullptr, nullptr, in_forked_child);
  if (registered != 0) return CUDA_ERROR_OUT_OF_MEMORY;
  if (devices_hidden()) return CUDA_ERROR_NO_DEVICE;
  const bool native = native_wanted();
  const Attached attached = attach(/*quiet=*/native);
  if (attached.error == CUDA_SUCCESS) {
    prepare_contexts();
    process.launch_blocking = launch_blocking_wanted();
    process.phase.store(Phase::kRunning, std::memory_order_release);
    return CUDA_SUCCESS;
  }
  if (attached.no_daemon && native && (process.phase.load() == Phase::kNative || load_native())) {
    process.phase.store(Phase::kNative);
    for (int slot = 0; slot < kNativeCount; ++slot) {
      if (std::string_view(kNativeNames[slot]) != "cuInit") continue;
      return reinterpret_cast<CUresult (*)(unsigned int)>(native_function(slot))(Flags);
    }
  }
  return attached.error;
}

CUresult cuDriverGetVersion(int* driverVersion) {
  if (!driverVersion) return CUDA_ERROR_INVALID_VALUE;
  // Programs ask before cuInit, to learn whether that makes sense.
  const bool running = process.phase.load(std::memory_order_acquire) == Phase::kRunning;
  *driverVersion = running ? process.driver_version : CUDA_VERSION;
  return CUDA_SUCCESS;
}

}  // namespace xmig::client
