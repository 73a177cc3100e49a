// Where the time of a replay goes: reported in the job's log when it is worth it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "journal/record_info.h"
#include "server/clock.h"

namespace xmig::server {

class ReplayTimes {
 public:
  ReplayTimes() = default;
  explicit ReplayTimes(uint64_t now) : start_(now) {}

  // A record has been executed, which is not to say that the device has done its work.
  void took(uint16_t op, uint64_t ns) {
    issued_ += ns;
    One& all = kinds_[static_cast<size_t>(kRecordInfos[op].work)];
    ++all.count;
    all.ns += ns;
    if (ns < kSlow) return;
    One& one = slow_[op];
    ++one.count;
    one.ns += ns;
  }
  // Empty if it did not take long. What it took beside giving records to the device is waiting for the device: at barriers, for
  // answers, for copies that have to end.
  std::string text(uint64_t records, uint64_t now) const {
    const uint64_t took = now - start_;
    if (took < kLong) return {};
    std::string text = "the replay of " + std::to_string(records) + " records took " + in_ms(took) + ": " + in_ms(issued_) +
                       " to give them to the device";
    constexpr const char* kNames[] = {"launches", "copies and fills", "modules, kernels and graphs", "events and waits",
                                      "others"};
    const char* separator = " (";
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
      if (kinds_[kind].ns < kWorthSaying) continue;
      text += separator + in_ms(kinds_[kind].ns) + " for " + std::to_string(kinds_[kind].count) + " " + kNames[kind];
      separator = ", ";
    }
    if (*separator == ',') text += ")";
    text += ", " + in_ms(took - std::min(took, issued_)) + " waiting for it";
    std::vector<size_t> order;
    for (size_t op = 0; op < slow_.size(); ++op) {
      if (slow_[op].count != 0) order.push_back(op);
    }
    std::sort(order.begin(), order.end(), [this](size_t a, size_t b) { return slow_[a].ns > slow_[b].ns; });
    for (size_t i = 0; i < std::min<size_t>(order.size(), 4); ++i) {
      const One& one = slow_[order[i]];
      text += (i == 0 ? "; slow ones: " : ", ") + in_ms(one.ns) + " for " + std::to_string(one.count) + " " +
              kRecordInfos[order[i]].name;
    }
    return text;
  }

 private:
  static constexpr uint64_t kSlow = 500'000;
  static constexpr uint64_t kLong = 20'000'000;
  static constexpr uint64_t kWorthSaying = 1'000'000;
  struct One {
    uint64_t count = 0, ns = 0;
  };

  uint64_t start_ = 0;
  uint64_t issued_ = 0;
  std::array<One, static_cast<size_t>(WorkClass::kCount)> kinds_{};
  std::vector<One> slow_ = std::vector<One>(kRecordKinds);
};

}  // namespace xmig::server
