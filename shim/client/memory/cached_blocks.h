// What a caching allocator inside the program has given back of the memory that it holds.
//
// The driver hears of an allocator's segments only. Which parts of them are in use the allocator itself says
// (caching_allocator.h). Granules of a segment in which nothing is in use are instructed to the server (xmDiscard): a snapshot
// leaves their content out. The first block in one takes it back (xmReuse).
//
// Invariants:
//   only granules that lie in one segment as a whole are ever discarded;
//   xmReuse of a block's granules is in the journal before its owner knows the block;
//   what is named in a block (named_numbers.h) is so no longer before its owner's successor knows the block;
//   what does not add up (a block freed twice, or of nobody's segment) ends it: everything counts as in use from then on.
#pragma once

#include <cstdint>
#include <mutex>

#include "journal/numbers.h"
#include "ops.h"

namespace xmig::client {

class CachedBlocks {
 public:
  // Bytes [address, address + bytes) belong to the allocator; nothing of them is in use. Whole granules, or nothing happens.
  void segment(uint64_t address, uint64_t bytes);
  // No longer.
  void segment_gone(uint64_t address, uint64_t bytes);
  // A block of a segment. Blocks of memory that is in no segment are nobody's business here.
  void allocated(uint64_t address, uint64_t bytes);
  void freed(uint64_t address, uint64_t bytes);

  // Of a block that its owner has and does not free meanwhile. False: it is of nobody's segment, so nothing would end the name with it.
  bool name(const journal::NamedNumbers& numbers);

  // Did it not add up?
  bool given_up() const { return given_up_; }

 private:
  // Of a granule: 0 outside of segments, otherwise 1 and how many bytes of it are in use.
  uint32_t* counts();
  enum class Change { kNone, kReported, kUnsound };
  template <typename OneGranule>
  void change(Op op, uint64_t address, uint64_t bytes, OneGranule&& change);
  void give_up();

  std::mutex lock_;  // over what follows, and over the records: their order is that of the calls
  uint32_t* counts_ = nullptr;
  uint64_t lowest_ = ~0ull, highest_ = 0;  // granules that were in a segment
  bool given_up_ = false;
};

CachedBlocks& cached_blocks();

}  // namespace xmig::client
