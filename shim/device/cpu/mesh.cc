#include "device/cpu/mesh.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <deque>
#include <iterator>
#include <optional>

#include "common/hex.h"

namespace xmig::device::cpu {

struct MessageHeader {
  uint32_t magic;
  uint32_t reserved;
  uint64_t bytes;
  Label label;
};

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kToConnect{60};  // once all addresses are known
constexpr int kLook = 100;                      // ms: whether it was aborted
constexpr uint32_t kHelloMagic = 0x48434d58;    // "XMCH"
constexpr uint32_t kMessageMagic = 0x4d434d58;  // "XMCM"
constexpr size_t kNameBytes = 16;
constexpr size_t kNameLength = 5 + 2 * kNameBytes;  // "xmig-", and hexadecimal digits
constexpr int kSilence = 20;  // s until a node that does not answer is taken for gone, as a rank whose server has ended is

struct Hello {
  uint32_t magic;
  uint32_t rank;
  GroupId group;
};

const char* const kKinds[] = {"all-reduce", "broadcast", "reduce", "all-gather", "reduce-scatter",
                              "all-to-all", "gather",    "scatter", "send",      "receive"};
static_assert(std::size(kKinds) == static_cast<size_t>(journal::CollectiveKind::kCount));

std::string errno_text() { return std::strerror(errno); }

sockaddr_un address_of(const std::string& name, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // abstract: there is no file that could be left behind
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

bool is_name(const std::string& text) {
  return text.size() == kNameLength && text.starts_with("xmig-") && text.find_first_not_of(kHexDigits, 5) == std::string::npos;
}

// An address of IPv4 or IPv6, and a port.
struct Internet {
  sockaddr_storage storage{};
  socklen_t length = 0;

  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  bool is_v4() const { return storage.ss_family == AF_INET; }
  in_port_t& port() {
    return is_v4() ? reinterpret_cast<sockaddr_in&>(storage).sin_port : reinterpret_cast<sockaddr_in6&>(storage).sin6_port;
  }
  std::span<std::byte> address() {
    void* const at = is_v4() ? static_cast<void*>(&reinterpret_cast<sockaddr_in&>(storage).sin_addr)
                             : static_cast<void*>(&reinterpret_cast<sockaddr_in6&>(storage).sin6_addr);
    return {static_cast<std::byte*>(at), is_v4() ? sizeof(in_addr) : sizeof(in6_addr)};
  }
};

Internet of_family(sa_family_t family) {
  Internet made;
  made.storage.ss_family = family;
  made.length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  return made;
}

std::optional<Internet> internet_of(const std::string& address) {
  for (const sa_family_t family : {static_cast<sa_family_t>(AF_INET), static_cast<sa_family_t>(AF_INET6)}) {
    Internet made = of_family(family);
    if (::inet_pton(family, address.c_str(), made.address().data()) == 1) return made;
  }
  return std::nullopt;
}

// What a rank offers the others: the name of a socket of its node; and, for ranks of other nodes, an address and a port of that one.
struct Whereabouts {
  std::string name;
  std::optional<Internet> internet;

  std::string text() {
    return internet ? name + " " + to_hex(internet->address()) + " " + std::to_string(ntohs(internet->port())) : name;
  }
};

std::optional<Whereabouts> whereabouts_of(const std::string& text) {
  Whereabouts found{text.substr(0, kNameLength), {}};
  if (!is_name(found.name)) return std::nullopt;
  if (text.size() == kNameLength) return found;
  const size_t space = text.find(' ', kNameLength + 1);
  if (text[kNameLength] != ' ' || space == std::string::npos) return std::nullopt;
  const std::string hex = text.substr(kNameLength + 1, space - kNameLength - 1);
  Internet internet = of_family(hex.size() == 2 * sizeof(in_addr) ? AF_INET : AF_INET6);
  uint16_t port = 0;
  const auto [end, error] = std::from_chars(text.data() + space + 1, text.data() + text.size(), port);
  if (!from_hex(hex, internet.address())) return std::nullopt;
  if (error != std::errc{} || end != text.data() + text.size() || port == 0) return std::nullopt;
  internet.port() = htons(port);
  found.internet = internet;
  return found;
}

Result<std::string> new_name() {
  std::byte random[kNameBytes];
  if (::getrandom(random, sizeof(random), 0) != static_cast<ssize_t>(sizeof(random))) return Error{"no random numbers"};
  return "xmig-" + to_hex(random);
}

// Until the deadline. False: errno says why.
bool wait_for(int socket, short events, Clock::time_point deadline) {
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) {
      errno = ETIMEDOUT;
      return false;
    }
    pollfd one{socket, events, 0};
    const int ready = ::poll(&one, 1, static_cast<int>(std::min<int64_t>(left, 60'000)));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return false;
  }
}

bool send_whole(int socket, const void* data, size_t bytes, Clock::time_point deadline) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t sent = ::send(socket, static_cast<const char*>(data) + done, bytes - done, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      done += static_cast<size_t>(sent);
    } else if ((errno != EAGAIN && errno != EINTR) || !wait_for(socket, POLLOUT, deadline)) {
      return false;
    }
  }
  return true;
}

bool receive_whole(int socket, void* data, size_t bytes, Clock::time_point deadline) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t got = ::recv(socket, static_cast<char*>(data) + done, bytes - done, MSG_DONTWAIT);
    if (got > 0) {
      done += static_cast<size_t>(got);
    } else if (got == 0) {
      errno = ECONNRESET;
      return false;
    } else if ((errno != EAGAIN && errno != EINTR) || !wait_for(socket, POLLIN, deadline)) {
      return false;
    }
  }
  return true;
}

bool of_this_user(int socket) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == ::geteuid();
}

Error not_connected(uint32_t rank, const std::string& why) {
  return Error{"rank " + std::to_string(rank) + " cannot be reached: " + why};
}

Error severed(uint32_t rank, const std::string& why) { return Error{not_connected(rank, why).text, kSevered}; }

Result<ipc::UniqueFd> connect_here(const std::string& name) {
  ipc::UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  socklen_t length = 0;
  const sockaddr_un address = address_of(name, length);
  // A listener has room for all ranks: this does not wait.
  if (!socket || ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) return Error{errno_text()};
  if (!of_this_user(socket.get())) return Error{"it is another user's"};
  return socket;
}

// Small messages are not kept back, and whoever does not answer is gone.
void set_up(int socket) {
  const auto set = [socket](int level, int name, int value) { ::setsockopt(socket, level, name, &value, sizeof(value)); };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, kSilence / 4);
  set(IPPROTO_TCP, TCP_KEEPINTVL, kSilence / 4);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, kSilence * 1000);
}

Result<ipc::UniqueFd> connect_elsewhere(Internet there, Clock::time_point deadline) {
  ipc::UniqueFd socket(::socket(there.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return Error{errno_text()};
  set_up(socket.get());
  if (::connect(socket.get(), there.get(), there.length) != 0 && errno != EINPROGRESS) return Error{errno_text()};
  if (!wait_for(socket.get(), POLLOUT, deadline)) return Error{errno_text()};
  int failed = 0;
  socklen_t length = sizeof(failed);
  ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &failed, &length);
  if (failed != 0) return Error{std::strerror(failed)};
  return socket;
}

// To what a rank listens at, with a hello: all of them listen already.
Result<ipc::UniqueFd> greet(uint32_t rank, const std::string& offer, const Place& place, Clock::time_point deadline) {
  const std::optional<Whereabouts> there = whereabouts_of(offer);
  if (!there) return not_connected(rank, "what it says is no address");
  const std::optional<Internet> mine = internet_of(place.address);
  if (!there->internet != !mine) return not_connected(rank, "one of the two is not of a job of several nodes");
  const bool here = !mine || std::ranges::equal(Internet(*mine).address(), Internet(*there->internet).address());
  Result<ipc::UniqueFd> connected = here ? connect_here(there->name) : connect_elsewhere(*there->internet, deadline);
  if (!connected) return severed(rank, connected.why());
  const Hello hello{kHelloMagic, place.rank, place.group};
  if (!send_whole(connected->get(), &hello, sizeof(hello), deadline)) return severed(rank, errno_text());
  return connected;
}

// Ranks below this one.
Result<ipc::UniqueFd> connect_to(uint32_t rank, const std::string& offer, const Place& place, Clock::time_point deadline) {
  Result<ipc::UniqueFd> socket = greet(rank, offer, place, deadline);
  Hello answer{};
  if (!socket) return socket;
  if (!receive_whole(socket->get(), &answer, sizeof(answer), deadline)) return severed(rank, errno_text());
  if (answer.magic != kHelloMagic || answer.rank != rank || answer.group != place.group) {
    return not_connected(rank, "it is of another group");
  }
  return socket;
}

// Connections to ranks above this one that have yet to connect: whoever ends, or gives up, closes what it listens at, and with it the
// connections there. Nobody would hear of it otherwise.
using Awaited = std::vector<ipc::UniqueFd>;  // by rank

// What a rank listens at: its node's servers, and those of other nodes if its job has several.
struct Listeners {
  ipc::UniqueFd here;
  ipc::UniqueFd elsewhere;
  Whereabouts whereabouts;
};

Result<Listeners> listen_at(const std::string& node_address) {
  const Result<std::string> name = new_name();
  if (!name) return Error{name.why()};
  Listeners made{ipc::UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)), {}, {*name, {}}};
  socklen_t length = 0;
  const sockaddr_un address = address_of(*name, length);
  if (!made.here || ::bind(made.here.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      ::listen(made.here.get(), static_cast<int>(journal::kMaxRanks)) != 0) {
    return Error{"no socket for the other ranks: " + errno_text()};
  }
  if (node_address.empty()) return made;
  std::optional<Internet> internet = internet_of(node_address);
  if (!internet) return Error{"the node's address " + node_address + " is none"};
  made.elsewhere = ipc::UniqueFd(::socket(internet->storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!made.elsewhere || ::bind(made.elsewhere.get(), internet->get(), internet->length) != 0 ||
      ::listen(made.elsewhere.get(), static_cast<int>(journal::kMaxRanks)) != 0 ||
      ::getsockname(made.elsewhere.get(), internet->get(), &internet->length) != 0) {
    return Error{"no socket at " + node_address + " for the ranks of other nodes: " + errno_text()};
  }
  made.whereabouts.internet = internet;
  return made;
}

// The one of the two that somebody connects to.
Result<int> wait_for_any(const Listeners& listeners, const Awaited& awaited, Clock::time_point deadline) {
  std::vector<pollfd> all{{listeners.here.get(), POLLIN, 0}, {listeners.elsewhere ? listeners.elsewhere.get() : -1, POLLIN, 0}};
  for (const ipc::UniqueFd& one : awaited) all.push_back({one ? one.get() : -1, POLLRDHUP, 0});
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) return Error{std::strerror(ETIMEDOUT)};
    const int ready = ::poll(all.data(), all.size(), static_cast<int>(std::min<int64_t>(left, 60'000)));
    if (ready < 0 && errno != EINTR) return Error{errno_text()};
    if (ready <= 0) continue;
    const auto heard = std::ranges::find_if(all, [](const pollfd& one) { return one.revents != 0; });
    const auto place = static_cast<size_t>(heard - all.begin());
    if (place < 2) return heard->fd;
    return severed(static_cast<uint32_t>(place - 2), "it has ended");
  }
}

// One that says it is another rank. Those above this one get an answer; those below await this one. Nothing: it is none, and is left.
Result<std::optional<std::pair<uint32_t, ipc::UniqueFd>>> accept_one(const Listeners& listeners, const Awaited& awaited, const Place& place,
                                                                     Clock::time_point deadline) {
  const Result<int> listener = wait_for_any(listeners, awaited, deadline);
  if (!listener) return listener.error();
  const bool here = *listener == listeners.here.get();
  ipc::UniqueFd socket(::accept4(*listener, nullptr, nullptr, SOCK_CLOEXEC));
  if (socket && !here) set_up(socket.get());
  Hello hello{};
  std::optional<std::pair<uint32_t, ipc::UniqueFd>> none;
  // A stranger does not keep the ranks waiting for long.
  const auto soon = std::min(deadline, Clock::now() + std::chrono::seconds(5));
  if (!socket || (here && !of_this_user(socket.get())) || !receive_whole(socket.get(), &hello, sizeof(hello), soon)) return none;
  if (hello.magic != kHelloMagic || hello.group != place.group || hello.rank == place.rank || hello.rank >= place.ranks) return none;
  const Hello answer{kHelloMagic, place.rank, place.group};
  if (hello.rank > place.rank && !send_whole(socket.get(), &answer, sizeof(answer), deadline)) return none;
  return std::optional(std::pair(hello.rank, std::move(socket)));
}

}  // namespace

std::string text_of(const Label& label) {
  const char* const kind = label.kind < std::size(kKinds) ? kKinds[label.kind] : "unknown operation";
  std::string text = std::string(kind) + " of " + std::to_string(label.count) + " elements of type " + std::to_string(label.type);
  const auto which = static_cast<journal::CollectiveKind>(label.kind);
  using enum journal::CollectiveKind;
  if (which == kAllReduce || which == kReduce || which == kReduceScatter) text += ", operator " + std::to_string(label.reduction);
  if (which == kBroadcast || which == kReduce || which == kGather || which == kScatter) text += ", root " + std::to_string(label.peer);
  return text;
}

Result<std::unique_ptr<Mesh>> Mesh::connect(const Place& place, const Meeting& meet) {
  Result<Listeners> listeners = listen_at(place.address);
  if (!listeners) return listeners.error();
  const Result<std::vector<std::string>> names = meet(listeners->whereabouts.text());
  if (!names) return names.error();
  if (names->size() != place.ranks) return Error{"the daemon names another number of ranks"};

  const auto deadline = Clock::now() + kToConnect;
  std::vector<ipc::UniqueFd> peers(place.ranks), awaiting(place.ranks);
  Awaited awaited(place.ranks);
  for (uint32_t rank = 0; rank < place.rank; ++rank) {
    Result<ipc::UniqueFd> socket = connect_to(rank, (*names)[rank], place, deadline);
    if (!socket) return socket.error();
    peers[rank] = std::move(*socket);
  }
  for (uint32_t rank = place.rank + 1; rank < place.ranks; ++rank) {
    Result<ipc::UniqueFd> socket = greet(rank, (*names)[rank], place, deadline);
    if (!socket) return socket.error();
    awaited[rank] = std::move(*socket);
  }
  for (uint32_t missing = place.ranks - place.rank - 1; missing != 0;) {
    auto accepted = accept_one(*listeners, awaited, place, deadline);
    if (!accepted) {
      const Error& error = accepted.error();
      return Error{std::to_string(missing) + " ranks have not connected: " + error.text, error.code};
    }
    if (!*accepted) continue;
    auto& [rank, socket] = **accepted;
    if (rank < place.rank) {
      awaiting[rank] = std::move(socket);  // open until this one is connected with all
      continue;
    }
    missing -= !peers[rank];
    peers[rank] = std::move(socket);
    awaited[rank] = {};
  }
  for (const ipc::UniqueFd& peer : peers) {
    if (peer) ::fcntl(peer.get(), F_SETFL, O_NONBLOCK);
  }
  return std::unique_ptr<Mesh>(new Mesh(place.rank, std::move(peers), place.patience));
}

Error Mesh::severed(uint32_t rank) const { return Error{gone(rank, "is gone").text, kSevered}; }

Error Mesh::gone(uint32_t rank, const std::string& why) const {
  return Error{"rank " + std::to_string(rank) + " of " + std::to_string(ranks()) + " " + why};
}

Result<> Mesh::to_itself(std::span<const Outgoing> outgoing, std::span<const Incoming> incoming) const {
  auto next = incoming.begin();
  for (const Outgoing& one : outgoing) {
    if (one.to != rank_) continue;
    next = std::find_if(next, incoming.end(), [&](const Incoming& other) { return other.from == rank_; });
    if (next == incoming.end() || next->bytes.size() != one.bytes.size()) {
      return Error{"rank " + std::to_string(rank_) + " sends to itself what it does not receive in the same group"};
    }
    if (next->bytes.data() != one.bytes.data()) std::memmove(next->bytes.data(), one.bytes.data(), one.bytes.size());
    ++next;
  }
  next = std::find_if(next, incoming.end(), [&](const Incoming& other) { return other.from == rank_; });
  if (next != incoming.end()) {
    return Error{"rank " + std::to_string(rank_) + " receives from itself what it does not send in the same group"};
  }
  return {};
}

// What one peer gets.
struct Mesh::Sending {
  std::deque<const Outgoing*> queue;
  MessageHeader header{};
  size_t done = 0;  // of the first in the queue, its header included

  // False: errno.
  bool some(int socket, bool& progress) {
    while (!queue.empty()) {
      const Outgoing& one = *queue.front();
      if (done == 0) header = {kMessageMagic, 0, one.bytes.size(), one.label};
      const bool in_header = done < sizeof(header);
      const std::byte* const from = in_header ? reinterpret_cast<const std::byte*>(&header) + done : one.bytes.data() + (done - sizeof(header));
      const size_t left = in_header ? sizeof(header) - done : sizeof(header) + one.bytes.size() - done;
      if (left != 0) {
        const ssize_t sent = ::send(socket, from, left, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0) return errno == EAGAIN || errno == EINTR;
        done += static_cast<size_t>(sent);
        progress = true;
      }
      if (done < sizeof(header) + one.bytes.size()) continue;
      queue.pop_front();
      done = 0;
    }
    return true;
  }
};

// What one peer sends.
struct Mesh::Receiving {
  std::deque<const Incoming*> queue;
  MessageHeader header{};
  size_t done = 0;
  std::string differs;  // what came instead of what was expected

  bool some(int socket, bool& progress) {
    while (!queue.empty()) {
      const Incoming& one = *queue.front();
      const bool in_header = done < sizeof(header);
      std::byte* const to = in_header ? reinterpret_cast<std::byte*>(&header) + done : one.bytes.data() + (done - sizeof(header));
      const size_t left = in_header ? sizeof(header) - done : sizeof(header) + one.bytes.size() - done;
      if (left != 0) {
        const ssize_t got = ::recv(socket, to, left, MSG_DONTWAIT);
        if (got == 0) {
          errno = ECONNRESET;
          return false;
        }
        // Once, of a peer that has gone without reading all: what it sent before is still there to be read.
        if (got < 0 && errno == ECONNRESET) continue;
        if (got < 0) return errno == EAGAIN || errno == EINTR;
        done += static_cast<size_t>(got);
        progress = true;
      }
      if (done == sizeof(header) && !fits(one)) return true;
      if (done < sizeof(header) + one.bytes.size()) continue;
      queue.pop_front();
      done = 0;
    }
    return true;
  }

  bool fits(const Incoming& one) {
    if (header.magic == kMessageMagic && header.label == one.label && header.bytes == one.bytes.size()) return true;
    differs = header.magic == kMessageMagic ? "calls " + text_of(header.label) + " (operation " + std::to_string(header.label.number) +
                                                  "), where this rank calls " + text_of(one.label) + " (operation " +
                                                  std::to_string(one.label.number) + ")"
                                            : "sends something that is no message";
    return false;
  }
};

Result<> Mesh::exchange(std::span<const Outgoing> outgoing, std::span<const Incoming> incoming) {
  if (Result<> copied = to_itself(outgoing, incoming); !copied) return copied;
  std::vector<Sending> sending(ranks());
  std::vector<Receiving> receiving(ranks());
  for (const Outgoing& one : outgoing) {
    if (one.to != rank_) sending[one.to].queue.push_back(&one);
  }
  for (const Incoming& one : incoming) {
    if (one.from != rank_) receiving[one.from].queue.push_back(&one);
  }
  auto last = Clock::now();
  std::vector<pollfd> watched;
  std::vector<uint32_t> whose;
  for (;;) {
    watched.clear();
    whose.clear();
    for (uint32_t rank = 0; rank < ranks(); ++rank) {
      const auto events = static_cast<short>((sending[rank].queue.empty() ? 0 : POLLOUT) | (receiving[rank].queue.empty() ? 0 : POLLIN));
      if (events == 0) continue;
      watched.push_back({peers_[rank].get(), events, 0});
      whose.push_back(rank);
    }
    if (watched.empty()) return {};
    if (aborted()) return Error{"the communicator was aborted"};
    const int ready = ::poll(watched.data(), watched.size(), kLook);
    if (ready < 0 && errno != EINTR) return Error{"the other ranks cannot be heard: " + errno_text()};
    bool progress = false;
    for (size_t i = 0; ready > 0 && i < watched.size(); ++i) {
      const uint32_t rank = whose[i];
      // What it sent before its end is still there to be read.
      if (watched[i].revents & (POLLIN | POLLHUP | POLLERR) && !receiving[rank].queue.empty()) {
        if (!receiving[rank].some(peers_[rank].get(), progress)) {
          return errno == EFAULT ? Error{"memory of the operation is not there any more"} : severed(rank);
        }
        if (!receiving[rank].differs.empty()) return gone(rank, receiving[rank].differs);
      }
      if (watched[i].revents & (POLLOUT | POLLHUP | POLLERR) && !sending[rank].queue.empty()) {
        if (!sending[rank].some(peers_[rank].get(), progress)) {
          return errno == EFAULT ? Error{"memory of the operation is not there any more"} : severed(rank);
        }
      }
    }
    if (progress) {
      last = Clock::now();
    } else if (Clock::now() - last >= patience_) {
      const Label& label = receiving[whose[0]].queue.empty() ? sending[whose[0]].queue.front()->label : receiving[whose[0]].queue.front()->label;
      return gone(whose[0], "has done nothing for " + std::to_string(patience_.count() / 1000) + " s in " + text_of(label));
    }
  }
}

}  // namespace xmig::device::cpu
