// Errors that the program has been informed of: a device answers everything with its own until the context is reset.
//
// The executor's thread alone.
#pragma once

#include <cstdint>

#include "server/snapshot/snapshot_file.h"

namespace xmig::server {

class ProgramErrors {
 public:
  // 0: none. Of no device there is one, almost always.
  uint32_t of(uint32_t ordinal) const { return any_ ? all_[ordinal].error : 0; }
  void set(uint32_t ordinal, Failure failure) {
    all_[ordinal] = failure;
    look();
  }
  void clear(uint32_t ordinal) { set(ordinal, {}); }

  // For a snapshot, and from one.
  const Failures& all() const { return all_; }
  void restore(const Failures& all) {
    all_ = all;
    look();
  }

 private:
  void look() {
    any_ = false;
    for (const Failure& failure : all_) any_ |= failure.error != 0;
  }

  Failures all_{};
  bool any_ = false;
};

}  // namespace xmig::server
