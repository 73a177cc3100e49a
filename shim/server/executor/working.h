// Which streams may have work that is not done: only those have to be queried how they are.
//
// A program easily has 33 streams, most of them used once. A GPU's driver takes 5 us to say of a stream that it is idle,
// so that to ask them all at each look costs more than a short kernel.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "journal/layout.h"

namespace xmig::server {

class Working {
 public:
  // It gets work, or may get some.
  void add(CUstream stream, uint32_t ordinal) {
    auto& streams = streams_[ordinal];
    if (!streams.empty() && streams.back() == stream) return;
    const auto known = std::find(streams.begin(), streams.end(), stream);
    if (known == streams.end()) {
      streams.push_back(stream);
    } else {
      std::swap(*known, streams.back());  // the next record is likely for the same
    }
  }
  // Its handle is about to mean nothing any more.
  void forget(CUstream stream) {
    for (auto& streams : streams_) std::erase(streams, stream);
  }
  // Everything is done.
  void clear() {
    for (auto& streams : streams_) streams.clear();
  }
  // Those of which `busy`, which is queried, says so. The others are not queried again before they get work. The default
  // stream is queried in any case: a device that has faulted tells whoever asks.
  template <typename Busy>
  const std::vector<CUstream>& ask(uint32_t ordinal, Busy&& busy) {
    auto& streams = streams_[ordinal];
    add(nullptr, ordinal);
    std::erase_if(streams, [&](CUstream stream) { return !busy(stream); });
    return streams;
  }

 private:
  std::array<std::vector<CUstream>, journal::kMaxDevices> streams_;
};

}  // namespace xmig::server
