#include "client/graph/graph_play.h"

#include <cstring>
#include <span>
#include <vector>

#include "client/journal/append.h"
#include "local.h"

namespace xmig::client {

bool is_programs(Op op) {
  switch (op) {
    case Op::xmHostFunc:
    case Op::xmCopyFromPinned:
    case Op::xmCopyToPinned:
    case Op::cuStreamWriteValue32_v2:
    case Op::cuStreamWriteValue64_v2:
    case Op::cuStreamWaitValue32_v2:
    case Op::cuStreamWaitValue64_v2: return true;
    default: return false;
  }
}

bool has_program_in_it(const Graph& graph) {
  for (const auto& node : graph.nodes) {
    bool inside = node->event != nullptr;
    node->for_each_inside([&](const Graph& graph) { inside = inside || has_program_in_it(graph); });
    if (inside) return true;
    for (const Operation& operation : node->operations) {
      if (is_programs(operation.op)) return true;
    }
  }
  return false;
}

bool has_collectives(const Graph& graph) {
  bool found = false;
  for (const auto& node : graph.nodes) {
    found = found || node->collectives;
    node->for_each_inside([&](const Graph& inside) { found = found || has_collectives(inside); });
  }
  return found;
}

CUresult play(const Operation& operation, CUstream stream) {
  if (operation.op == Op::xmHostFunc) {
    const auto args = operation.as<Args_xmHostFunc>();
    return client::cuLaunchHostFunc(stream, reinterpret_cast<CUhostFn>(args.function),
                                    reinterpret_cast<void*>(args.user_data));
  }
  std::vector<std::byte> arguments = operation.arguments;
  const auto number = reinterpret_cast<uint64_t>(stream);
  std::memcpy(arguments.data() + kOpInfo[static_cast<uint16_t>(operation.op)].stream_at, &number, sizeof(number));
  const Slice payload{operation.payload.data(), operation.payload.size()};
  return append(operation.op, arguments.data(), arguments.size(), std::span(&payload, 1));
}

CUresult play(const Node& node, CUstream stream) {
  CUresult result = CUDA_SUCCESS;
  if (node.type == CU_GRAPH_NODE_TYPE_WAIT_EVENT) result = client::cuStreamWaitEvent(stream, node.event, 0);
  if (node.type == CU_GRAPH_NODE_TYPE_EVENT_RECORD) result = client::cuEventRecordWithFlags(node.event, stream, 0);
  if (node.child) result = play(*node.child, stream);
  for (size_t i = 0; i < node.operations.size() && node.enabled && result == CUDA_SUCCESS; ++i) {
    result = play(node.operations[i], stream);
  }
  return result;
}

CUresult play(const Graph& graph, CUstream stream) {
  for (const Node* const node : graph.in_order()) {
    if (const CUresult result = play(*node, stream); result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

}  // namespace xmig::client
