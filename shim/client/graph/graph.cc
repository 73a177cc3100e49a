#include "client/graph/graph.h"

#include <cstring>
#include <functional>
#include <queue>
#include <unordered_map>
#include <utility>

#include "client/graph/user_object.h"
#include "client/journal/append.h"
#include "journal/graph_image.h"
#include "local.h"

namespace xmig::client {
namespace {

using journal::Kind;

// Never destroyed: programs call the driver in their last moments.
struct Registry {
  std::recursive_mutex mutex;
  std::unordered_map<uint64_t, Graph*> graphs;
  std::unordered_map<uint64_t, std::unique_ptr<Graph>> owned;  // by the program
  std::unordered_map<uint64_t, Node*> nodes;
};
Registry& registry() {
  static auto& all = *new Registry;
  return all;
}

uint64_t number(CUgraph handle) { return reinterpret_cast<uint64_t>(handle); }

}  // namespace

std::recursive_mutex& graphs_mutex() { return registry().mutex; }

// --- graphs -----------------------------------------------------------------------------------------------------

Graph::Graph(bool named) {
  if (!named) return;
  handle = create_handle(Kind::kGraph);
  registry().graphs.emplace(handle, this);
}

Graph::~Graph() {
  for (const auto& node : nodes) {
    if (!node->handle) continue;
    registry().nodes.erase(node->handle);
    free_handle(node->handle);
  }
  for (const auto& [object, count] : user_objects) release(*object, count);
  if (!handle) return;
  registry().graphs.erase(handle);
  free_handle(handle);
}

Node& Graph::add(CUgraphNodeType type, std::vector<Dependency> dependencies) {
  Node& node = *nodes.emplace_back(std::make_unique<Node>());
  node.graph = this;
  node.type = type;
  node.dependencies = std::move(dependencies);
  if (handle) {
    node.handle = create_handle(Kind::kGraphNode);
    registry().nodes.emplace(node.handle, &node);
  }
  return node;
}

void Graph::remove(Node& node) {
  for (const auto& other : nodes) std::erase_if(other->dependencies, [&](const Dependency& d) { return d.on == &node; });
  if (node.handle) {
    registry().nodes.erase(node.handle);
    free_handle(node.handle);
  }
  std::erase_if(nodes, [&](const auto& one) { return one.get() == &node; });
}

Node& Graph::add_like(const Node& node, bool named) {
  Node& twin = add(node.type, {});
  twin.origin = node.handle ? node.handle : node.origin;
  twin.operations = node.operations;
  twin.collectives = node.collectives;
  twin.event = node.event;
  twin.allocation = node.allocation;
  twin.enabled = node.enabled;
  twin.copy = node.copy;
  twin.memory_operations = node.memory_operations;
  if (node.child) twin.child = node.child->clone(named);
  twin.condition = node.condition;
  twin.choice = node.choice;
  for (const auto& body : node.bodies) twin.bodies.push_back(body->clone(named));
  twin.for_each_inside([&](Graph& inside) { inside.within = this; });
  return twin;
}

std::unique_ptr<Graph> Graph::clone(bool named) const {
  auto copy = std::make_unique<Graph>(named);
  std::unordered_map<const Node*, Node*> twins;
  for (const auto& node : nodes) twins.emplace(node.get(), &copy->add_like(*node, named));
  for (const auto& node : nodes) {
    for (const Dependency& d : node->dependencies) twins.at(node.get())->dependencies.push_back({twins.at(d.on), d.edge});
  }
  copy->memory = memory;
  copy->conditions = conditions;
  for (const auto& [object, count] : user_objects) {
    retain(*object, 1);
    copy->user_objects.emplace(object, 1);
  }
  return copy;
}

Node* Graph::find_origin(uint64_t wanted) {
  for (const auto& node : nodes) {
    if (node->origin == wanted) return node.get();
    Node* found = nullptr;
    node->for_each_inside([&](Graph& inside) { found = found ? found : inside.find_origin(wanted); });
    if (found) return found;
  }
  return nullptr;
}

bool Graph::contains(const Graph& graph) const {
  bool found = this == &graph;
  for (const auto& node : nodes) {
    node->for_each_inside([&](const Graph& inside) { found = found || inside.contains(graph); });
  }
  return found;
}

bool Graph::conditional() const {
  bool found = !conditions.empty();
  for (const auto& node : nodes) {
    found = found || !node->bodies.empty();
    node->for_each_inside([&](const Graph& inside) { found = found || inside.conditional(); });
  }
  return found;
}

std::vector<Node*> Graph::in_order() const {
  std::vector<size_t> left;  // by place, as everything here
  std::unordered_map<const Node*, std::vector<size_t>> dependents;
  std::priority_queue<size_t, std::vector<size_t>, std::greater<>> ready;
  for (size_t i = 0; i < nodes.size(); ++i) {
    left.push_back(nodes[i]->dependencies.size());
    for (const Dependency& d : nodes[i]->dependencies) dependents[d.on].push_back(i);
    if (left[i] == 0) ready.push(i);
  }
  std::vector<Node*> order;
  while (!ready.empty()) {
    order.push_back(nodes[ready.top()].get());
    ready.pop();
    const auto waiting = dependents.find(order.back());
    if (waiting == dependents.end()) continue;
    for (const size_t next : waiting->second) {
      if (--left[next] == 0) ready.push(next);
    }
  }
  if (order.size() != nodes.size()) order.clear();
  return order;
}

Graph* find_graph(CUgraph handle) {
  const auto found = registry().graphs.find(number(handle));
  return found == registry().graphs.end() ? nullptr : found->second;
}

Node* find_node(CUgraphNode handle) {
  const auto found = registry().nodes.find(reinterpret_cast<uint64_t>(handle));
  return found == registry().nodes.end() ? nullptr : found->second;
}

CUgraph publish(std::unique_ptr<Graph> graph) {
  const uint64_t handle = graph->handle;
  registry().owned.emplace(handle, std::move(graph));
  return reinterpret_cast<CUgraph>(handle);
}

std::unique_ptr<Graph> unpublish(CUgraph handle) {
  auto found = registry().owned.extract(number(handle));
  return found ? std::move(found.mapped()) : nullptr;
}

// --- the image --------------------------------------------------------------------------------------------------

namespace {

template <typename T>
void put(std::vector<std::byte>& to, const T& value) {
  const auto* const bytes = reinterpret_cast<const std::byte*>(&value);
  to.insert(to.end(), bytes, bytes + sizeof(T));
}

void put(std::vector<std::byte>& to, const std::vector<std::byte>& bytes) {
  to.insert(to.end(), bytes.begin(), bytes.end());
  to.resize(journal::align8(to.size()));
}

// A child graph is spread out: its first nodes wait for what its node waits for, and what waits for that node waits for
// its last ones. The bodies of conditional nodes stay graphs of their own.
class Spreader {
 public:
  explicit Spreader(std::vector<std::byte>& image) : image_(image) {}

  using Waits = std::vector<journal::GraphDependency>;

  // What must be waited for by who waits for all of it; false: a circle.
  bool spread(const Graph& graph, const Waits& entry, Waits& exits) {
    const std::vector<Node*> order = graph.in_order();
    if (order.empty() && !graph.nodes.empty()) return false;
    std::unordered_map<const Node*, std::vector<uint32_t>> ends;
    std::unordered_map<const Node*, bool> waited_for;
    for (const Condition& c : graph.conditions) conditions_.push_back({c.number, c.value, c.assigned, graph_, 0});
    for (const Node* const node : order) {
      Waits waits = node->dependencies.empty() ? entry : Waits{};
      for (const Dependency& d : node->dependencies) {
        waited_for[d.on] = true;
        for (const uint32_t end : ends[d.on]) {
          const bool plain = d.on->child != nullptr || d.on->operations.empty() || !d.on->enabled;
          waits.push_back({end, plain ? uint8_t{0} : d.edge.from_port, d.edge.to_port,
                           plain ? uint8_t{0} : d.edge.type, 0});
        }
      }
      if (node->child) {
        Waits inner;
        if (!spread(*node->child, waits, inner)) return false;
        for (const auto& end : inner) ends[node].push_back(end.node);
        continue;
      }
      emit(*node, waits);
      ends[node].push_back(nodes_++);
      for (const auto& body : node->bodies) {
        if (!emit_body(*body)) return false;
      }
    }
    for (const Node* const node : order) {
      if (waited_for[node]) continue;
      for (const uint32_t end : ends[node]) exits.push_back({end, 0, 0, 0, 0});
    }
    if (order.empty()) exits = entry;
    return true;
  }

  uint32_t nodes() const { return nodes_; }
  const std::vector<journal::GraphCondition>& conditions() const { return conditions_; }

 private:
  bool emit_body(const Graph& body) {
    const size_t at = image_.size();
    put(image_, journal::GraphBody{});
    const uint32_t outer_graph = std::exchange(graph_, ++graphs_), outer_nodes = std::exchange(nodes_, 0);
    Waits exits;
    const bool spreads = spread(body, {}, exits);
    const journal::GraphBody head{nodes_, 0};
    std::memcpy(image_.data() + at, &head, sizeof(head));
    graph_ = outer_graph;
    nodes_ = outer_nodes;
    return spreads;
  }

  void emit(const Node& node, const Waits& waits) {
    if (!node.bodies.empty()) {
      put(image_, journal::GraphNode{static_cast<uint32_t>(waits.size()), journal::kConditionalNode});
      for (const auto& wait : waits) put(image_, wait);
      put(image_, journal::GraphChoice{node.condition, static_cast<uint32_t>(node.choice),
                                       static_cast<uint32_t>(node.bodies.size())});
      return;
    }
    const auto operations = node.enabled ? static_cast<uint32_t>(node.operations.size()) : 0u;
    put(image_, journal::GraphNode{static_cast<uint32_t>(waits.size()), operations});
    for (const auto& wait : waits) put(image_, wait);
    for (uint32_t i = 0; i < operations; ++i) {
      const Operation& operation = node.operations[i];
      put(image_, journal::GraphOperation{static_cast<uint32_t>(operation.op),
                                          static_cast<uint32_t>(operation.payload.size())});
      put(image_, operation.arguments);
      put(image_, operation.payload);
    }
  }

  std::vector<std::byte>& image_;
  std::vector<journal::GraphCondition> conditions_;
  uint32_t graph_ = 0, graphs_ = 0;  // which one is being emitted, and how many there are behind the first
  uint32_t nodes_ = 0;               // of this one
};

}  // namespace

bool serialise(const Graph& graph, std::vector<std::byte>& image) {
  image.assign(sizeof(journal::GraphImage), std::byte{});
  std::vector<std::byte> nodes;
  Spreader spreader(nodes);
  Spreader::Waits exits;
  if (!spreader.spread(graph, {}, exits)) return false;
  const std::vector<journal::GraphCondition>& conditions = spreader.conditions();
  for (const auto& condition : conditions) put(image, condition);
  image.insert(image.end(), nodes.begin(), nodes.end());
  const journal::GraphImage head{journal::kGraphMagic, image.size(), spreader.nodes(),
                                 static_cast<uint32_t>(conditions.size())};
  std::memcpy(image.data(), &head, sizeof(head));
  return true;
}

}  // namespace xmig::client
