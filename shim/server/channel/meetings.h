// How the ranks of a communicator find each other: each reports to the daemon what it offers, and gets the offers of all.
//
// The daemon may be another one meanwhile, or none for a while, and nothing of a meeting outlives it. So an offer is repeated until all
// ranks have been answered, not only until this one has: a daemon that ends may have answered some of them, and the next one can answer
// the others only if it hears the offers of all. Who was answered repeats also with what (the daemon's name for the offers of all), and
// stops when the daemon says that everybody was; or after the time that a rank waits at most, when nobody waits any more. To stop once
// the communicator is made would not do: a rank of a split that has no colour makes none, and the others need to hear that.
//
// Whatever the order, no two ranks are in different communicators, and none waits for ever:
// - An offer does not change as long as its rank is in the meeting. So each daemon that has all offers gives the same answer.
// - It changes only with the rank's server, or if the rank has given up and tries again. A server that was lost is reason to recover all
//   ranks: each of them joined before it offered anything, so all of them get new servers, and meet anew.
// - If a daemon finds nevertheless that some were answered something else, it refuses the others (xmigd/groups/meetings.py).
// - A communicator is made only when all of its ranks have reached each other, at addresses that only one answer has. So one that some of
//   its ranks were given other addresses for is never made, on any of them.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/result.h"
#include "server/channel/daemon.h"
#include "server/channel/requests.h"

namespace xmig::server {

// A thread for each rank waits here; the control thread brings the answers; one of its own, from the first offer on, repeats what is offered.
class Meetings {
 public:
  // `address`: of this node, for ranks of others; empty: there are none. `repeat`: how often an offer is repeated.
  Meetings(Daemon& daemon, const std::string& address, std::chrono::milliseconds repeat = std::chrono::seconds(1))
      : daemon_(daemon), address_(address), repeat_(repeat) {}
  Meetings(const Meetings&) = delete;
  ~Meetings();

  const std::string& address() const { return address_; }

  // `meeting`: what all ranks call it, in hexadecimal digits. Waits, at most for `patience`, and only until `unwanted`, which is
  // called at first, and after each look_again().
  Result<std::vector<std::string>> attend(const std::string& meeting, uint32_t rank, uint32_t ranks, const std::string& offer,
                                          std::chrono::milliseconds patience, const std::function<bool()>& unwanted = {});
  void look_again();
  // The control thread: the daemon's answer.
  void met(Met answer);
  // Whoever waits gives up, and so does everybody who comes later. Nothing is repeated any more.
  void close();

 private:
  using Clock = std::chrono::steady_clock;
  struct Offered {
    uint32_t ranks = 0;
    std::string offer;
    Clock::time_point next;  // when it is repeated
    bool waits = true;       // its rank does; otherwise it is repeated for the others, until:
    Clock::time_point until = Clock::time_point::max();
    std::string missing;  // the ranks that had not come at the last answer
    std::string refused;
    std::vector<std::string> offers;
    std::string answer;  // what the daemon calls these
    bool answered = false;
  };
  void repeat();

  Daemon& daemon_;
  const std::string address_;
  const std::chrono::milliseconds repeat_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::pair<std::string, uint32_t>, Offered> offered_;  // guarded by mutex_
  std::thread repeating_;                                        // guarded by mutex_
  bool closed_ = false;                                          // guarded by mutex_
};

}  // namespace xmig::server
