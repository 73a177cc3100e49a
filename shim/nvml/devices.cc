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
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <vector>

namespace xmig::nvml {
namespace {

constinit std::mutex mutex;
constinit Devices known{};  // count 0: nothing yet
constinit bool is_final = false;  // `known` is what this process's own driver says

std::string path_of(const void* symbol) {
  Dl_info found{};
  return ::dladdr(symbol, &found) && found.dli_fname ? found.dli_fname : "";
}

// Nothing of the program's goes to the child but its standard error and the environment, and of that not what is
// preloaded: the child opens the same libcuda.so.1 by its path.
pid_t start_probe(int output, int ordinal) {
  const std::string own = path_of(reinterpret_cast<const void*>(&list_devices));
  std::string program = own.substr(0, own.rfind('/') + 1) + "xmig-nvml-probe";
  std::string library = path_of(reinterpret_cast<const void*>(driver().cuInit));
  std::string asked = std::to_string(ordinal);
  char* arguments[] = {program.data(), library.data(), asked.data(), nullptr};
  std::vector<char*> environment;
  for (char** variable = environ; variable && *variable; ++variable) {
    if (!std::string_view(*variable).starts_with("LD_PRELOAD=")) environment.push_back(*variable);
  }
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
    CUresult error = driver().describe(found);
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
  CUresult error = driver().free_bytes(ordinal, bytes);
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
