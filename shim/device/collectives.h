// Collectives, as the server sees them that knows no vendor's library: communicators that are joined, and operations that begin.
//
// Two exist: the cpu device's own (device/cpu/collectives.h; the null device's moves nothing), and the program's NCCL
// (device/cuda/nccl.h). Both find the other ranks through what they are given, a Meeting: no address is in a program's hands.
//
// join() waits for the other ranks and is called from a thread of its own; everything else is the executor's thread's and waits for
// nobody, but for the first transfer between two ranks with NCCL, unless a process has several of up to 32 ranks.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/result.h"
#include "device/runtime.h"
#include "journal/collectives.h"

namespace xmig::device {

// Error::code: the connection with another rank has ended, or cannot be made. The rank may be gone, or only the network between.
inline constexpr const char* kSevered = "severed";

using GroupId = std::array<std::byte, journal::kGroupIdBytes>;

// A rank of a communicator that is to be made.
struct Place {
  GroupId group{};
  uint32_t rank = 0;
  uint32_t ranks = 0;
  ContextHandle context = nullptr;  // the calling thread's current one
  uint32_t ordinal = 0;             // of its device
  std::string library;   // the program's
  std::vector<std::string> settings;  // NAME=VALUE, what its user has set for that
  std::string address;                // of this node, for ranks of others; empty: there are none
  std::chrono::milliseconds patience{};  // in an operation, with a rank that does nothing
};

// Where the ranks of a group meet. Each brings a text and gets all of them, by rank. Waits; the error says who did not come.
using Meeting = std::function<Result<std::vector<std::string>>(const std::string& offer)>;

class Communicator {
 public:
  // Nothing of it is unfinished, or it was aborted.
  virtual ~Communicator() = default;

  // What was begun ends, whatever becomes of its data.
  virtual void abort() = 0;
  // Is there work that is not done?
  virtual bool unfinished() = 0;
  // Why it can never be done; none as long as nothing is known of that. Nothing that comes after it in its stream runs then.
  virtual std::optional<Error> failure() = 0;
  // What took how long while it was joined, for a log; empty: nothing that is worth a line.
  virtual std::string how_joined() const { return {}; }
};

// What of a group one communicator does, in this stream.
struct Part {
  Communicator* communicator;
  std::function<void()> enter;  // makes its device's context the calling thread's current one, which a default stream is of
  StreamHandle stream;
  std::vector<journal::CollectiveOperation> operations;  // checked: ranks, types, and that the memory is the program's
};

class Collectives {
 public:
  virtual ~Collectives() = default;

  // `failed` is called from any thread when a failure of the communicator becomes known.
  virtual Result<std::unique_ptr<Communicator>> join(const Place& place, const Meeting& meet, std::function<void()> failed) = 0;
  // All of a group begins.
  virtual Status run(std::span<Part> parts) = 0;
  // A first operation, so that none that anybody waits for is the first. The parts are all ranks of one communicator that this process
  // has; their streams and operations are not looked at. Waits, as long as give_up() does not say that it is enough.
  virtual Result<> warm(std::span<Part>, const std::function<bool()>&) { return {}; }
};

}  // namespace xmig::device
