// What records say of communicators and collectives.
//
// Numbers are NCCL's: a program's arguments go into a record as they are. A reduction that the program has made travels as what it
// is, so that no operator has to be made again at a replay.
#pragma once

#include <cstddef>
#include <cstdint>

namespace xmig::journal {

inline constexpr uint32_t kMaxRanks = 1024;  // of one communicator: what fits a message of the daemon
inline constexpr size_t kGroupIdBytes = 32;

enum class CollectiveKind : uint32_t {
  kAllReduce,
  kBroadcast,
  kReduce,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kGather,
  kScatter,
  kSend,
  kReceive,
  kCount,
};

enum class DataType : uint32_t {
  kInt8,
  kUint8,
  kInt32,
  kUint32,
  kInt64,
  kUint64,
  kFloat16,
  kFloat32,
  kFloat64,
  kBfloat16,
  kFloat8e4m3,
  kFloat8e5m2,
  kCount,
};
constexpr uint32_t size_of(DataType type) {
  constexpr uint32_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  static_assert(sizeof(kSizes) / sizeof(kSizes[0]) == static_cast<size_t>(DataType::kCount));
  return kSizes[static_cast<uint32_t>(type)];
}

enum class Reduction : uint32_t {
  kSum,
  kProduct,
  kMax,
  kMin,
  kAverage,
  kScaledSum,        // each rank's input times `scalar`, which is the bits of a value of the operation's type
  kScaledSumByDevice,  // the same, where `scalar` is the address of that value, read when the operation runs
  kCount,
};

// One operation of an xmCommGroup record, whose payload is an array of them.
struct CollectiveOperation {
  uint64_t communicator;
  uint64_t stream;
  uint64_t send;     // 0 where there is nothing to send
  uint64_t receive;  // likewise
  uint64_t count;    // of elements, as NCCL's function has it
  uint64_t scalar;
  uint32_t kind;       // CollectiveKind
  uint32_t type;       // DataType
  uint32_t reduction;  // Reduction
  uint32_t peer;       // root, or the other rank
};
static_assert(sizeof(CollectiveOperation) == 64);

// How many elements an operation reads and writes on a rank of `ranks`. False: more than there can be.
struct Extent {
  uint64_t sent;
  uint64_t received;
};
constexpr bool extent_of(const CollectiveOperation& operation, uint32_t rank, uint32_t ranks, Extent& out) {
  uint64_t all = 0;
  if (__builtin_mul_overflow(operation.count, uint64_t{ranks}, &all) || all >= 1ull << 58) return false;
  const bool root = operation.peer == rank;
  switch (static_cast<CollectiveKind>(operation.kind)) {
    case CollectiveKind::kAllReduce: out = {operation.count, operation.count}; return true;
    case CollectiveKind::kBroadcast: out = {root ? operation.count : 0, operation.count}; return true;
    case CollectiveKind::kReduce: out = {operation.count, root ? operation.count : 0}; return true;
    case CollectiveKind::kAllGather: out = {operation.count, all}; return true;
    case CollectiveKind::kReduceScatter: out = {all, operation.count}; return true;
    case CollectiveKind::kAllToAll: out = {all, all}; return true;
    case CollectiveKind::kGather: out = {operation.count, root ? all : 0}; return true;
    case CollectiveKind::kScatter: out = {root ? all : 0, operation.count}; return true;
    case CollectiveKind::kSend: out = {operation.count, 0}; return true;
    case CollectiveKind::kReceive: out = {0, operation.count}; return true;
    case CollectiveKind::kCount: break;
  }
  return false;
}

// The reply of records that make a communicator.
struct CommunicatorReply {
  int32_t result;  // ncclResult_t
  uint32_t rank;
  uint32_t ranks;  // 0: this rank is in none (a split without a colour)
  uint32_t reserved;
  char text[496];  // why not
};

// ncclResult_t, as far as records and the journal's header say it.
enum CollectiveResult : uint32_t {
  kCollectiveSuccess = 0,
  kCollectiveCudaError = 1,
  kCollectiveSystemError = 2,
  kCollectiveInvalidUsage = 5,
  kCollectiveRemoteError = 6,
};

}  // namespace xmig::journal
