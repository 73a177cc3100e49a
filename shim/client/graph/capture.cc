#include "client/graph/capture.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "client/bootstrap/message.h"
#include "client/bootstrap/process.h"
#include "client/journal/diversion.h"
#include "client/journal/streams.h"
#include "local.h"

namespace xmig::client {

namespace {

class Captures final : public Diversion {
 public:
  std::optional<CUresult> divert(Thread& thread, Op op, const void* args, size_t args_bytes,
                                 std::span<const Slice> payload) override;
  CUresult refuse_waiting(Thread& thread, Op op, const void* args) override;
  CUresult check_unsafe_call() override;
  CUresult check_waiting_for_context(const Context& context) override;
  bool record_event(CUstream stream, CUevent event, unsigned int flags, CapturedPlace& place, CUresult& result) override;
  bool wait_for_event(CUstream stream, CUevent event, unsigned int flags, const CapturedPlace& place, bool recorded,
                      CUresult& result) override;
  CUresult refuse_captured(const CapturedPlace& place) override;
  std::optional<CUresult> allocate(CUstream stream, size_t bytes, int ordinal, CUdeviceptr* address) override;
  std::optional<CUresult> free(CUstream stream, CUdeviceptr address) override;
  void stream_destroyed(CUstream stream) override;
  void thread_ended(const Thread& thread) override;
};
constinit Captures the_captures;

struct Branch {
  std::vector<Dependency> after;         // what the stream's next work waits for
  std::vector<CUgraphNode> shown;        // the same, as a question for it was answered
  std::vector<CUgraphEdgeData> edges;
};

struct Capture {
  uint64_t id = 0;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  const Thread* owner = nullptr;
  uint64_t origin = 0;
  Graph* graph = nullptr;
  std::unique_ptr<Graph> own;  // unless it captures into a graph of the program's
  bool valid = true;
  std::unordered_map<uint64_t, Branch> branches;  // by stream, as key_of() names it
};

// Under graphs_mutex(), as is everything here.
std::unordered_map<uint64_t, std::unique_ptr<Capture>>& captures() {
  static auto& all = *new std::unordered_map<uint64_t, std::unique_ptr<Capture>>;
  return all;
}
uint64_t next_capture = 1;

Capture* find_capture(uint64_t id) {
  const auto found = captures().find(id);
  return found == captures().end() ? nullptr : found->second.get();
}

// The threads' default streams that take part in a capture. They have no handles of their own.
std::map<std::pair<const Thread*, const Context*>, Stream>& default_streams() {
  static auto& all = *new std::map<std::pair<const Thread*, const Context*>, Stream>;
  return all;
}

// As find_stream, but it knows those, too.
Stream* captured_stream(CUstream stream) {
  if (stream != CU_STREAM_PER_THREAD) return find_stream(stream);
  const Thread& thread = this_thread();
  const auto found = default_streams().find({&thread, thread.context});
  return found == default_streams().end() ? nullptr : &found->second;
}

// The same for one that is about to take part.
Stream* joining_stream(CUstream stream) {
  if (stream != CU_STREAM_PER_THREAD) return find_stream(stream);
  Thread& thread = this_thread();
  Stream& own = default_streams()[{&thread, thread.context}];
  own.context = thread.context;
  return &own;
}

// What a stream is called in a capture: its handle, or where a thread's default stream is kept. These never meet.
uint64_t key_of(CUstream stream) {
  if (stream != CU_STREAM_PER_THREAD) return number(stream);
  return reinterpret_cast<uint64_t>(captured_stream(stream));
}

Stream* stream_of(uint64_t key) {
  if (Stream* const stream = find_stream(reinterpret_cast<CUstream>(key))) return stream;
  for (auto& [whose, stream] : default_streams()) {
    if (reinterpret_cast<uint64_t>(&stream) == key) return &stream;
  }
  return nullptr;
}

Capture* capture_of(CUstream stream) {
  const Stream* const known = captured_stream(stream);
  return known ? find_capture(known->capture.load(std::memory_order_relaxed)) : nullptr;
}

// The legacy stream waits for every blocking stream, and so cannot be used while one of them is captured.
CUresult check_legacy(const Thread& thread) {
  bool broken = false;
  for (const auto& [id, capture] : captures()) {
    for (const auto& [key, branch] : capture->branches) {
      const Stream* const stream = stream_of(key);
      if (!stream || stream->context != thread.context || (stream->flags & CU_STREAM_NON_BLOCKING)) continue;
      capture->valid = false;
      broken = true;
    }
  }
  return broken ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_SUCCESS;
}

void add_once(std::vector<Dependency>& to, const std::vector<Dependency>& more) {
  for (const Dependency& one : more) {
    const bool there = std::any_of(to.begin(), to.end(), [&](const Dependency& d) { return d.on == one.on; });
    if (!there) to.push_back(one);
  }
}

// What keeps the thread from working in a stream that takes part in no capture.
CUresult check_outside(const Thread& thread, CUstream stream) {
  return number(stream) > reinterpret_cast<uint64_t>(CU_STREAM_LEGACY) ? CUDA_SUCCESS : check_legacy(thread);
}

Node& continue_branch(Capture& capture, CUstream stream, CUgraphNodeType type) {
  Branch& branch = capture.branches[key_of(stream)];
  Node& node = capture.graph->add(type, std::move(branch.after));
  branch.after = {{&node, {}}};
  return node;
}

std::optional<CUgraphNodeType> type_of(Op op) {
  switch (op) {
    case Op::xmLaunch: return CU_GRAPH_NODE_TYPE_KERNEL;
    case Op::xmHostFunc: return CU_GRAPH_NODE_TYPE_HOST;
    case Op::xmCopyFromPinned:
    case Op::xmCopyToPinned:
    case Op::xmCopy2D:
    case Op::cuMemcpyDtoDAsync_v2: return CU_GRAPH_NODE_TYPE_MEMCPY;
    case Op::cuMemsetD8Async:
    case Op::cuMemsetD16Async:
    case Op::cuMemsetD32Async:
    case Op::cuMemsetD2D8Async:
    case Op::cuMemsetD2D16Async:
    case Op::cuMemsetD2D32Async: return CU_GRAPH_NODE_TYPE_MEMSET;
    case Op::cuStreamWriteValue32_v2:
    case Op::cuStreamWriteValue64_v2:
    case Op::cuStreamWaitValue32_v2:
    case Op::cuStreamWaitValue64_v2: return CU_GRAPH_NODE_TYPE_BATCH_MEM_OP;
    default: return std::nullopt;
  }
}

bool in_stream_order(Op op) { return kOpInfo[static_cast<uint16_t>(op)].stream_at >= 0; }

CUstream stream_in(Op op, const void* args) {
  uint64_t stream;
  std::memcpy(&stream, static_cast<const std::byte*>(args) + kOpInfo[static_cast<uint16_t>(op)].stream_at,
              sizeof(stream));
  return reinterpret_cast<CUstream>(stream);
}

Operation make_operation(Op op, const void* args, size_t args_bytes, std::span<const Slice> payload) {
  Operation operation{op, {}, {}};
  const auto* const from = static_cast<const std::byte*>(args);
  operation.arguments.assign(from, from + args_bytes);
  for (const Slice& slice : payload) {
    const auto* const bytes = static_cast<const std::byte*>(slice.data);
    operation.payload.insert(operation.payload.end(), bytes, bytes + slice.bytes);
  }
  return operation;
}

CUresult pageable(const char* where) {
  say("%s cannot hold a copy of pageable host memory under xMIG: use page-locked memory", where);
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

// Everything the nodes depend on, and they themselves.
std::unordered_set<const Node*> before(const std::vector<Dependency>& nodes) {
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> open;
  for (const Dependency& d : nodes) open.push_back(d.on);
  while (!open.empty()) {
    const Node* const node = open.back();
    open.pop_back();
    if (!seen.insert(node).second) continue;
    for (const Dependency& d : node->dependencies) open.push_back(d.on);
  }
  return seen;
}

void finish(Capture& capture) {
  for (const auto& [key, branch] : capture.branches) {
    if (Stream* const stream = stream_of(key)) stream->capture.store(0);
  }
  std::erase_if(default_streams(), [](const auto& entry) { return entry.second.capture.load() == 0; });
  end_diversion();
  captures().erase(capture.id);
}

CUresult begin(CUstream hStream, Graph* into, std::vector<Dependency> after, CUstreamCaptureMode mode) {
  if (mode < CU_STREAM_CAPTURE_MODE_GLOBAL || mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  const bool own = hStream == CU_STREAM_PER_THREAD;
  if (special(hStream) && !own) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (own && !this_thread().context) return CUDA_ERROR_INVALID_CONTEXT;
  Stream* const stream = joining_stream(hStream);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->capture.load()) return CUDA_ERROR_ILLEGAL_STATE;
  auto capture = std::make_unique<Capture>();
  capture->id = next_capture++;
  capture->mode = mode;
  capture->owner = &this_thread();
  capture->origin = key_of(hStream);
  if (!into) capture->own = std::make_unique<Graph>(true);
  capture->graph = into ? into : capture->own.get();
  capture->branches[key_of(hStream)].after = std::move(after);
  stream->capture.store(capture->id);
  begin_diversion(the_captures);
  captures().emplace(capture->id, std::move(capture));
  return CUDA_SUCCESS;
}

}  // namespace

// --- what goes where --------------------------------------------------------------------------------------------

Collect::Collect(std::vector<Operation>& into) : thread_(this_thread()) {
  thread_.collecting = &into;
  begin_diversion(the_captures);
}

Collect::~Collect() {
  thread_.collecting = nullptr;
  end_diversion();
}

std::optional<CUresult> Captures::divert(Thread& thread, Op op, const void* args, size_t args_bytes,
                                         std::span<const Slice> payload) {
  if (!in_stream_order(op)) return std::nullopt;
  if (thread.collecting) {
    if (op == Op::xmCopyFromHost) return pageable("a graph");
    thread.collecting->push_back(make_operation(op, args, args_bytes, payload));
    return CUDA_SUCCESS;
  }
  const CUstream stream = stream_in(op, args);
  const std::lock_guard lock(graphs_mutex());
  Capture* const capture = capture_of(stream);
  if (!capture) {
    const CUresult error = check_outside(thread, stream);
    return error == CUDA_SUCCESS ? std::nullopt : std::optional(error);
  }
  if (!capture->valid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  const std::optional<CUgraphNodeType> type = type_of(op);
  if (!type) {
    capture->valid = false;
    return op == Op::xmCopyFromHost ? pageable("a stream that is being captured") : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  continue_branch(*capture, stream, *type).operations.push_back(make_operation(op, args, args_bytes, payload));
  return CUDA_SUCCESS;
}

CUresult Captures::refuse_waiting(Thread& thread, Op op, const void* args) {
  if (!in_stream_order(op)) return CUDA_SUCCESS;
  if (thread.collecting) return pageable("a graph");
  const std::lock_guard lock(graphs_mutex());
  const CUstream stream = stream_in(op, args);
  Capture* const capture = capture_of(stream);
  if (!capture) return check_outside(thread, stream);
  capture->valid = false;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult Captures::check_unsafe_call() {
  const Thread& thread = this_thread();
  if (thread.capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
  const std::lock_guard lock(graphs_mutex());
  bool broken = false;
  for (const auto& [id, capture] : captures()) {
    const bool mine = capture->owner == &thread && capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    const bool anybodys = thread.capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
                          capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    if (!mine && !anybodys) continue;
    capture->valid = false;
    broken = true;
  }
  return broken ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

CUresult Captures::check_waiting_for_context(const Context& context) {
  const std::lock_guard lock(graphs_mutex());
  bool broken = false;
  for (const auto& [id, capture] : captures()) {
    const Stream* const origin = stream_of(capture->origin);
    if (!origin || origin->context != &context) continue;
    capture->valid = false;
    broken = true;
  }
  return broken ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

// --- events -----------------------------------------------------------------------------------------------------

bool Captures::record_event(CUstream stream, CUevent event, unsigned int flags, CapturedPlace& place, CUresult& result) {
  const std::lock_guard lock(graphs_mutex());
  Capture* const capture = capture_of(stream);
  result = CUDA_SUCCESS;
  if (!capture) {
    result = check_outside(this_thread(), stream);
    return result != CUDA_SUCCESS;
  }
  if (!capture->valid) {
    result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  } else if (flags & CU_EVENT_RECORD_EXTERNAL) {
    continue_branch(*capture, stream, CU_GRAPH_NODE_TYPE_EVENT_RECORD).event = event;
  } else {
    place = {capture->id, capture->branches[key_of(stream)].after};
  }
  return true;
}

bool Captures::wait_for_event(CUstream hStream, CUevent event, unsigned int flags, const CapturedPlace& place,
                              bool recorded, CUresult& result) {
  const std::lock_guard lock(graphs_mutex());
  Capture* const theirs = find_capture(place.capture);
  Capture* const mine = capture_of(hStream);
  result = CUDA_SUCCESS;
  if (!theirs && !mine) {
    if (place.capture) result = CUDA_ERROR_CAPTURED_EVENT;  // of a capture that is over
    return place.capture != 0;
  }
  if (mine && !mine->valid) {
    result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  } else if (mine && (flags & CU_EVENT_WAIT_EXTERNAL)) {
    continue_branch(*mine, hStream, CU_GRAPH_NODE_TYPE_WAIT_EVENT).event = event;
  } else if (!theirs) {
    // Work from outside cannot be waited for inside.
    if (recorded || place.capture) {
      mine->valid = false;
      result = CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
  } else if (!theirs->valid) {
    result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  } else if (mine && mine != theirs) {
    mine->valid = theirs->valid = false;
    result = CUDA_ERROR_STREAM_CAPTURE_MERGE;
  } else if (mine) {
    add_once(mine->branches[key_of(hStream)].after, place.after);
  } else if (Stream* const stream = joining_stream(hStream)) {
    stream->capture.store(theirs->id);
    theirs->branches[key_of(hStream)].after = place.after;
  } else {
    theirs->valid = false;
    result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  }
  return true;
}

CUresult Captures::refuse_captured(const CapturedPlace& place) {
  const std::lock_guard lock(graphs_mutex());
  if (Capture* const capture = find_capture(place.capture)) capture->valid = false;
  return CUDA_ERROR_CAPTURED_EVENT;
}

// --- memory -----------------------------------------------------------------------------------------------------

std::optional<CUresult> Captures::allocate(CUstream stream, size_t bytes, int ordinal, CUdeviceptr* address) {
  const std::lock_guard lock(graphs_mutex());
  Capture* const capture = capture_of(stream);
  if (!capture) return std::nullopt;
  if (!capture->valid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  CUresult error = CUDA_SUCCESS;
  auto memory = allocate_graph_memory(bytes, ordinal, error);
  if (!memory) return error;
  Node& node = continue_branch(*capture, stream, CU_GRAPH_NODE_TYPE_MEM_ALLOC);
  node.allocation.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  node.allocation.poolProps.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = ordinal};
  node.allocation.bytesize = bytes;
  *address = node.allocation.dptr = memory->address;
  capture->graph->memory.push_back(std::move(memory));
  return CUDA_SUCCESS;
}

std::optional<CUresult> Captures::free(CUstream stream, CUdeviceptr address) {
  const std::lock_guard lock(graphs_mutex());
  Capture* const capture = capture_of(stream);
  if (!capture) return std::nullopt;
  if (!capture->valid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (!is_graph_memory(address)) return CUDA_ERROR_INVALID_VALUE;
  continue_branch(*capture, stream, CU_GRAPH_NODE_TYPE_MEM_FREE).allocation.dptr = address;
  return CUDA_SUCCESS;
}

std::optional<CUresult> refuse_graph_launch(CUstream stream) {
  const std::lock_guard lock(graphs_mutex());
  Capture* const capture = capture_of(stream);
  if (!capture) return std::nullopt;
  if (!capture->valid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  capture->valid = false;
  say("a graph cannot be launched in a stream that is being captured, as natively: use a child node");
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult find_capture(CUstream stream, uint64_t& capture) {
  capture = 0;
  if (!diverting()) return CUDA_SUCCESS;
  const std::lock_guard lock(graphs_mutex());
  const Capture* const found = capture_of(stream);
  if (!found) return check_outside(this_thread(), stream);
  capture = found->id;
  return CUDA_SUCCESS;
}

CUresult capture_collectives(uint64_t id, std::span<const CUstream> streams, std::shared_ptr<const Collectives> collectives) {
  const std::lock_guard lock(graphs_mutex());
  Capture* const capture = find_capture(id);
  if (!capture || !capture->valid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  std::vector<Dependency> after;
  for (const CUstream stream : streams) add_once(after, capture->branches[key_of(stream)].after);
  Node& node = capture->graph->add(CU_GRAPH_NODE_TYPE_EMPTY, std::move(after));
  node.collectives = std::move(collectives);
  for (const CUstream stream : streams) capture->branches[key_of(stream)].after = {{&node, {}}};
  return CUDA_SUCCESS;
}

void Captures::stream_destroyed(CUstream stream) {
  const std::lock_guard lock(graphs_mutex());
  Capture* const capture = capture_of(stream);
  if (!capture) return;
  capture->valid = false;
  if (capture->origin == number(stream)) finish(*capture);
}

void Captures::thread_ended(const Thread& thread) {
  const std::lock_guard lock(graphs_mutex());
  for (auto it = default_streams().begin(); it != default_streams().end();) {
    auto& [whose, stream] = *it;
    if (whose.first != &thread) {
      ++it;
      continue;
    }
    Capture* const capture = find_capture(stream.capture.exchange(0));
    const auto key = reinterpret_cast<uint64_t>(&stream);
    if (capture) {
      capture->valid = false;
      if (capture->origin == key) {
        finish(*capture);  // takes this stream, and others, out of the map
        it = default_streams().begin();
        continue;
      }
      capture->branches.erase(key);
    }
    it = default_streams().erase(it);
  }
}

// --- the driver's functions -------------------------------------------------------------------------------------

CUresult cuStreamBeginCapture_v2(CUstream hStream, CUstreamCaptureMode mode) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  const std::lock_guard lock(graphs_mutex());
  return begin(hStream, nullptr, {}, mode);
}

CUresult cuStreamBeginCapture(CUstream hStream) {
  return client::cuStreamBeginCapture_v2(hStream, CU_STREAM_CAPTURE_MODE_GLOBAL);
}

CUresult cuStreamBeginCaptureToGraph(CUstream hStream, CUgraph hGraph, const CUgraphNode* dependencies,
                                     const CUgraphEdgeData* dependencyData, size_t numDependencies,
                                     CUstreamCaptureMode mode) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  const std::lock_guard lock(graphs_mutex());
  Graph* const graph = find_graph(hGraph);
  if (!graph || (numDependencies && !dependencies)) return CUDA_ERROR_INVALID_VALUE;
  std::vector<Dependency> after;
  for (size_t i = 0; i < numDependencies; ++i) {
    Node* const node = find_node(dependencies[i]);
    if (!node || node->graph != graph) return CUDA_ERROR_INVALID_VALUE;
    after.push_back({node, dependencyData ? dependencyData[i] : CUgraphEdgeData{}});
  }
  return begin(hStream, graph, std::move(after), mode);
}

CUresult cuStreamEndCapture(CUstream hStream, CUgraph* phGraph) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  if (!phGraph) return CUDA_ERROR_INVALID_VALUE;
  *phGraph = nullptr;
  const std::lock_guard lock(graphs_mutex());
  if (!valid_stream(hStream)) return CUDA_ERROR_INVALID_HANDLE;
  Capture* const capture = capture_of(hStream);
  if (!capture) return CUDA_ERROR_ILLEGAL_STATE;
  if (capture->origin != key_of(hStream)) {
    capture->valid = false;
    return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
  }
  if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->owner != &this_thread()) {
    return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
  }
  CUresult result = capture->valid ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (result == CUDA_SUCCESS && capture->branches.size() > 1) {
    const auto joined = before(capture->branches[key_of(hStream)].after);
    for (const auto& [stream, branch] : capture->branches) {
      for (const Dependency& d : branch.after) {
        if (!joined.contains(d.on)) result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
      }
    }
  }
  if (result == CUDA_SUCCESS) {
    *phGraph = capture->own ? publish(std::move(capture->own))
                            : reinterpret_cast<CUgraph>(capture->graph->handle);
  }
  finish(*capture);
  return result;
}

CUresult cuStreamIsCapturing(CUstream hStream, CUstreamCaptureStatus* captureStatus) {
  return client::cuStreamGetCaptureInfo_v3(hStream, captureStatus, nullptr, nullptr, nullptr, nullptr, nullptr);
}

CUresult cuStreamGetCaptureInfo(CUstream hStream, CUstreamCaptureStatus* captureStatus_out, cuuint64_t* id_out) {
  return client::cuStreamGetCaptureInfo_v3(hStream, captureStatus_out, id_out, nullptr, nullptr, nullptr, nullptr);
}

CUresult cuStreamGetCaptureInfo_v2(CUstream hStream, CUstreamCaptureStatus* captureStatus_out, cuuint64_t* id_out,
                                   CUgraph* graph_out, const CUgraphNode** dependencies_out,
                                   size_t* numDependencies_out) {
  return client::cuStreamGetCaptureInfo_v3(hStream, captureStatus_out, id_out, graph_out, dependencies_out, nullptr,
                                           numDependencies_out);
}

CUresult cuStreamGetCaptureInfo_v3(CUstream hStream, CUstreamCaptureStatus* captureStatus_out, cuuint64_t* id_out,
                                   CUgraph* graph_out, const CUgraphNode** dependencies_out,
                                   const CUgraphEdgeData** edgeData_out, size_t* numDependencies_out) {
  if (const CUresult error = initialized(); error != CUDA_SUCCESS) return error;
  if (!captureStatus_out) return CUDA_ERROR_INVALID_VALUE;
  if (!valid_stream(hStream)) return CUDA_ERROR_INVALID_HANDLE;
  *captureStatus_out = CU_STREAM_CAPTURE_STATUS_NONE;
  if (id_out) *id_out = 0;
  if (graph_out) *graph_out = nullptr;
  if (dependencies_out) *dependencies_out = nullptr;
  if (edgeData_out) *edgeData_out = nullptr;
  if (numDependencies_out) *numDependencies_out = 0;
  if (!diverting()) return CUDA_SUCCESS;
  const std::lock_guard lock(graphs_mutex());
  Capture* const capture = capture_of(hStream);
  if (!capture) return check_outside(this_thread(), hStream);
  *captureStatus_out = capture->valid ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_INVALIDATED;
  if (!capture->valid) return CUDA_SUCCESS;
  Branch& branch = capture->branches[key_of(hStream)];
  branch.shown.clear();
  branch.edges.clear();
  for (const Dependency& d : branch.after) {
    branch.shown.push_back(reinterpret_cast<CUgraphNode>(d.on->handle));
    branch.edges.push_back(d.edge);
  }
  if (id_out) *id_out = capture->id;
  if (graph_out) *graph_out = reinterpret_cast<CUgraph>(capture->graph->handle);
  if (dependencies_out) *dependencies_out = branch.shown.data();
  if (edgeData_out) *edgeData_out = branch.edges.data();
  if (numDependencies_out) *numDependencies_out = branch.shown.size();
  return CUDA_SUCCESS;
}

CUresult cuStreamUpdateCaptureDependencies_v2(CUstream hStream, CUgraphNode* dependencies,
                                              const CUgraphEdgeData* dependencyData, size_t numDependencies,
                                              unsigned int flags) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  const std::lock_guard lock(graphs_mutex());
  if (!valid_stream(hStream)) return CUDA_ERROR_INVALID_HANDLE;
  Capture* const capture = capture_of(hStream);
  if (!capture) return CUDA_ERROR_ILLEGAL_STATE;
  if (!capture->valid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if ((numDependencies && !dependencies) || flags > CU_STREAM_SET_CAPTURE_DEPENDENCIES) return CUDA_ERROR_INVALID_VALUE;
  std::vector<Dependency> after;
  for (size_t i = 0; i < numDependencies; ++i) {
    Node* const node = find_node(dependencies[i]);
    if (!node || node->graph != capture->graph) return CUDA_ERROR_INVALID_VALUE;
    after.push_back({node, dependencyData ? dependencyData[i] : CUgraphEdgeData{}});
  }
  std::vector<Dependency>& now = capture->branches[key_of(hStream)].after;
  if (flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES) now.clear();
  add_once(now, after);
  return CUDA_SUCCESS;
}

CUresult cuStreamUpdateCaptureDependencies(CUstream hStream, CUgraphNode* dependencies, size_t numDependencies,
                                           unsigned int flags) {
  return client::cuStreamUpdateCaptureDependencies_v2(hStream, dependencies, nullptr, numDependencies, flags);
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  if (const CUresult error = initialized(); error != CUDA_SUCCESS) return error;
  if (!mode || *mode < CU_STREAM_CAPTURE_MODE_GLOBAL || *mode > CU_STREAM_CAPTURE_MODE_RELAXED) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *mode = std::exchange(this_thread().capture_mode, *mode);
  return CUDA_SUCCESS;
}

}  // namespace xmig::client
