// Where the time of a redo goes: said in the job's log when it is long.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "ops.h"
#include "server/clock.h"

namespace xmig::server {

class RedoTimes {
 public:
  RedoTimes() = default;
  explicit RedoTimes(uint64_t now) : start_(now) {}

  // A record has been executed, which is not to say that the device has done its work.
  void took(Op op, uint64_t ns) {
    issued_ += ns;
    if (ns < kSlow) return;
    One& one = slow_[static_cast<size_t>(op)];
    ++one.count;
    one.ns += ns;
  }
  // Empty if it did not take long.
  std::string text(uint64_t records, uint64_t now) const {
    if (now - start_ < kLong) return {};
    std::vector<size_t> order;
    for (size_t op = 0; op < slow_.size(); ++op) {
      if (slow_[op].count != 0) order.push_back(op);
    }
    std::sort(order.begin(), order.end(), [this](size_t a, size_t b) { return slow_[a].ns > slow_[b].ns; });
    std::string text = "the redo of " + std::to_string(records) + " records took " + in_ms(now - start_) + ": " + in_ms(issued_) +
                       " to give them to the device";
    for (size_t i = 0; i < std::min<size_t>(order.size(), 4); ++i) {
      const One& one = slow_[order[i]];
      text += (i == 0 ? ", of it " : ", ") + in_ms(one.ns) + " for " + std::to_string(one.count) + " slow " +
              kOpInfo[order[i]].name;
    }
    return text;
  }

 private:
  static constexpr uint64_t kSlow = 500'000;
  static constexpr uint64_t kLong = 100'000'000;
  struct One {
    uint64_t count = 0, ns = 0;
  };

  uint64_t start_ = 0;
  uint64_t issued_ = 0;
  std::array<One, static_cast<size_t>(Op::kCount)> slow_{};
};

}  // namespace xmig::server
