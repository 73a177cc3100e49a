// How the ranks of a communicator find each other: each reports to the daemon what it offers, and gets the offers of all.
//
// A thread for each rank waits here; the control thread brings the answers. The daemon may be another one meanwhile, or none for a while:
// what is offered is repeated until it is answered.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "common/result.h"
#include "server/channel/daemon.h"
#include "server/channel/requests.h"

namespace xmig::server {

class Meetings {
 public:
  // `address`: of this node, for ranks of others; empty: there are none.
  Meetings(Daemon& daemon, const std::string& address) : daemon_(daemon), address_(address) {}
  Meetings(const Meetings&) = delete;

  const std::string& address() const { return address_; }

  // `meeting`: what all ranks call it, in hexadecimal digits. Waits, at most for `patience`, and only until `unwanted`, which is
  // called at first, and after each look_again().
  Result<std::vector<std::string>> attend(const std::string& meeting, uint32_t rank, uint32_t ranks, const std::string& offer,
                                          std::chrono::milliseconds patience, const std::function<bool()>& unwanted = {});
  void look_again();
  // The control thread: the daemon's answer.
  void met(Met answer);
  // Whoever waits gives up, and so does everybody who comes later.
  void close();

 private:
  struct Waiting {
    std::string missing;  // the ranks that had not come at the last answer
    std::string refused;
    std::vector<std::string> offers;
    bool answered = false;
  };
  Daemon& daemon_;
  const std::string address_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::pair<std::string, uint32_t>, Waiting> waiting_;  // guarded by mutex_
  bool closed_ = false;                                          // guarded by mutex_
};

}  // namespace xmig::server
