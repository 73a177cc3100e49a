// Where the time of a replay goes: reported in the job's log when it is worth it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "ops.h"
#include "server/clock.h"

namespace xmig::server {

class ReplayTimes {
 public:
  ReplayTimes() = default;
  explicit ReplayTimes(uint64_t now) : start_(now) {}

  // A record has been executed, which is not to say that the device has done its work.
  void took(Op op, uint64_t ns) {
    issued_ += ns;
    One& all = kinds_[static_cast<size_t>(kind_of(op))];
    ++all.count;
    all.ns += ns;
    if (ns < kSlow) return;
    One& one = slow_[static_cast<size_t>(op)];
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
              kOpInfo[order[i]].name;
    }
    return text;
  }

 private:
  static constexpr uint64_t kSlow = 500'000;
  static constexpr uint64_t kLong = 20'000'000;
  static constexpr uint64_t kWorthSaying = 1'000'000;
  enum class Kind { kLaunch, kCopy, kCode, kOrder, kOther, kCount };
  struct One {
    uint64_t count = 0, ns = 0;
  };

  static Kind kind_of(Op op) {
    switch (op) {
      case Op::xmLaunch:
      case Op::xmGraphLaunch: return Kind::kLaunch;
      case Op::xmCopyFromHost:
      case Op::xmCopyFromPinned:
      case Op::xmCopyToHost:
      case Op::xmCopyToPinned:
      case Op::xmCopy2D:
      case Op::cuMemcpyDtoDAsync_v2:
      case Op::cuMemsetD8Async:
      case Op::cuMemsetD16Async:
      case Op::cuMemsetD32Async: return Kind::kCopy;
      case Op::xmImage:
      case Op::xmImageFile:
      case Op::xmModuleLoad:
      case Op::xmKernel:
      case Op::xmVariables:
      case Op::xmFirstLaunch:
      case Op::xmLink:
      case Op::xmGraph:
      case Op::cuModuleUnload: return Kind::kCode;
      case Op::cuEventRecordWithFlags:
      case Op::cuStreamWaitEvent:
      case Op::cuCtxSynchronize:
      case Op::cuStreamSynchronize:
      case Op::cuEventSynchronize: return Kind::kOrder;
      default: return Kind::kOther;
    }
  }

  uint64_t start_ = 0;
  uint64_t issued_ = 0;
  std::array<One, static_cast<size_t>(Kind::kCount)> kinds_{};
  std::array<One, static_cast<size_t>(Op::kCount)> slow_{};
};

}  // namespace xmig::server
