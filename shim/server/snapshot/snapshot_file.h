// What a snapshot writes into its memfd, and how a recovery reads it. The file has been out of our hands: every length is
// checked, and a checksum covers it all.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/result.h"
#include "ipc/fd.h"
#include "journal/layout.h"
#include "server/memory/hosting.h"
#include "server/memory/images.h"
#include "server/memory/live_set.h"
#include "server/records/stored_records.h"

namespace xmig::server {

// A fault that the program has been informed of: the device answers everything with it until its context is reset.
struct Failure {
  uint32_t error = 0;
  uint32_t reserved = 0;
  uint64_t sequence = 0;
};
using Failures = std::array<Failure, journal::kMaxDevices>;  // by ordinal

// A granule with live content, and where the snapshot keeps that. Zeros are kept nowhere: frameworks allocate most of a
// device before they use it.
struct ChunkState {
  uint64_t address;
  uint64_t hash;
  uint64_t slot;  // 0: the granule is zeros
};

struct RecordedEvent {
  uint64_t index;
  uint64_t sequence;
};

// A module's variable that the device has placed, and its twin in the program's memory, whose address the program knows.
// The two are made equal where they could be distinguished: what the program writes goes to both; what kernels have
// written to the variable itself is brought over before the program, or a snapshot, reads the twin.
struct Variable {
  uint32_t module = 0;
  uint64_t address = 0;  // of the twin
  std::string name;
  uint64_t real = 0;             // where the device has it
  std::vector<std::byte> known;  // what the variable was when both were equal
};

struct SnapshotContent {
  uint64_t number = 0;
  uint64_t position = 0;
  uint64_t sequence = 0;  // of the last record before the snapshot
  Failures failures{};
  std::vector<Extent> memory;
  std::vector<LiveRange> live;
  std::vector<ChunkState> chunks;
  std::vector<Images::State> images;
  std::vector<RecordedEvent> events;  // those that have been recorded at least once
  RecordList objects;
  std::vector<Variable> variables;
};

std::vector<std::byte> serialise(const SnapshotContent& content);
uint64_t serialised_bytes(const SnapshotContent& content);
Result<SnapshotContent> parse_snapshot(std::span<const std::byte> bytes);

// Take the pages for `bytes` now: false if there are none (errno).
bool reserve_snapshot_file(int fd, uint64_t bytes);
Result<SnapshotContent> read_snapshot_file(int fd);
// Of another process's two files: its server may write one of them at any time, and the other one is whole.
std::optional<SnapshotContent> newest_of(std::span<const ipc::UniqueFd> files);

}  // namespace xmig::server
