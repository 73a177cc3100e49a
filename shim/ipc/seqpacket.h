// Messages with file descriptors over SOCK_SEQPACKET Unix sockets. The peer is hostile: a message is taken whole or not
// at all, and every descriptor that came with a refused one is closed.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

#include "ipc/fd.h"

namespace xmig::ipc {

inline constexpr size_t kMaxFds = 16;  // of one message

// A connected socket, or none and errno: ENAMETOOLONG, ENOENT, ECONNREFUSED, EACCES ... `wait`: for a listener that has many
// connections to take; otherwise that is EAGAIN, and the socket never blocks.
UniqueFd connect_to(std::string_view path, bool wait = true);

// Send one message. Returns 0 or an errno: EAGAIN on a non-blocking socket that is full, EPIPE when the peer is gone (no
// signal is raised).
int send_message(int socket, std::span<const std::byte> data, std::span<const int> fds = {});

struct Received {
  size_t bytes = 0;  // 0 with error 0: the peer closed the connection
  int error = 0;     // errno; EMSGSIZE: longer than the buffer, or more descriptors than allowed
  std::vector<UniqueFd> fds;
};
// Receive one message into `buffer`, with at most `max_fds` descriptors (close-on-exec).
Received receive_message(int socket, std::span<std::byte> buffer, size_t max_fds = 0);

}  // namespace xmig::ipc
