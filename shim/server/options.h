// The command line of xmig-server.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/result.h"

namespace xmig::server {

struct Options {
  std::string device_kind;    // "cpu", "null", "cuda"
  std::vector<int> ordinals;  // the node's devices, in the program's order
  uint64_t memory_bytes = 0;  // of each device; 0: the device's default
  uint64_t open = ~uint64_t{0};  // a bit for each of them whose context is opened at once; others are when a job needs them
  int control_fd = -1;
  std::string runtime_dir;  // where a daemon that comes back listens
  std::string address;      // of this node, where servers of others reach it; empty: its process has no ranks there

  std::string device() const;  // as on the command line: "cpu:0,1"
};

// "cuda:0,1", into the two fields that say so. False when it is none.
bool parse_device(std::string_view text, Options& options);
Result<Options> parse_options(int argc, char** argv);

}  // namespace xmig::server
