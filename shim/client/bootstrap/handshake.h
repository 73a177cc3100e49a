// Getting a job from the daemon, at the first cuInit; and asking a restarted daemon about it.
#pragma once

#include <cuda.h>

#include <string>

namespace xmig::client {

struct Attached {
  CUresult error;
  bool no_daemon;  // nobody answers at the socket
};
// Connects, maps what the daemon gives, fills `process`, closes every descriptor. What goes wrong is reported in one line;
// `quiet`: but not that there is no daemon.
Attached attach(bool quiet);

struct Reattached {
  enum Outcome { kNoDaemon, kAccepted, kRefused } outcome;
  CUresult error;  // of kRefused; the reason has been reported
};
Reattached reattach();

// Where the daemon listens for programs.
std::string socket_path();

}  // namespace xmig::client
