// xmig-server: executes one program's journal on a device. Started by xmigd.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string_view>

#include "journal/layout.h"
#include "server/clock.h"
#include "server/control/server.h"
#include "server/measure.h"

namespace {

// Every piece of memory is a descriptor. The kernel's table of them doubles when it is full, and then waits for all
// processors if the process has threads: 10 ms each time, in the middle of a recovery. So it is made large while there are none.
void make_room_for_descriptors(int control) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
  constexpr rlim_t kAtOnce = 16384;
  ::close(::fcntl(control, F_DUPFD_CLOEXEC, static_cast<int>(std::min(limit.rlim_max, kAtOnce)) - 1));
}

// A dump would hold the program's memory. One byte, not none: that also keeps a core_pattern that is a pipe from getting
// it (core(5)), while the process stays readable to the daemon in /proc, which PR_SET_DUMPABLE would not allow.
void forbid_core_dumps() {
  const rlimit limit{1, 1};
  ::setrlimit(RLIMIT_CORE, &limit);
}

// For the daemon, which makes the files that a job shares.
int print_layout() {
  using namespace xmig::journal;
  std::printf("{\"layout_version\": %u, \"header_bytes\": %lu, \"staging_bytes\": %lu, \"pinned_bytes\": %lu, "
              "\"tail_offset\": %zu, \"memory_changes_at\": %zu, \"server_pid_at\": %zu, \"room_bytes\": %lu, "
              "\"stall_at\": %zu, \"notices_at\": %zu, \"notices\": %u, \"group_at\": %zu, \"standby_bytes_at\": %zu, "
              "\"devices_open_at\": %zu}\n",
              kLayoutVersion, kHeaderBytes, kStagingBytes, kPinnedBytes, offsetof(JournalHeader, tail),
              offsetof(JournalHeader, memory_changes), offsetof(JournalHeader, server_pid), xmig::server::kPlainBytes,
              offsetof(JournalHeader, stall), offsetof(JournalHeader, notices_posted), kNotices,
              offsetof(JournalHeader, round_prepared), offsetof(JournalHeader, standby_bytes), offsetof(JournalHeader, devices_open));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::string_view(argv[1]) == "--layout") return print_layout();
  if (argc == 4 && std::string_view(argv[1]) == "--measure") {
    try {
      return xmig::server::measure(argv[2], std::strtoull(argv[3], nullptr, 10));
    } catch (const std::exception& error) {
      std::fprintf(stderr, "xmig-server: %s\n", error.what());
      return 1;
    }
  }
  const uint64_t started = xmig::server::now_ns();
  auto options = xmig::server::parse_options(argc, argv);
  if (!options) {
    std::fprintf(stderr, "xmig-server: %s\n", options.why().c_str());
    return 2;
  }
  make_room_for_descriptors(options->control_fd);
  forbid_core_dumps();
  ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGXFSZ, SIG_IGN);  // a file that may not be so large is an error of that call
  ::signal(SIGINT, SIG_IGN);  // of the terminal that the program runs in; the program's end ends the server
  ::signal(SIGHUP, SIG_IGN);
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);  // a pipe: what kernels print is read line by line
  try {
    auto device = xmig::device::open(options->device_kind, options->ordinals, options->memory_bytes);
    xmig::server::Server server(std::move(*options), std::move(device));
    const int status = server.run(started);
    // Streams may wait for a program that is gone: threads are not joined, the kernel takes everything back.
    std::fflush(nullptr);
    ::_exit(status);
  } catch (const xmig::device::Unavailable& error) {
    xmig::server::Daemon daemon;
    { const auto attached = daemon.attach(xmig::ipc::UniqueFd(options->control_fd)); }
    daemon.unavailable(error.error(), error.what());
    daemon.hang_up();
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "xmig-server: %s\n", error.what());
    return 1;
  }
}
