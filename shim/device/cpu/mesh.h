// The ranks of a communicator, each connected with each other one, and messages between them.
//
// Unix sockets between the servers of one node, TCP between those of different ones. A peer is hostile until it has proved that it is a
// rank of the group (its user on the same node, and the group's secret, which between nodes is as safe as their network), and a message is compared with what is expected before a byte of it is stored. Every wait ends: after `patience` without
// progress, when a peer is gone, or by abort().
//
// One thread at a time exchanges; abort() is called from any.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/result.h"
#include "device/collectives.h"
#include "ipc/fd.h"

namespace xmig::device::cpu {

// What both sides of a message say it is.
struct Label {
  uint64_t number = 0;  // of the operation, counted by each rank; 0 between two ranks alone
  uint64_t count = 0;
  uint32_t kind = 0;  // journal::CollectiveKind
  uint32_t type = 0;
  uint32_t reduction = 0;
  uint32_t peer = 0;   // root
  uint32_t phase = 0;  // an operation has several
  uint32_t reserved = 0;
  bool operator==(const Label&) const = default;
};
std::string text_of(const Label& label);

struct Outgoing {
  uint32_t to;
  Label label;
  std::span<const std::byte> bytes;
};
struct Incoming {
  uint32_t from;
  Label label;
  std::span<std::byte> bytes;
};

class Mesh {
 public:
  // Meets the others and connects with all of them.
  static Result<std::unique_ptr<Mesh>> connect(const Place& place, const Meeting& meet);
  Mesh(const Mesh&) = delete;

  uint32_t rank() const { return rank_; }
  uint32_t ranks() const { return static_cast<uint32_t>(peers_.size()); }

  // All of these messages, of each rank in order. A rank's messages to itself are copied.
  Result<> exchange(std::span<const Outgoing> outgoing, std::span<const Incoming> incoming);

  void abort() { aborted_.store(true); }
  bool aborted() const { return aborted_.load(); }

 private:
  struct Sending;
  struct Receiving;
  Mesh(uint32_t rank, std::vector<ipc::UniqueFd> peers, std::chrono::milliseconds patience)
      : rank_(rank), peers_(std::move(peers)), patience_(patience) {}
  Result<> to_itself(std::span<const Outgoing> outgoing, std::span<const Incoming> incoming) const;
  Error severed(uint32_t rank) const;
  Error gone(uint32_t rank, const std::string& why) const;

  const uint32_t rank_;
  const std::vector<ipc::UniqueFd> peers_;  // by rank; none for its own
  const std::chrono::milliseconds patience_;
  std::atomic<bool> aborted_{false};
};

}  // namespace xmig::device::cpu
