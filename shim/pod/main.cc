// xmig-pod: the first process of a container whose pod may go on from a checkpoint (decision 0074):
//
//   command: ["/usr/lib64/xmig/xmigd/native/xmig-pod", "python", "train.py"]
//
// It asks the adapter of its node, by the socket beside that of programs, with SOCK_SEQPACKET messages:
//   it sends    continue DEVICES ($CUDA_VISIBLE_DEVICES), once something runs  follow  instead (the adapter was started
//               again), then  signal NUMBER  for each that it gets
//   it is sent  anew, or  running and then  ended CODE, or  refused WHY
//
// - With `anew` it becomes the command. Without xMIG's variables it does that at once.
// - What runs is no child of it: it passes signals on, and ends as that does.
// - It never begins anew because nobody answers: a checkpoint may be there. Then it fails, and is started again.
#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kPatience = std::chrono::seconds(60);  // with an adapter that is not there
constexpr useconds_t kRetryAfter = 200'000;
constexpr size_t kMaxMessageBytes = 4096;
constexpr int kFailed = 1;
constexpr int kNotFound = 127;
constexpr int kNotExecutable = 126;
constexpr int kBySignal = 128;  // and its number
constexpr std::array kPassedOn{SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTERM};

std::string_view variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string_view{} : std::string_view{value};
}

// -1: nobody listens there.
int connected(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) return -1;
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  const int socket = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (socket < 0) return -1;
  if (::connect(socket, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) return socket;
  ::close(socket);
  return -1;
}

bool sent(int socket, const std::string& text) {
  return ::send(socket, text.data(), text.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(text.size());
}

[[noreturn]] void become(char** command, const sigset_t& mask) {
  ::sigprocmask(SIG_SETMASK, &mask, nullptr);
  ::execvp(command[0], command);
  const int error = errno;
  std::fprintf(stderr, "xmig-pod: %s cannot be started: %s\n", command[0], std::strerror(error));
  std::exit(error == ENOENT ? kNotFound : kNotExecutable);
}

struct Session {
  char** command;
  sigset_t mask{};  // as it was
  int signals = -1;
  bool running = false;  // what was restored

  // Until the connection is lost, or there is nothing more to wait for: then this does not return.
  void follow(int socket) {
    std::array<char, kMaxMessageBytes> buffer{};
    std::array<pollfd, 2> polled{{{.fd = socket, .events = POLLIN, .revents = 0},
                                  {.fd = signals, .events = POLLIN, .revents = 0}}};
    while (true) {
      if (::poll(polled.data(), polled.size(), -1) < 0 && errno != EINTR) return;
      if ((polled[1].revents & POLLIN) != 0) {
        signalfd_siginfo got{};
        if (::read(signals, &got, sizeof(got)) == sizeof(got)) {
          if (!running) std::exit(kBySignal + static_cast<int>(got.ssi_signo));
          if (!sent(socket, "signal " + std::to_string(got.ssi_signo))) return;
        }
      }
      if (polled[0].revents == 0) continue;
      const ssize_t size = ::recv(socket, buffer.data(), buffer.size(), 0);
      if (size <= 0) return;
      take({buffer.data(), static_cast<size_t>(size)});
    }
  }

  void take(std::string_view message) {
    const std::string_view word = message.substr(0, message.find(' '));
    const std::string_view rest = message.substr(std::min(message.size(), word.size() + 1));
    if (word == "anew" && !running) become(command, mask);
    if (word == "running") running = true;
    if (word == "refused") {
      std::fprintf(stderr, "xmig-pod: %.*s\n", static_cast<int>(rest.size()), rest.data());
      std::exit(kFailed);
    }
    if (word == "ended") {
      int code = kFailed;
      std::from_chars(rest.data(), rest.data() + rest.size(), code);
      std::exit(code);
    }
  }
};

}  // namespace

int main(int count, char** words) {
  if (count < 2) {
    std::fputs("usage: xmig-pod COMMAND [ARGUMENT]...\n", stderr);
    return 2;
  }
  Session session{.command = words + 1};
  sigset_t waited;
  sigemptyset(&waited);
  for (const int number : kPassedOn) sigaddset(&waited, number);
  ::sigprocmask(SIG_BLOCK, &waited, &session.mask);
  const std::string_view programs = variable("XMIG_SOCKET");
  if (programs.empty()) become(session.command, session.mask);
  session.signals = ::signalfd(-1, &waited, SFD_CLOEXEC);
  const std::string path = std::string(programs.substr(0, programs.rfind('/') + 1)) + "continue.sock";
  auto since = Clock::now();
  while (session.running || Clock::now() - since < kPatience) {
    const int socket = connected(path);
    if (socket >= 0) {
      const std::string devices{variable("CUDA_VISIBLE_DEVICES")};
      if (sent(socket, session.running ? "follow" : "continue " + devices)) session.follow(socket);
      ::close(socket);
      since = Clock::now();
    }
    pollfd waiting{.fd = session.signals, .events = POLLIN, .revents = 0};
    if (!session.running && ::poll(&waiting, 1, 0) > 0) {
      signalfd_siginfo got{};
      if (::read(session.signals, &got, sizeof(got)) == sizeof(got)) return kBySignal + static_cast<int>(got.ssi_signo);
    }
    ::usleep(kRetryAfter);
  }
  std::fprintf(stderr,
               "xmig-pod: nobody answers at %s, and there may be a checkpoint to go on from: see to xmig-kubernetes on "
               "this node\n",
               path.c_str());
  return kFailed;
}
