// Operations: checked as NCCL checks them, then begun, or put into the thread's group.
#include <cstring>

#include "client/collectives/communicators.h"
#include "client/collectives/group.h"
#include "client/journal/streams.h"
#include "nccl_client.h"

namespace xmig::client {
namespace {

using journal::CollectiveKind;
using journal::CollectiveOperation;
using journal::DataType;
using journal::Reduction;

struct Call {
  const char* name;
  CollectiveKind kind;
  const void* send;
  void* receive;
  size_t count;
  ncclDataType_t type;
  ncclComm_t comm;
  CUstream stream;
  int op = ncclSum;
  int peer = 0;  // root, or the other rank
};

ncclResult_t reduction_of(const Call& call, Communicator& communicator, CollectiveOperation& out) {
  if (call.op < 0) return failed(ncclInvalidArgument, "%s: operator %d", call.name, call.op);
  if (call.op < ncclNumOps) {
    out.reduction = static_cast<uint32_t>(call.op);
    return ncclSuccess;
  }
  const std::lock_guard lock(communicator.mutex);
  const auto index = static_cast<size_t>(call.op - ncclNumOps);
  if (index >= communicator.operators.size() || !communicator.operators[index]) {
    return failed(ncclInvalidArgument, "%s: there is no operator %d", call.name, call.op);
  }
  const ScaledSum& made = *communicator.operators[index];
  if (made.type != static_cast<uint32_t>(call.type)) {
    return failed(ncclInvalidArgument, "%s: the operator is of type %u, the operation of type %d", call.name, made.type, call.type);
  }
  out.reduction = static_cast<uint32_t>(made.by_device ? Reduction::kScaledSumByDevice : Reduction::kScaledSum);
  out.scalar = made.scalar;
  return ncclSuccess;
}

ncclResult_t run(const Call& call) {
  Communicator* const communicator = find_communicator(call.comm);
  if (!communicator) return failed(ncclInvalidArgument, "%s: there is no such communicator", call.name);
  if (call.type < 0 || call.type >= static_cast<int>(DataType::kCount)) {
    return failed(ncclInvalidArgument, "%s: type %d", call.name, call.type);
  }
  if (call.peer < 0 || call.peer >= static_cast<int>(communicator->ranks)) {
    return failed(ncclInvalidArgument, "%s: rank %d of %u", call.name, call.peer, communicator->ranks);
  }
  CollectiveOperation operation{};
  operation.communicator = number(call.comm);
  operation.stream = number(call.stream);
  operation.count = call.count;
  operation.kind = static_cast<uint32_t>(call.kind);
  operation.type = static_cast<uint32_t>(call.type);
  operation.peer = static_cast<uint32_t>(call.peer);
  if (const ncclResult_t result = reduction_of(call, *communicator, operation); result != ncclSuccess) return result;
  if (!valid_stream(call.stream)) return failed(ncclInvalidArgument, "%s: there is no such stream", call.name);
  if (const Stream* const stream = find_stream(call.stream)) {
    if (stream->context->ordinal != communicator->context->ordinal) {
      return failed(ncclInvalidArgument, "%s: the stream is of another device than the communicator", call.name);
    }
  }
  if (call.count == 0) return ncclSuccess;
  journal::Extent extent{};
  if (!journal::extent_of(operation, communicator->rank, communicator->ranks, extent)) {
    return failed(ncclInvalidArgument, "%s: %zu elements", call.name, call.count);
  }
  operation.send = extent.sent ? reinterpret_cast<uint64_t>(call.send) : 0;
  operation.receive = extent.received ? reinterpret_cast<uint64_t>(call.receive) : 0;
  if ((extent.sent && !operation.send) || (extent.received && !operation.receive)) {
    return failed(ncclInvalidArgument, "%s: a buffer is a null pointer", call.name);
  }
  uint64_t capture = 0;
  if (const CUresult result = capture_of(*communicator, call.stream, capture); result != CUDA_SUCCESS) {
    return failed(as_nccl(result), "%s: CUDA error %d, a stream that this one waits for is being captured", call.name, result);
  }
  return begin(operation, capture);
}

}  // namespace

ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                           CUstream stream) {
  return run({"ncclAllReduce", CollectiveKind::kAllReduce, send, receive, count, type, comm, stream, op});
}

ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           CUstream stream) {
  return run({"ncclBroadcast", CollectiveKind::kBroadcast, send, receive, count, type, comm, stream, ncclSum, root});
}

ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm, CUstream stream) {
  return client::ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

ncclResult_t ncclReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, CUstream stream) {
  return run({"ncclReduce", CollectiveKind::kReduce, send, receive, count, type, comm, stream, op, root});
}

ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t type, ncclComm_t comm, CUstream stream) {
  return run({"ncclAllGather", CollectiveKind::kAllGather, send, receive, count, type, comm, stream});
}

ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                               CUstream stream) {
  return run({"ncclReduceScatter", CollectiveKind::kReduceScatter, send, receive, count, type, comm, stream, op});
}

ncclResult_t ncclAlltoAll(const void* send, void* receive, size_t count, ncclDataType_t type, ncclComm_t comm, CUstream stream) {
  return run({"ncclAlltoAll", CollectiveKind::kAllToAll, send, receive, count, type, comm, stream});
}

ncclResult_t ncclGather(const void* send, void* receive, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                        CUstream stream) {
  return run({"ncclGather", CollectiveKind::kGather, send, receive, count, type, comm, stream, ncclSum, root});
}

ncclResult_t ncclScatter(const void* send, void* receive, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                         CUstream stream) {
  return run({"ncclScatter", CollectiveKind::kScatter, send, receive, count, type, comm, stream, ncclSum, root});
}

ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, CUstream stream) {
  return run({"ncclSend", CollectiveKind::kSend, send, nullptr, count, type, comm, stream, ncclSum, peer});
}

ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, CUstream stream) {
  return run({"ncclRecv", CollectiveKind::kReceive, nullptr, receive, count, type, comm, stream, ncclSum, peer});
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type, ncclScalarResidence_t residence,
                                      ncclComm_t comm) {
  Communicator* const communicator = find_communicator(comm);
  if (!communicator || !op || !scalar || type < 0 || type >= static_cast<int>(DataType::kCount)) {
    return failed(ncclInvalidArgument, "ncclRedOpCreatePreMulSum: an argument is missing, or of no type");
  }
  ScaledSum made{static_cast<uint32_t>(type), residence == ncclScalarDevice, 0};
  if (made.by_device) {
    made.scalar = reinterpret_cast<uint64_t>(scalar);
  } else {
    std::memcpy(&made.scalar, scalar, journal::size_of(static_cast<DataType>(type)));
  }
  const std::lock_guard lock(communicator->mutex);
  auto& all = communicator->operators;
  size_t index = 0;
  while (index < all.size() && all[index]) ++index;
  if (index == all.size()) all.emplace_back();
  all[index] = made;
  *op = static_cast<ncclRedOp_t>(ncclNumOps + index);
  return ncclSuccess;
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  Communicator* const communicator = find_communicator(comm);
  if (!communicator) return failed(ncclInvalidArgument, "ncclRedOpDestroy: there is no such communicator");
  const std::lock_guard lock(communicator->mutex);
  const auto index = static_cast<size_t>(op - ncclNumOps);
  if (op < ncclNumOps || index >= communicator->operators.size() || !communicator->operators[index]) {
    return failed(ncclInvalidArgument, "ncclRedOpDestroy: there is no operator %d", op);
  }
  communicator->operators[index].reset();
  return ncclSuccess;
}

}  // namespace xmig::client
