#include "nvml/devices.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "ipc/visible.h"

namespace xmig::nvml {
namespace {

constinit std::mutex mutex;
constinit Devices known{};  // count 0: nothing yet
constinit bool is_final = false;  // `known` is what this process's own driver says

// CUDA does not show all of them. Queried once: a program that sets the variable does so before it asks for devices. Where it
// hides every device, NVML has none either: no GPU server is taken for a program that does not want a GPU.
bool some_are_hidden() {
  static const bool found = [] {
    const char* const value = std::getenv("CUDA_VISIBLE_DEVICES");
    return value && xmig::names_devices(value);
  }();
  return found;
}

// Its place among those that this process's own driver shows; -1: it is not there.
int own_ordinal(const Device& wanted) {
  Devices own;
  if (driver().describe(own) != CUDA_SUCCESS) return -1;
  for (int i = 0; i < own.count; ++i) {
    if (std::memcmp(own.device[i].uuid, wanted.uuid, sizeof(wanted.uuid)) == 0) return i;
  }
  return -1;
}

std::string path_of(const void* symbol) {
  Dl_info found{};
  return ::dladdr(symbol, &found) && found.dli_fname ? found.dli_fname : "";
}

// Nothing of the program's goes to the child but its standard error and the environment, and of that neither what is
// preloaded, since the child opens the same libcuda.so.1 by its path, nor which of the devices are not to be seen.
pid_t start_probe(int output, int ordinal) {
  const std::string own = path_of(reinterpret_cast<const void*>(&list_devices));
  std::string program = own.substr(0, own.rfind('/') + 1) + "xmig-nvml-probe";
  std::string library = path_of(reinterpret_cast<const void*>(driver().cuInit));
  std::string requested = std::to_string(ordinal);
  char* arguments[] = {program.data(), library.data(), requested.data(), nullptr};
  std::vector<char*> environment;
  for (char** variable = environ; variable && *variable; ++variable) {
    const std::string_view set(*variable);
    if (set.starts_with("LD_PRELOAD=")) continue;
    if (some_are_hidden() && set.starts_with("CUDA_VISIBLE_DEVICES=")) continue;
    environment.push_back(*variable);
  }
  static char every[] = "XMIG_EVERY_DEVICE=1";
  if (some_are_hidden()) environment.push_back(every);
  environment.push_back(nullptr);

  posix_spawn_file_actions_t files;
  posix_spawnattr_t attributes;
  ::posix_spawn_file_actions_init(&files);
  ::posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_adddup2(&files, output, STDOUT_FILENO);
  ::posix_spawn_file_actions_addclosefrom_np(&files, STDERR_FILENO + 1);
  ::posix_spawnattr_init(&attributes);
  sigset_t none, all;
  ::sigemptyset(&none);
  ::sigfillset(&all);
  ::posix_spawnattr_setsigmask(&attributes, &none);
  ::posix_spawnattr_setsigdefault(&attributes, &all);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  pid_t child = 0;
  const int error = ::posix_spawn(&child, program.c_str(), &files, &attributes, arguments, environment.data());
  ::posix_spawnattr_destroy(&attributes);
  ::posix_spawn_file_actions_destroy(&files);
  return error ? 0 : child;
}

// ordinal -1: no device's memory.
CUresult probe(int ordinal, ProbeReport& report) {
  if (!driver().loaded) return CUDA_ERROR_SHARED_OBJECT_INIT_FAILED;
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return CUDA_ERROR_OPERATING_SYSTEM;
  const pid_t child = start_probe(ends[1], ordinal);
  ::close(ends[1]);
  size_t have = 0;
  for (ssize_t got = 1; child && got != 0 && have < sizeof(report);) {
    got = ::read(ends[0], reinterpret_cast<char*>(&report) + have, sizeof(report) - have);
    if (got > 0) have += static_cast<size_t>(got);
    if (got < 0 && errno != EINTR) break;
  }
  ::close(ends[0]);
  // The program may have reaped it, if it waits for any child.
  while (child && ::waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
  }
  return have == sizeof(report) ? report.error : CUDA_ERROR_OPERATING_SYSTEM;
}

}  // namespace

const Driver& driver() {
  static const Driver* const found = new Driver("libcuda.so.1");
  return *found;
}

CUresult list_devices(Devices& devices) {
  const std::lock_guard lock(mutex);
  if (!is_final) {
    Devices found;
    CUresult error = some_are_hidden() ? CUDA_ERROR_NOT_INITIALIZED : driver().describe(found);
    is_final = error == CUDA_SUCCESS;
    if (error != CUDA_SUCCESS && known.count == 0) {
      if (error != CUDA_ERROR_NOT_INITIALIZED) return error;
      ProbeReport report{};
      error = probe(-1, report);
      if (error != CUDA_SUCCESS) return error;
      found = report.devices;
    }
    if (error == CUDA_SUCCESS) known = found;
  }
  devices = known;
  return CUDA_SUCCESS;
}

CUresult free_bytes(int ordinal, uint64_t& bytes) {
  if (!driver().loaded) return CUDA_ERROR_SHARED_OBJECT_INIT_FAILED;
  CUresult error = CUDA_ERROR_NOT_INITIALIZED;
  int own = ordinal;
  if (some_are_hidden()) {
    Devices devices;
    if (const CUresult listed = list_devices(devices); listed != CUDA_SUCCESS) return listed;
    own = ordinal < devices.count ? own_ordinal(devices.device[ordinal]) : -1;
  }
  if (own >= 0) error = driver().free_bytes(own, bytes);
  if (error != CUDA_ERROR_NOT_INITIALIZED) return error;
  ProbeReport report{};
  error = probe(ordinal, report);
  bytes = report.free_bytes;
  return error;
}

void prepare_for_forks() {
  [[maybe_unused]] static const int registered =
      ::pthread_atfork(nullptr, nullptr, [] { new (&mutex) std::mutex; });
}

}  // namespace xmig::nvml
