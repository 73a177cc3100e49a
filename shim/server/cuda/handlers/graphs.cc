#include "server/cuda/handlers/graphs.h"

#include <cstring>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "journal/graph_image.h"
#include "server/cuda/handlers/handlers.h"
#include "server/records/reader.h"

namespace xmig::server {

namespace {

// Which records can be a node's work.
bool can_be_in_graph(Op op) {
  switch (op) {
    case Op::xmLaunch:
    case Op::xmCopy2D:
    case Op::cuMemcpyDtoDAsync_v2:
    case Op::cuMemsetD8Async:
    case Op::cuMemsetD16Async:
    case Op::cuMemsetD32Async:
    case Op::cuMemsetD2D8Async:
    case Op::cuMemsetD2D16Async:
    case Op::cuMemsetD2D32Async: return true;
    default: return false;
  }
}

}  // namespace

Graphs::Graphs(const Session& session, Streams& streams, Addresses& addresses, Handlers& handlers)
    : driver_(session.device.driver()),
      contexts_(session.services.contexts),
      log_(session.services.log),
      images_(session.memory.images),
      objects_(session.objects),
      current_(session.current),
      schedule_(session.schedule),
      streams_(streams),
      addresses_(addresses),
      handlers_(handlers) {}

void Graphs::destroy_all() {
  objects_.graphs.for_each([&](uint32_t, const GraphExec& graph) { destroy(graph); });
}

// Builds nodes one after another. A chain, where each waits for the one before only, is captured in one go. The body of a
// conditional node is built when its node has been.
class Graphs::Builder {
 public:
  Builder(Graphs& graphs, GraphExec& parts) : family_(graphs), driver_(graphs.driver_), parts_(parts) {}
  ~Builder() {
    close();
    family_.streams_.end_capture();
    family_.contexts_.use(family_.current_.record.header().ordinal);
  }

  CUresult build(std::span<const std::byte> image, CUgraph graph) {
    Reader reader(image);
    journal::GraphImage head;
    if (!reader.get(head) || head.magic != journal::kGraphMagic || head.bytes != image.size()) {
      return CUDA_ERROR_INVALID_IMAGE;
    }
    for (uint32_t i = 0; i < head.conditions; ++i) {
      journal::GraphCondition condition;
      if (!reader.get(condition) || !conditions_.emplace(condition.number, Condition{condition, 0}).second) {
        return CUDA_ERROR_INVALID_IMAGE;
      }
    }
    if (const CUresult error = go_to(parts_.owner.ordinal); error != CUDA_SUCCESS) return error;
    return build_graph(reader, head.nodes, graph);
  }
  // The driver's graph has to stay for as long as what is made of it.
  bool has_conditions() const { return !conditions_.empty(); }

 private:
  struct Condition {
    journal::GraphCondition known;
    CUgraphConditionalHandle real;  // 0: not made yet
  };

  CUresult build_graph(Reader& reader, uint32_t nodes, CUgraph graph) {
    graphs_.push_back(graph);
    graph_ = graph;
    nodes_.clear();
    for (uint32_t i = 0; i < nodes; ++i) {
      if (const CUresult error = add_node(reader); error != CUDA_SUCCESS) return error;
    }
    return close();
  }

  // The driver's handle, 0 if it does not give one. The graph that it belongs to may be a body that is not there yet; then
  // the outermost one stands for it, which has that body.
  CUgraphConditionalHandle handle_of(Condition& condition) {
    const auto& [known, real] = condition;
    if (real) return real;
    const CUgraph owner = known.graph < graphs_.size() ? graphs_[known.graph] : graphs_[0];
    const unsigned int flags = known.assigned ? CU_GRAPH_COND_ASSIGN_DEFAULT : 0;
    const CUresult result = driver_.cuGraphConditionalHandleCreate(
        &condition.real, owner, static_cast<CUcontext>(family_.contexts_.real(parts_.owner.ordinal)), known.value, flags);
    return result == CUDA_SUCCESS ? condition.real : 0;
  }

  CUresult add_choice(Reader& reader, const std::vector<CUgraphNode>& waits, const CUgraphEdgeData* edges) {
    journal::GraphChoice choice;
    if (!reader.get(choice) || choice.bodies == 0 || choice.bodies > reader.rest().size() / sizeof(journal::GraphBody)) {
      return CUDA_ERROR_INVALID_IMAGE;
    }
    const auto condition = conditions_.find(choice.condition);
    if (condition == conditions_.end() || depth_ == kDeepest) return CUDA_ERROR_INVALID_IMAGE;
    if (const CUresult error = close(); error != CUDA_SUCCESS) return error;
    CUgraphNodeParams params{};
    params.type = CU_GRAPH_NODE_TYPE_CONDITIONAL;
    params.conditional.handle = handle_of(condition->second);
    params.conditional.type = static_cast<CUgraphConditionalNodeType>(choice.type);
    params.conditional.size = choice.bodies;
    params.conditional.ctx = static_cast<CUcontext>(family_.contexts_.real(parts_.owner.ordinal));
    if (!params.conditional.handle) return CUDA_ERROR_INVALID_VALUE;
    CUgraphNode made = nullptr;
    const CUresult result = driver_.cuGraphAddNode_v2(&made, graph_, waits.data(), edges, waits.size(), &params);
    if (result != CUDA_SUCCESS) return result;
    nodes_.push_back(made);
    const std::vector<CUgraph> bodies(params.conditional.phGraph_out, params.conditional.phGraph_out + choice.bodies);
    const CUgraph outer = graph_;
    std::vector<CUgraphNode> outer_nodes = std::move(nodes_);
    ++depth_;
    for (const CUgraph body : bodies) {
      journal::GraphBody head;
      if (!reader.get(head)) return CUDA_ERROR_INVALID_IMAGE;
      if (const CUresult error = build_graph(reader, head.nodes, body); error != CUDA_SUCCESS) return error;
    }
    --depth_;
    graph_ = outer;
    nodes_ = std::move(outer_nodes);
    return CUDA_SUCCESS;
  }

  CUresult add_node(Reader& reader) {
    journal::GraphNode node;
    if (!reader.get(node)) return CUDA_ERROR_INVALID_IMAGE;
    std::vector<CUgraphNode> waits;
    std::vector<CUgraphEdgeData> edges;
    bool plain = true;
    uint32_t last = 0;
    for (uint32_t i = 0; i < node.dependencies; ++i) {
      journal::GraphDependency dependency;
      if (!reader.get(dependency) || dependency.node >= nodes_.size()) return CUDA_ERROR_INVALID_IMAGE;
      waits.push_back(nodes_[dependency.node]);
      edges.push_back({dependency.from_port, dependency.to_port, dependency.type, {}});
      plain &= !dependency.from_port && !dependency.to_port && !dependency.type;
      last = dependency.node;
    }
    if (node.operations == journal::kConditionalNode) return add_choice(reader, waits, plain ? nullptr : edges.data());
    if (node.operations == 0) {
      if (const CUresult error = close(); error != CUDA_SUCCESS) return error;
      CUgraphNode made = nullptr;
      const CUresult result = driver_.cuGraphAddEmptyNode(&made, graph_, waits.data(), waits.size());
      nodes_.push_back(made);
      return result;
    }
    const uint32_t ordinal = device_of_next(reader);
    const bool goes_on = open_ && plain && waits.size() == 1 && last + 1 == nodes_.size() && ordinal == family_.streams_.ordinal();
    if (!goes_on) {
      if (const CUresult error = close(); error != CUDA_SUCCESS) return error;
      if (const CUresult error = go_to(ordinal); error != CUDA_SUCCESS) return error;
      const CUresult result =
          driver_.cuStreamBeginCaptureToGraph(stream_, graph_, waits.data(), plain ? nullptr : edges.data(),
                                              waits.size(), CU_STREAM_CAPTURE_MODE_RELAXED);
      if (result != CUDA_SUCCESS) return result;
      open_ = true;
    }
    for (uint32_t i = 0; i < node.operations; ++i) {
      if (const CUresult error = add_operation(reader); error != CUDA_SUCCESS) return error;
    }
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    const CUgraphNode* after = nullptr;
    const CUgraphEdgeData* after_edges = nullptr;
    size_t count = 0;
    const CUresult result =
        driver_.cuStreamGetCaptureInfo_v3(stream_, &status, nullptr, nullptr, &after, &after_edges, &count);
    if (result != CUDA_SUCCESS) return result;
    if (status != CU_STREAM_CAPTURE_STATUS_ACTIVE || count != 1) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    nodes_.push_back(after[0]);
    return CUDA_SUCCESS;
  }

  // A device's work is captured from a stream of that device: its own kernels, and what touches its memory.
  CUresult go_to(uint32_t ordinal) {
    family_.contexts_.use(ordinal);
    if (const CUresult error = family_.streams_.for_graphs(ordinal, &stream_); error != CUDA_SUCCESS) return error;
    family_.streams_.capture(stream_, ordinal);
    return CUDA_SUCCESS;
  }

  uint32_t device_of_next(Reader ahead) const {
    journal::GraphOperation head;
    std::span<const std::byte> arguments;
    const bool there = ahead.get(head) && head.op < static_cast<uint32_t>(Op::kCount) &&
                       ahead.get(arguments, kOpInfo[head.op].args_bytes);
    return there ? family_.home_of_work(static_cast<Op>(head.op), arguments) : family_.streams_.ordinal();
  }

  CUresult add_operation(Reader& reader) {
    journal::GraphOperation head;
    if (!reader.get(head) || head.op >= static_cast<uint32_t>(Op::kCount)) return CUDA_ERROR_INVALID_IMAGE;
    const auto op = static_cast<Op>(head.op);
    std::span<const std::byte> arguments, payload;
    if (!can_be_in_graph(op) || !reader.get(arguments, kOpInfo[head.op].args_bytes) ||
        !reader.get(payload, head.payload)) {
      return CUDA_ERROR_INVALID_IMAGE;
    }
    std::vector<std::byte> translated;
    if (op == Op::xmLaunch && !conditions_.empty()) {
      translated.assign(payload.begin(), payload.end());
      if (const CUresult error = translate_parameters(arguments, translated); error != CUDA_SUCCESS) return error;
      payload = translated;
    }
    Record record;
    record.load_operation(family_.current_.record, op, arguments, payload);
    const bool before = family_.schedule_.set_snapshot_now(false);
    const CUresult result = kHandlers[head.op](family_.handlers_, record);
    parts_.touches_host |= family_.schedule_.set_snapshot_now(before);
    return result;
  }

  // A condition's number in a kernel's parameters becomes the driver's handle.
  CUresult translate_parameters(std::span<const std::byte> arguments, std::vector<std::byte>& payload) {
    Args_xmLaunch args;
    std::memcpy(&args, arguments.data(), sizeof(args));
    size_t at = size_t{args.attributes} * sizeof(CUlaunchAttribute);
    for (uint64_t word; at + sizeof(word) <= payload.size(); at += sizeof(word)) {
      std::memcpy(&word, payload.data() + at, sizeof(word));
      const auto found = conditions_.find(word);
      if (found == conditions_.end()) continue;
      word = handle_of(found->second);
      if (!word) return CUDA_ERROR_INVALID_VALUE;
      std::memcpy(payload.data() + at, &word, sizeof(word));
    }
    return CUDA_SUCCESS;
  }

  CUresult close() {
    if (!std::exchange(open_, false)) return CUDA_SUCCESS;
    CUgraph same = nullptr;
    return driver_.cuStreamEndCapture(stream_, &same);
  }

  Graphs& family_;
  const DriverTable& driver_;
  GraphExec& parts_;
  CUgraph graph_ = nullptr;
  CUstream stream_ = nullptr;
  bool open_ = false;
  std::vector<CUgraphNode> nodes_;  // of this graph
  std::vector<CUgraph> graphs_;     // in the image's order
  std::unordered_map<uint64_t, Condition> conditions_;
  static constexpr uint32_t kDeepest = 64;
  uint32_t depth_ = 0;
};

// The device that does a record's work: its kernel's, or the one whose memory is read or filled.
uint32_t Graphs::home_of_work(Op op, std::span<const std::byte> bytes) {
  const auto as = [&]<typename Args>(Args args) {
    if (bytes.size() >= sizeof(args)) std::memcpy(&args, bytes.data(), sizeof(args));
    return args;
  };
  const auto of_copy = [&](uint64_t from, uint64_t to) {
    return contexts_.is_open(ordinal_of_device_address(from)) ? streams_.home_of(from) : streams_.home_of(to);
  };
  switch (op) {
    case Op::xmLaunch: {
      const auto args = as(Args_xmLaunch{});
      if (!journal::handle_is(args.function, journal::Kind::kFunction)) break;
      const Module* const module = objects_.modules.find(journal::handle_index(args.function) >> kKernelBits);
      if (module) return module->owner.ordinal;
      break;
    }
    case Op::xmCopy2D: {
      const auto args = as(Args_xmCopy2D{});
      return of_copy(args.source, args.destination);
    }
    case Op::cuMemcpyDtoDAsync_v2: {
      const auto args = as(Args_cuMemcpyDtoDAsync_v2{});
      return of_copy(args.srcDevice, args.dstDevice);
    }
    case Op::cuMemsetD8Async: return streams_.home_of(as(Args_cuMemsetD8Async{}).dstDevice);
    case Op::cuMemsetD16Async: return streams_.home_of(as(Args_cuMemsetD16Async{}).dstDevice);
    case Op::cuMemsetD32Async: return streams_.home_of(as(Args_cuMemsetD32Async{}).dstDevice);
    case Op::cuMemsetD2D8Async: return streams_.home_of(as(Args_cuMemsetD2D8Async{}).dstDevice);
    case Op::cuMemsetD2D16Async: return streams_.home_of(as(Args_cuMemsetD2D16Async{}).dstDevice);
    case Op::cuMemsetD2D32Async: return streams_.home_of(as(Args_cuMemsetD2D32Async{}).dstDevice);
    default: break;
  }
  return streams_.ordinal();
}

CUresult Graphs::on_xmGraph(Record& record) {
  Args_xmGraph args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!journal::handle_is(args.exec, journal::Kind::kGraphExec)) return CUDA_ERROR_INVALID_HANDLE;
  const uint32_t index = journal::handle_index(args.exec);
  const std::span<const std::byte> image = images_.bytes(args.image);
  images_.tried(args.image);
  if (image.empty()) return CUDA_ERROR_INVALID_VALUE;
  GraphExec* slot = args.update ? objects_.graphs.find(index) : objects_.graphs.place(index);
  if (!slot) {
    current_.garbage(args.update ? "there is no graph of this number" : "a new graph has a number that is taken, or none");
    return CUDA_ERROR_INVALID_HANDLE;
  }
  const Owner owner{record.header().context, record.header().ordinal};
  GraphExec made{.owner = owner};
  const CUresult result = make(image, args.flags, made, args.update ? slot : nullptr);
  if (result != CUDA_SUCCESS) {
    // Work that the program has taken the ground from since (a module, memory): at this snapshot the graph could not be launched
    // either. It may get new work, or new memory at the same addresses, before it is launched again.
    const bool groundless = current_.mode == Mode::kRestore && (result == CUDA_ERROR_INVALID_HANDLE ||
                                                        result == CUDA_ERROR_INVALID_VALUE);
    if (!groundless) return result;
    log_(Level::kInfo, "a graph that uses memory or kernels which are gone is made when it is launched");
    made = {.owner = owner};
  }
  made.image = args.image;
  made.flags = args.flags;
  args.update = 0;
  std::vector<std::byte> stored = record.stored();
  std::memcpy(stored.data() + sizeof(journal::RecordHeader), &args, sizeof(args));
  made.creation = objects_.records.keep(record.sequence(), std::move(stored));
  *slot = std::move(made);
  return CUDA_SUCCESS;
}

// `made` has its owner. `before`: what it takes the place of, which is gone afterwards if that went well.
CUresult Graphs::make(std::span<const std::byte> image, uint64_t flags, GraphExec& made, GraphExec* before) {
  CUgraph graph = nullptr;
  if (const CUresult result = driver_.cuGraphCreate(&graph, 0); result != CUDA_SUCCESS) return result;
  bool conditional = false;
  CUresult result = CUDA_SUCCESS;
  {
    Builder builder(*this, made);
    result = builder.build(image, graph);
    conditional = builder.has_conditions();
  }
  CUgraphExecUpdateResultInfo info{};
  // With conditions never in place: what is there follows the handles of the graph that it was made of.
  const bool in_place = result == CUDA_SUCCESS && before && before->real && !before->graph && !conditional &&
                        driver_.cuGraphExecUpdate_v2(before->real, graph, &info) == CUDA_SUCCESS;
  if (in_place) {
    made.real = before->real;
  } else if (result == CUDA_SUCCESS) {
    result = driver_.cuGraphInstantiateWithFlags(&made.real, graph, flags);
    if (result == CUDA_SUCCESS && before) destroy(*before);
    if (result == CUDA_SUCCESS && conditional) made.graph = std::exchange(graph, nullptr);
  }
  if (graph) driver_.cuGraphDestroy(graph);
  return result;
}

CUresult Graphs::on_xmGraphLaunch(Record& record) {
  Args_xmGraphLaunch args;
  CUstream stream = nullptr;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  GraphExec* const graph = find(args.exec);
  if (!graph) return CUDA_ERROR_INVALID_HANDLE;
  if (!graph->real) {
    GraphExec made{.owner = graph->owner};
    const CUresult result = make(images_.bytes(graph->image), graph->flags, made, nullptr);
    if (result != CUDA_SUCCESS) return result;
    std::tie(graph->real, graph->graph, graph->touches_host) = std::tuple(made.real, made.graph, made.touches_host);
  }
  if (!streams_.translate(args.stream, &stream)) return CUDA_ERROR_INVALID_HANDLE;
  if (args.upload) return driver_.cuGraphUpload(graph->real, stream);
  if (graph->touches_host) addresses_.uses_pinned();
  return driver_.cuGraphLaunch(graph->real, stream);
}

CUresult Graphs::on_xmGraphDestroy(Record& record) {
  Args_xmGraphDestroy args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  GraphExec* const graph = find(args.exec);
  if (!graph) return CUDA_SUCCESS;  // it went with its context
  const CUresult result = destroy(*graph);
  objects_.graphs.erase(journal::handle_index(args.exec));
  return result;
}

CUresult Graphs::destroy(const GraphExec& graph) {
  const CUresult result = graph.real ? driver_.cuGraphExecDestroy(graph.real) : CUDA_SUCCESS;
  if (graph.graph) driver_.cuGraphDestroy(graph.graph);
  return result;
}

GraphExec* Graphs::find(uint64_t handle) {
  if (!journal::handle_is(handle, journal::Kind::kGraphExec)) return nullptr;
  return objects_.graphs.find(journal::handle_index(handle));
}

}  // namespace xmig::server
