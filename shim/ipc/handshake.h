// The handshake between a program and the daemon: one message each way over a SOCK_SEQPACKET Unix socket, then the
// socket is closed. Both sides check every field: the daemon's half is xmigd/ipc/handshake.py.
#pragma once

#include <cstdint>

namespace xmig::ipc {

inline constexpr uint32_t kHandshakeMagic = 0x4c434d58;  // "XMCL"
inline constexpr uint32_t kHandshakeVersion = 1;

// Which of its job's devices a program wants to see.
enum Visibility : uint32_t {
  kJobDevices = 0,  // $CUDA_VISIBLE_DEVICES is not set: those that its job has
  kNamed = 1,       // what $CUDA_VISIBLE_DEVICES says
  kEvery = 2,       // all that $CUDA_VISIBLE_DEVICES could name: xmig-nvml-probe asks so
};

// The program to the daemon. Who it is, the daemon reads from the socket (SO_PEERCRED), not from here. A shim from before
// `visibility` sends what comes before it, and means 0.
struct ClientHello {
  uint32_t magic;
  uint32_t version;
  uint32_t layout;    // journal::kLayoutVersion
  uint32_t reattach;  // 1: an earlier handshake's job, whose server and daemon both went away
  char job[64];       // $XMIG_JOB, from `xmigctl run`; empty: the daemon makes a job for this process
  char command[256];  // argv, shortened, for people
  uint32_t visibility;
  char visible[508];  // $CUDA_VISIBLE_DEVICES, with kNamed
};

// The daemon to the program, with `fds` file descriptors: journal, staging, pinned. Sent once the server is ready.
struct ServerWelcome {
  uint32_t magic;
  uint32_t version;
  int32_t status;  // CUresult; not 0: no fds, and `message` says why and what to do
  uint32_t fds;
  char job[64];
  char message[512];
};

// Instead of a hello, and without an answer: a line for a job's log from a process that shares no journal with the daemon, because
// its handshake is not over, or has failed.
inline constexpr uint32_t kNoticeMagic = 0x544e4d58;  // "XMNT"
struct ClientNotice {
  uint32_t magic;
  uint32_t version;
  char job[64];  // $XMIG_JOB
  char text[1016];
};

}  // namespace xmig::ipc
