// A copy divided into pieces that fit a record or a staging slot, in order: whole rows while they fit, else parts of one.
#pragma once

#include <algorithm>
#include <cstdint>

#include "client/copy/copy.h"

namespace xmig::client {

class Pieces {
 public:
  // At most `most` bytes and `most_rows` rows each.
  Pieces(const Copy& copy, uint64_t most, uint64_t most_rows = ~0ull)
      : copy_(copy), most_(most), rows_(std::clamp<uint64_t>(most / copy.width, 1, most_rows)) {}

  bool done() const { return row_ >= copy_.height; }
  Copy next() {
    Copy piece = copy_;
    piece.destination += row_ * copy_.destination_pitch + column_;
    piece.source += row_ * copy_.source_pitch + column_;
    if (copy_.width <= most_) {
      piece.height = std::min(rows_, copy_.height - row_);
      row_ += piece.height;
      return piece;
    }
    piece.height = 1;
    piece.width = std::min(most_, copy_.width - column_);
    column_ += piece.width;
    if (column_ == copy_.width) {
      column_ = 0;
      ++row_;
    }
    return piece;
  }

 private:
  const Copy copy_;
  const uint64_t most_;
  const uint64_t rows_;
  uint64_t row_ = 0;
  uint64_t column_ = 0;
};

}  // namespace xmig::client
