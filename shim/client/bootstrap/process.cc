#include "client/bootstrap/process.h"

#include <signal.h>

#include <cstdio>
#include <cstring>
#include <mutex>
#include <utility>

#include "client/bootstrap/handshake.h"
#include "client/bootstrap/message.h"

namespace xmig::client {

constinit Process process;

namespace {

// Zombies count as dead: nobody may be there to reap them.
bool alive(uint32_t pid) {
  if (pid == 0) return false;
  if (::kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH) return false;
  char path[32], text[512] = "";
  std::snprintf(path, sizeof(path), "/proc/%u/stat", pid);
  FILE* const file = std::fopen(path, "re");
  if (!file) return true;  // it is there, though not for us to see
  const size_t bytes = std::fread(text, 1, sizeof(text) - 1, file);
  std::fclose(file);
  text[bytes] = 0;
  const char* const after_name = std::strrchr(text, ')');
  return !after_name || (after_name[1] && after_name[2] != 'Z' && after_name[2] != 'X');
}

}  // namespace

CUresult not_running() {
  switch (process.phase.load()) {
    case Phase::kNotInitialized:
    case Phase::kForked:
      return CUDA_ERROR_NOT_INITIALIZED;
    case Phase::kNative:  // a function that the genuine driver does not have
      return CUDA_ERROR_NOT_SUPPORTED;
    case Phase::kRunning:
      break;
  }
  if (const uint32_t error = process.lost.load()) return static_cast<CUresult>(error);
  const uint32_t error = process.header->context_error.load();
  return error ? static_cast<CUresult>(error) : CUDA_ERROR_DEVICE_UNAVAILABLE;
}

CUresult check_ordinal(int ordinal) {
  if (const CUresult error = initialized(); error != CUDA_SUCCESS) return error;
  return description(ordinal) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult check_peers() {
  if (const CUresult error = initialized(); error != CUDA_SUCCESS) return error;
  // By the clock and not by the waits that time out: a program may be interrupted by signals all the time.
  static constinit std::atomic<int64_t> last{0};
  timespec now;
  ::clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  int64_t before = last.load(std::memory_order_relaxed);
  if (now.tv_sec == before || !last.compare_exchange_strong(before, now.tv_sec)) return CUDA_SUCCESS;
  const journal::JournalHeader& header = *process.header;
  if (alive(header.server_pid.load()) || alive(header.daemon_pid.load())) return CUDA_SUCCESS;
  static std::mutex asking;  // one thread asks, the others go on waiting
  const std::unique_lock lock(asking, std::try_to_lock);
  if (!lock) return CUDA_SUCCESS;
  static bool reported = false;
  // In a pid namespace of its own a program sees neither of them, and only the daemon's answer says anything.
  switch (const Reattached answer = reattach(); answer.outcome) {
    case Reattached::kNoDaemon:
      if (!std::exchange(reported, true)) {
        say_aloud("the GPU server and xmigd of this process are both gone: waiting until xmigd is started again");
      }
      break;
    case Reattached::kAccepted:
      if (std::exchange(reported, false)) say_aloud("xmigd is back: going on");
      break;
    case Reattached::kRefused:
      process.lost.store(static_cast<uint32_t>(answer.error));
      break;
  }
  return initialized();
}

}  // namespace xmig::client
