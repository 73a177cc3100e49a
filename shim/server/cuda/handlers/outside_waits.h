// What the device waits for that does not end by itself: functions of the program, values that a later record may write, and other
// ranks.
//
// The executor's thread adds; functions end on the driver's threads; the watchdog's thread looks.
#pragma once

#include <atomic>
#include <cstdint>

namespace xmig::server {

struct OutsideWaits {
  std::atomic<uint64_t> functions{0};  // that the program has yet to run
  std::atomic<bool> values{false};     // a stream waits for one
  std::atomic<bool> collectives{false};  // one is not done yet, or a communicator not made
  std::atomic<bool> ends_itself{false};  // of these: one is not made, whose ranks have a time in which to come; or has failed
  std::atomic<bool> beginning{false};    // the executor itself waits, in the library that begins a collective

  bool on_functions() const { return functions.load(std::memory_order_acquire) != 0; }
  bool on_program() const { return values || on_functions(); }
  bool any() const { return collectives || on_program(); }
};

}  // namespace xmig::server
