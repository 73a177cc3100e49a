// What is known of each kind of record without knowing what it does. Kinds are a vendor's: its table is generated (ops.h).
#pragma once

#include <cstddef>
#include <cstdint>

namespace xmig {

enum class Op : uint16_t;  // a kind; 0: none

enum class CallClass : uint8_t { kQueued, kSynchronous };

// What its work is, for who adds up where time goes.
enum class WorkClass : uint8_t { kLaunch, kCopy, kCode, kOrder, kOther, kCount };

struct OpInfo {
  const char* name;
  CallClass call;
  bool is_volatile;  // reply not compared at a replay
  uint32_t args_bytes;
  uint32_t reply_bytes;
  int32_t stream_at;  // where in the arguments the stream is that orders it; -1: there is none
  WorkClass work;
  bool keeps_bytes;  // its bytes may be in the copy log, where RecordHeader::reply_hash says
};

inline constexpr size_t kMostArgumentBytes = 320;  // of any kind

namespace server {

// Of the vendor whose records this server executes, by Op.
extern const OpInfo* const kRecordInfos;
extern const uint32_t kRecordKinds;
extern const Op kNamesNumbers;  // its arguments are NamedNumbers (numbers.h)

}  // namespace server
}  // namespace xmig
