// The record that is executed, and how.
//
// The executor's thread alone: the executor writes it between two records, handlers read it, and say in it that the job is over.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "server/records/record.h"

namespace xmig::server {

enum class Mode {
  kRun,      // from the ring
  kRestore,  // object records of a snapshot
  kObjects,  // from the ring, but the device's work is done already: objects only
};

struct Current {
  Record record;
  Mode mode = Mode::kRun;
  uint64_t position = 0;  // where the record starts. Everything before it was executed
  uint64_t sequence = 0;  // of the record before it
  std::optional<std::string> broken;  // the job is over, and why

  void over(const std::string& why) { broken = why; }
  void garbage(const std::string& text) {
    broken = "the journal does not decode at position " + std::to_string(position) + ": " + text;
  }
};

}  // namespace xmig::server
