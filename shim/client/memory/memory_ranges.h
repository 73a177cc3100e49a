// Free ranges of addresses, with a rule about who may take them.
//
// A free range is universal, or it belongs to a stream: it was freed in that stream's order, so the stream itself may
// take it at once, and the others only after something has waited for the free. Which waits cover which free is
// counted in sequence numbers of records.
//
// Not locked: the owner is.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace xmig::client {

// In whose order a range was freed. stream 0: nobody's, the range is universal.
struct FreedBy {
  uint64_t stream = 0;
  uint64_t context = 0;
  uint64_t sequence = 0;  // of the last record that may still use the range
};

struct FreeRange {
  uint64_t address = 0;
  uint64_t bytes = 0;
  FreedBy freed;
  uint64_t end() const { return address + bytes; }
};

class FreeRanges {
 public:
  // Free from now on; merges with neighbours that obey the same rule.
  void add(const FreeRange& range);

  // The smallest range that fits, of `stream`'s own first, else a universal one; aligned to a power of two. The rest
  // stays free. `freed` of the result is that of the range it was taken from.
  std::optional<FreeRange> take(uint64_t bytes, uint64_t alignment, uint64_t stream = 0);
  // Exactly [address, address + bytes) if all of it lies in one universal range.
  bool take_at(uint64_t address, uint64_t bytes);
  // The parts of universal ranges that are whole multiples of `granule`, up to about `bytes`, largest first.
  std::vector<FreeRange> take_whole(uint64_t granule, uint64_t bytes);

  // Make universal what `covered` says nobody can use any more.
  void settle(const std::function<bool(const FreedBy&)>& covered);
  // The stream's own ranges are nobody's until the context has been waited for.
  void orphan(uint64_t stream, uint64_t orphans);

  std::optional<FreeRange> find(uint64_t address) const;  // the free range that holds this address
  std::optional<FreeRange> starting_at(uint64_t address) const;
  const std::map<uint64_t, FreeRange>& all() const { return by_address_; }
  uint64_t bytes() const { return bytes_; }
  // Is there a range that belongs to a stream?
  bool unsettled() const { return by_size_.size() != by_size_.count(0); }

 private:
  using Iterator = std::map<uint64_t, FreeRange>::iterator;
  void insert(const FreeRange& range);
  void erase(Iterator it);
  std::optional<FreeRange> take_of(uint64_t bytes, uint64_t alignment, uint64_t stream);

  std::map<uint64_t, FreeRange> by_address_;
  std::unordered_map<uint64_t, std::set<std::pair<uint64_t, uint64_t>>> by_size_;  // stream -> {bytes, address}
  uint64_t bytes_ = 0;
};

}  // namespace xmig::client
