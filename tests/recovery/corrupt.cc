// What a hostile or broken program can do to its own journal, for garbage.py.
#include <unistd.h>

#include <cstring>
#include <random>

#include "journal/futex.h"
#include "journal/layout.h"

using namespace xmig::journal;

extern "C" __attribute__((visibility("default"))) void corrupt(JournalHeader* header, int kind) {
  auto* const ring = reinterpret_cast<std::byte*>(header) + kHeaderBytes;
  const uint64_t tail = header->tail.load();
  std::byte* const at = ring + tail % header->ring_bytes;
  std::mt19937_64 random(static_cast<uint64_t>(kind));
  uint64_t claimed = 4096;
  for (uint64_t i = 0; i < claimed; i += 8) {
    const uint64_t word = random();
    std::memcpy(at + i, &word, 8);
  }
  RecordHeader record{};
  record.sequence = header->next_sequence.load();
  switch (kind) {
    case 0: break;  // nothing but noise
    case 1:         // a record that says it is longer than the ring
      record.size = ~0u & ~7u;
      record.op = 1;
      std::memcpy(at, &record, sizeof(record));
      break;
    case 2:  // of no size: a reader that trusts it never ends
      std::memcpy(at, &record, sizeof(record));
      break;
    case 3:  // an operation that there is not
      record.size = 128;
      record.op = 0x7fff;
      std::memcpy(at, &record, sizeof(record));
      break;
    case 4:  // more payload than record
      record.size = 128;
      record.op = 5;
      record.payload = 1 << 30;
      std::memcpy(at, &record, sizeof(record));
      break;
    default: claimed = header->ring_bytes * 3; break;  // a tail that has run away
  }
  header->tail.store(tail + claimed);
  // The next call of this program would write over it: until the server has seen it, there is none.
  header->doorbell.fetch_add(1);
  futex_wake(header->doorbell);
  for (int i = 0; i < 30'000 && header->state.load() != static_cast<uint32_t>(ServerState::kLost); ++i) ::usleep(1000);
}
