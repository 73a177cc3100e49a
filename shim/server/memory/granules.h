// Hashing and copying of granules, on whatever devices they are and whichever way they have to go: on the device, or through
// buffers where one end is plain memory that the device cannot reach.
//
// Two threads use it: the executor's (kDrained), and that of a relocation (kRunning).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "common/result.h"
#include "device/runtime.h"
#include "server/contexts.h"
#include "server/faults/faults.h"
#include "server/memory/staging_copy.h"
#include "server/memory/shadow.h"

namespace xmig::server {

class Granules {
 public:
  enum class While { kDrained, kRunning };  // the device, where it has to hash or to copy
  using Move = std::pair<uint64_t, uint64_t>;  // to, from

  Granules(device::Runtime& device, Contexts& contexts, Faults& faults, const Shadow& shadow)
      : device_(device),
        contexts_(contexts),
        faults_(faults),
        shadow_(shadow),
        staging_copy_(device_, [&contexts](uint32_t ordinal) { contexts.use(ordinal); }) {}
  Granules(const Granules&) = delete;

  // The program's last kernel of this device is in this stream.
  void follow(device::StreamHandle stream, uint32_t ordinal) { kernels_in_[ordinal] = stream; }
  void forget(device::StreamHandle gone) { std::ranges::replace(kernels_in_, gone, device::StreamHandle{nullptr}); }
  // Where work of ours goes.
  device::Runtime::Where where(uint32_t ordinal, While when = While::kDrained) const;

  // False: the device failed.
  bool hash(const std::vector<uint64_t>& granules, std::vector<uint64_t>& hashes, While when = While::kDrained);
  bool copy_and_hash(const std::vector<Move>& moves, std::vector<uint64_t>& hashes);
  // Of `moves`, which are of one device and on it: in one go.
  bool copy_and_hash(const std::vector<device::Move>& moves, std::span<uint64_t> hashes, uint32_t ordinal);
  bool copy(const std::vector<Move>& moves);
  void clear(const std::vector<uint64_t>& granules);

  // Moves by how they have to be made.
  struct Moves {
    std::vector<Move> direct;
    std::vector<StagingCopy::Piece> to_plain, from_plain;
  };
  // The shadow does not change meanwhile.
  void add(Moves& moves, uint64_t to, uint64_t from) const;
  Result<> copy(const Moves& moves, While when = While::kDrained);

  StagingCopy& staging_copy() { return staging_copy_; }

 private:
  device::Runtime& device_;
  Contexts& contexts_;
  Faults& faults_;
  const Shadow& shadow_;
  StagingCopy staging_copy_;
  std::array<device::StreamHandle, journal::kMaxDevices> kernels_in_{};  // the stream of each device's last kernel
};

}  // namespace xmig::server
