// What a suspended job has in host memory or in files, on its way to the device while the memory there is still being made
// and the job's objects, too.
#pragma once

#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#include "server/clock.h"
#include "server/memory/staging_copy.h"

namespace xmig::server {

class Arrival {
 public:
  // Begins. `pieces` by their device addresses; none of them has memory yet.
  Arrival(StagingCopy& staging_copy, std::vector<StagingCopy::Piece> pieces)
      : pieces_(std::move(pieces)), thread_([this, &staging_copy] {
          good_ = static_cast<bool>(staging_copy.to_device(pieces_, &made_));
        }) {}
  // Gives up, if it is not over.
  ~Arrival() {
    made_.give_up();
    if (thread_.joinable()) thread_.join();
  }
  Arrival(const Arrival&) = delete;

  // There is memory at all addresses below this one.
  void made(uint64_t until) { made_.rise(until); }
  // Waits until all is there. False: something went wrong, and a part may be missing.
  bool finish() {
    thread_.join();
    return good_;
  }

  const std::vector<StagingCopy::Piece>& pieces() const { return pieces_; }
  uint64_t began() const { return began_; }  // CLOCK_MONOTONIC, ns

 private:
  const uint64_t began_ = now_ns();
  const std::vector<StagingCopy::Piece> pieces_;
  Watermark made_;
  bool good_ = false;
  std::thread thread_;  // last: it uses the others
};

}  // namespace xmig::server
