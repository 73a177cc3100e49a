#include "client/bootstrap/starter.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>

#include "ipc/fd.h"

namespace xmig::client {
namespace {

// A write may raise SIGPIPE (nobody reads) or SIGXFSZ (a limit of the file's size), and a background process is stopped by one to
// its terminal (SIGTTOU; not if it is blocked). The program has requested none of that.
class Unsignalled {
 public:
  Unsignalled() {
    ::sigemptyset(&ours_);
    for (const int number : {SIGPIPE, SIGXFSZ, SIGTTOU}) ::sigaddset(&ours_, number);
    ::sigpending(&pending_);
    ::pthread_sigmask(SIG_BLOCK, &ours_, &before_);
  }
  ~Unsignalled() {
    sigset_t raised;
    ::sigemptyset(&raised);
    for (const int number : {SIGPIPE, SIGXFSZ}) {
      if (!::sigismember(&pending_, number)) ::sigaddset(&raised, number);
    }
    const timespec none{};
    while (::sigtimedwait(&raised, nullptr, &none) > 0) continue;
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  Unsignalled(const Unsignalled&) = delete;

 private:
  sigset_t ours_, pending_, before_;
};

// Through a description of our own, so that nothing is changed for those who share the other one.
bool write_anew(const char* path, std::string_view line) {
  const ipc::UniqueFd file(::open(path, O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  return file && ::write(file.get(), line.data(), line.size()) == static_cast<ssize_t>(line.size());
}

}  // namespace

bool is_starters_stderr(int fd) {
  const char* const known = std::getenv("XMIG_STDERR");
  unsigned long long device = 0, inode = 0;
  char more = 0;
  struct stat now {};
  return known && std::sscanf(known, "%llu:%llu%c", &device, &inode, &more) == 2 && ::fstat(fd, &now) == 0 &&
         now.st_dev == device && now.st_ino == inode;
}

bool write_to_starter(std::string_view line) {
  const Unsignalled guard;
  if (!is_starters_stderr(STDERR_FILENO)) return write_anew("/dev/tty", line);
  struct stat status {};
  if (::fstat(STDERR_FILENO, &status) != 0) return false;
  if (S_ISREG(status.st_mode)) {  // its place in the file is shared with everybody who writes there
    return ::write(STDERR_FILENO, line.data(), line.size()) == static_cast<ssize_t>(line.size());
  }
  if (S_ISSOCK(status.st_mode)) {
    return ::send(STDERR_FILENO, line.data(), line.size(), MSG_DONTWAIT | MSG_NOSIGNAL) > 0;
  }
  return write_anew("/proc/self/fd/2", line);
}

}  // namespace xmig::client
