// xmig-descriptor-store: holds copies of the daemon's descriptors, so that memory outlives daemon and server at once where
// no service manager does that (decision 0027). Started by xmigd, found again by the next one through the same socket.
//
// It uses the words of sd_notify(3), one SOCK_SEQPACKET message each, of lines NAME=VALUE:
//   FDSTORE=1, FDNAME=..., PROCESS=... (may be left out), with one descriptor: hold it
//   FDSTOREREMOVE=1, FDNAME=...: and no longer
//   WATCH=1, PROCESS=..., with a pidfd of the process's program
// Whoever connects is sent everything first, FDNAME=... with the descriptor, in the order in which it came, then END=1.
//
// - Only its own user and root are talked to, and one at a time: the newest.
// - It does nothing with a descriptor but hold it, send it and close it.
// - While no daemon is connected, what belongs to a program that has exited is closed. When nothing is left, it ends.
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <string_view>

#include "ipc/seqpacket.h"
#include "store/held.h"

namespace xmig::store {
namespace {

constexpr timeval kPatience{5, 0};  // with a daemon that does not take what it is sent
constexpr useconds_t kRetryAfter = 2000;
constexpr int kRetries = 2500;
constexpr int kMostOutstanding = 1 << 17;  // messages: more than a socket holds
constexpr size_t kMaxMessageBytes = 1024;

std::string_view field(std::string_view message, std::string_view name) {
  while (!message.empty()) {
    const std::string_view line = message.substr(0, message.find('\n'));
    if (line.size() > name.size() && line.starts_with(name) && line[name.size()] == '=') {
      return line.substr(name.size() + 1);
    }
    message.remove_prefix(std::min(message.size(), line.size() + 1));
  }
  return {};
}

bool may_talk(int socket) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) return false;
  return peer.uid == 0 || peer.uid == ::geteuid();
}

// Too many descriptors under way in the whole system pass; a daemon that has gone does not.
bool send(int socket, std::string_view text, std::span<const int> fds) {
  for (int i = 0; i < kRetries; ++i) {
    const int error = ipc::send_message(socket, std::as_bytes(std::span(text)), fds);
    if (error == 0) return true;
    if (error != ETOOMANYREFS && error != ENOBUFS && error != ENOMEM) return false;
    ::usleep(kRetryAfter);
  }
  return false;
}

class Store {
 public:
  explicit Store(ipc::UniqueFd listening) : listening_(std::move(listening)) {}

  int run() {
    while (true) {
      std::vector<pollfd> watched = {{listening_.get(), POLLIN, 0}, {daemon_.get(), POLLIN, 0}};
      if (!daemon_ && had_one_) {
        if (!held_.forget_the_exited()) return 0;
        for (const int pidfd : held_.watched()) watched.push_back({pidfd, POLLIN, 0});
      }
      if (::poll(watched.data(), watched.size(), -1) < 0 && errno != EINTR) return 1;
      if (watched[1].revents != 0) take();
      if (watched[0].revents != 0) accept();
    }
  }

 private:
  void accept() {
    ipc::UniqueFd daemon(::accept4(listening_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!daemon || !may_talk(daemon.get())) return;
    hear_out();
    ::setsockopt(daemon.get(), SOL_SOCKET, SO_SNDTIMEO, &kPatience, sizeof(kPatience));
    std::vector<const std::pair<const std::string, Descriptor>*> all;
    for (const auto& one : held_.descriptors()) all.push_back(&one);
    std::ranges::sort(all, {}, [](const auto* one) { return one->second.number; });
    for (const auto* one : all) {
      const int fd = one->second.fd.get();
      if (!send(daemon.get(), "FDNAME=" + one->first, std::span(&fd, 1))) return;
    }
    if (!send(daemon.get(), "END=1", {})) return;
    daemon_ = std::move(daemon);
    had_one_ = true;
  }

  // The daemon that had the connection has died, mostly: what it has reported counts, and is in what the next one is sent.
  void hear_out() {
    for (int i = 0; daemon_ && i < kMostOutstanding; ++i) {
      pollfd one{daemon_.get(), POLLIN, 0};
      if (::poll(&one, 1, 0) <= 0) return;
      take();
    }
  }

  void take() {
    std::array<std::byte, kMaxMessageBytes> buffer;
    ipc::Received received = ipc::receive_message(daemon_.get(), buffer, 1);
    if (received.error == EMSGSIZE || received.error == EAGAIN) return;  // without it the daemon's account is not whole
    if (received.error != 0 || received.bytes == 0) {
      daemon_.reset();
      return;
    }
    const std::string_view message(reinterpret_cast<const char*>(buffer.data()), received.bytes);
    const std::string name(field(message, "FDNAME")), process(field(message, "PROCESS"));
    const bool one = received.fds.size() == 1;
    if (!field(message, "FDSTORE").empty() && !name.empty() && one) {
      held_.keep(name, process, std::move(received.fds[0]));
    } else if (!field(message, "FDSTOREREMOVE").empty()) {
      held_.drop(name);
    } else if (!field(message, "WATCH").empty() && !process.empty() && one) {
      held_.watch(process, std::move(received.fds[0]));
    }
  }

  ipc::UniqueFd listening_, daemon_;
  bool had_one_ = false;
  Held held_;
};

}  // namespace
}  // namespace xmig::store

int main(int argc, char** argv) {
  const std::string_view option = argc == 3 ? argv[1] : "", value = argc == 3 ? argv[2] : "";
  int listening = -1;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), listening);
  if (option != "--listen-fd" || error != std::errc{} || end != value.data() + value.size() || listening < 0) {
    std::fprintf(stderr, "usage: xmig-descriptor-store --listen-fd N; this program is started by xmigd, not by hand\n");
    return 2;
  }
  for (const int ignored : {SIGPIPE, SIGINT, SIGHUP}) ::signal(ignored, SIG_IGN);
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    limit.rlim_cur = limit.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &limit);
  }
  return xmig::store::Store(xmig::ipc::UniqueFd(listening)).run();
}
