// The records from the last snapshot to where a lost server was, executed again. The executor's thread's alone.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "server/channel/requests.h"
#include "server/recovery/replay_times.h"

namespace xmig::server {

class Replay {
 public:
  // `until`: a position. `deliver`: the program's own fault, which is not met again but reported. `careful`: records that are executed
  // alone, so that it is known whose fault there is.
  void begin(uint64_t now, uint64_t until, std::optional<Delivery> deliver, std::optional<Careful> careful) {
    running_ = true;
    until_ = until;
    times_ = ReplayTimes(now);
    deliver_ = deliver;
    careful_ = careful;
  }
  void end() { running_ = false; }

  bool running() const { return running_; }
  uint64_t until() const { return until_; }
  // One more record is executed; how many that makes.
  uint64_t count() { return ++records_; }
  uint64_t records() const { return records_; }
  void took(uint16_t op, uint64_t ns) { times_.took(op, ns); }
  // Where the time has gone; empty if it did not take long.
  std::string times(uint64_t now) const { return times_.text(records_, now); }

  // Also right behind it: a server that dies may not have reported of the record that it has executed it.
  bool delivers_at(uint64_t sequence) const { return deliver_ && sequence >= deliver_->sequence; }
  Delivery deliver() { return *std::exchange(deliver_, std::nullopt); }
  bool careful_at(uint64_t sequence) const {
    return careful_ && sequence > careful_->after && sequence <= careful_->until;
  }

 private:
  bool running_ = false;
  uint64_t until_ = 0;
  uint64_t records_ = 0;
  ReplayTimes times_;
  std::optional<Delivery> deliver_;
  std::optional<Careful> careful_;
};

}  // namespace xmig::server
