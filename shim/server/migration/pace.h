// How much to do at a time, so that somebody who waits for one piece waits for about as long as he may.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace xmig::server {

class Pace {
 public:
  // `goal`: ns that a piece is to take. It is never larger than `most`; the first one is `first`, of what is as fast as that.
  Pace(uint64_t goal, size_t most, size_t first = kFirst) : goal_(goal), most_(most), size_(std::min(first, most)) {}

  size_t size() const { return size_; }
  // `done`, of what size() reported, took so long. Less than all of it says little.
  void took(size_t done, uint64_t ns) {
    if (done < size_) return;
    const size_t fitting = ns == 0 ? most_ : static_cast<size_t>(done * goal_ / ns);
    size_ = std::clamp(fitting, kLeast, std::min(2 * size_, most_));
  }

 private:
  static constexpr size_t kFirst = 64, kLeast = 4;

  uint64_t goal_;
  size_t most_;
  size_t size_;
};

}  // namespace xmig::server
