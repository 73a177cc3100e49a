#include "client/graph/graph_parts.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "client/bootstrap/message.h"
#include "client/graph/graph_play.h"
#include "client/journal/append.h"
#include "client/modules/image.h"
#include "local.h"

namespace xmig::client {

namespace {

// f(word) for each word of the parameters of the kernels in this node, at any depth.
template <typename F>
void for_each_parameter(const Node& node, F&& f) {
  for (const Operation& operation : node.operations) {
    if (operation.op != Op::xmLaunch) continue;
    size_t at = size_t{operation.as<Args_xmLaunch>().attributes} * sizeof(CUlaunchAttribute);
    for (uint64_t word; at + sizeof(word) <= operation.payload.size(); at += sizeof(word)) {
      std::memcpy(&word, operation.payload.data() + at, sizeof(word));
      f(word);
    }
  }
  node.for_each_inside([&](const Graph& inside) {
    for (const auto& one : inside.nodes) for_each_parameter(*one, f);
  });
}

// f(number) for each condition that conditional nodes follow, this one or those in it.
template <typename F>
void for_each_followed(const Node& node, F&& f) {
  if (!node.bodies.empty()) f(node.condition);
  node.for_each_inside([&](const Graph& inside) {
    for (const auto& one : inside.nodes) for_each_followed(*one, f);
  });
}

// f(number) for each condition that this node, or what is in it, sets or follows: kernels have them in their parameters, where
// the server looks for them, too.
template <typename F>
void for_each_condition(const Node& node, const std::unordered_map<uint64_t, Condition>& known, F&& f) {
  const auto look_at = [&](uint64_t number) {
    if (known.contains(number)) f(number);
  };
  for_each_followed(node, look_at);
  for_each_parameter(node, look_at);
}

bool takes_part(const Node& node) {
  return node.event || std::any_of(node.operations.begin(), node.operations.end(),
                                   [](const Operation& operation) { return is_programs(operation.op); });
}

bool copies_pinned(const Operation& operation) {
  return operation.op == Op::xmCopyFromPinned || operation.op == Op::xmCopyToPinned;
}

// May it be between a kernel that sets a condition and the node that follows it?
bool can_be_between(const Node& node) {
  return !takes_part(node) || node.event ||
         std::all_of(node.operations.begin(), node.operations.end(), copies_pinned);
}

// Copies of page-locked memory in bodies. `loops`: one that reads such memory is in a loop.
void take_from_bodies(const Graph& graph, bool loop, StandIns& stand_ins, bool& loops) {
  for (const auto& node : graph.nodes) {
    stand_ins.take(*node, false);
    loops |= loop && std::any_of(node->operations.begin(), node->operations.end(),
                                 [](const Operation& one) { return one.op == Op::xmCopyFromPinned; });
    const bool deeper = loop || (!node->bodies.empty() && node->choice == CU_GRAPH_COND_TYPE_WHILE);
    node->for_each_inside([&](const Graph& inside) { take_from_bodies(inside, deeper, stand_ins, loops); });
  }
}

}  // namespace

CUresult send_graph(const Graph& graph, uint64_t number, cuuint64_t flags, bool update) {
  std::vector<std::byte> image;
  if (!serialise(graph, image)) return CUDA_ERROR_INVALID_VALUE;
  uint64_t image_number = 0;
  bool as_file = false;
  if (const CUresult error = send_image(image, &image_number, &as_file); error != CUDA_SUCCESS) return error;
  const Args_xmGraph args{.exec = number,
                          .image = image_number,
                          .flags = flags & CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY,
                          .update = update,
                          .reserved = 0};
  return call(Op::xmGraph, &args, sizeof(args), nullptr, 0);
}

struct Parts::Item {
  const Node* node;
  std::vector<size_t> after;  // items before it
};

// The nodes of a graph and of its child graphs, in an order that their edges allow, and what of them has to stay together.
class Parts::Division {
 public:
  // False: there is a circle.
  bool read(const Graph& graph) {
    std::vector<size_t> ends;
    if (!spread(graph, {}, ends)) return false;
    tied_.resize(items_.size());
    std::unordered_map<uint64_t, std::vector<size_t>> users;
    for (size_t i = 0; i < items_.size(); ++i) {
      for_each_condition(*items_[i].node, conditions_, [&](uint64_t number) { users[number].push_back(i); });
    }
    for (const auto& [number, all] : users) {  // a ring of each condition's
      for (size_t i = 0; i < all.size(); ++i) tied_[all[i]].push_back(all[(i + 1) % all.size()]);
    }
    return true;
  }

  const std::vector<Item>& items() const { return items_; }
  const std::unordered_map<uint64_t, Condition>& conditions() const { return conditions_; }

  // Those that stay together, in ascending order each; what waits for others comes after them. (Tarjan's algorithm, without
  // recursion: graphs are long.)
  std::vector<std::vector<size_t>> units() const {
    constexpr size_t kNone = ~size_t{0};
    struct At {
      size_t item, edge;
    };
    std::vector<size_t> number(items_.size(), kNone), lowest(items_.size(), kNone), open;
    std::vector<bool> is_open(items_.size());
    std::vector<std::vector<size_t>> units;
    std::vector<At> path;
    size_t next = 0;
    const auto enter = [&](size_t item) {
      number[item] = lowest[item] = next++;
      open.push_back(item);
      is_open[item] = true;
      path.push_back({item, 0});
    };
    for (size_t start = 0; start < items_.size(); ++start) {
      if (number[start] == kNone) enter(start);
      while (!path.empty()) {
        const size_t item = path.back().item;
        const size_t edge = path.back().edge++;
        const std::vector<size_t>& after = items_[item].after;
        if (edge < after.size() + tied_[item].size()) {
          const size_t to = edge < after.size() ? after[edge] : tied_[item][edge - after.size()];
          if (number[to] == kNone) {
            enter(to);
          } else if (is_open[to]) {
            lowest[item] = std::min(lowest[item], number[to]);
          }
          continue;
        }
        path.pop_back();
        if (!path.empty()) lowest[path.back().item] = std::min(lowest[path.back().item], lowest[item]);
        if (lowest[item] != number[item]) continue;
        const auto first = std::find(open.begin(), open.end(), item);
        units.emplace_back(first, open.end());
        open.erase(first, open.end());
        for (const size_t one : units.back()) is_open[one] = false;
        std::sort(units.back().begin(), units.back().end());
      }
    }
    return units;
  }

 private:
  bool spread(const Graph& graph, const std::vector<size_t>& entry, std::vector<size_t>& exits) {
    const std::vector<Node*> order = graph.in_order();
    if (order.empty() && !graph.nodes.empty()) return false;
    for (const Condition& condition : graph.conditions) conditions_.emplace(condition.number, condition);
    std::unordered_map<const Node*, std::vector<size_t>> ends;
    std::unordered_set<const Node*> waited_for;
    for (const Node* const node : order) {
      std::vector<size_t> after = node->dependencies.empty() ? entry : std::vector<size_t>{};
      for (const Dependency& d : node->dependencies) {
        waited_for.insert(d.on);
        after.insert(after.end(), ends[d.on].begin(), ends[d.on].end());
      }
      if (node->child) {
        if (!spread(*node->child, after, ends[node])) return false;
      } else {
        ends[node] = {items_.size()};
        items_.push_back({node, std::move(after)});
      }
    }
    for (const Node* const node : order) {
      if (!waited_for.contains(node)) exits.insert(exits.end(), ends[node].begin(), ends[node].end());
    }
    if (order.empty()) exits = entry;
    return true;
  }

  std::vector<Item> items_;
  std::vector<std::vector<size_t>> tied_;  // to each item: another one that it stays together with
  std::unordered_map<uint64_t, Condition> conditions_;  // of bodies not: nobody else can use those
};

CUresult Parts::make(const Graph& graph, cuuint64_t flags, std::unique_ptr<Parts>& made) {
  Division division;
  if (!division.read(graph)) return CUDA_ERROR_INVALID_VALUE;
  const std::vector<Item>& items = division.items();
  std::unique_ptr<Parts> parts(new Parts);
  std::vector<size_t> stretch;  // what the device does alone, until something comes that it does not
  const auto close = [&]() -> CUresult {
    const std::vector<size_t> all = std::exchange(stretch, {});
    if (all.empty()) return CUDA_SUCCESS;
    if (all.size() == 1 && items[all[0]].node->bodies.empty()) {
      parts->parts_.push_back({.played = items[all[0]].node});
      return CUDA_SUCCESS;
    }
    return parts->add_graph(division, all, flags);
  };
  for (const std::vector<size_t>& unit : division.units()) {
    const bool alone = unit.size() == 1;
    const auto node = [&](size_t item) -> const Node& { return *items[item].node; };
    CUresult result = CUDA_SUCCESS;
    if (alone && takes_part(node(unit[0]))) {
      result = close();
      parts->parts_.push_back({.played = &node(unit[0])});
    } else if (!std::all_of(unit.begin(), unit.end(), [&](size_t item) { return can_be_between(node(item)); })) {
      say("a graph has a host function or a memory operation between a kernel that sets a conditional handle and the "
          "conditional node that follows it: xMIG needs the two without it between them (set the handle behind it)");
      return CUDA_ERROR_NOT_SUPPORTED;
    } else {
      // What is recorded behind the part, and waited for ahead of it, is so for no more than has to be.
      const bool events = std::any_of(unit.begin(), unit.end(), [&](size_t item) { return node(item).event != nullptr; });
      if (events) result = close();
      stretch.insert(stretch.end(), unit.begin(), unit.end());
      if (events && result == CUDA_SUCCESS) result = close();
    }
    if (result != CUDA_SUCCESS) return result;
  }
  if (const CUresult result = close(); result != CUDA_SUCCESS) return result;
  made = std::move(parts);
  return CUDA_SUCCESS;
}

CUresult Parts::add_graph(const Division& division, const std::vector<size_t>& items, cuuint64_t flags) {
  Part part;
  part.stand_ins = std::make_unique<StandIns>();
  Graph graph(false);
  std::unordered_map<size_t, Node*> twins;
  std::unordered_set<uint64_t> used;
  bool loops = false;
  for (const size_t item : items) {
    const Node& node = *division.items()[item].node;
    if (node.type == CU_GRAPH_NODE_TYPE_WAIT_EVENT) part.awaited.push_back(node.event);
    if (node.type == CU_GRAPH_NODE_TYPE_EVENT_RECORD) part.recorded.push_back(node.event);
    Node& twin = graph.add_like(node, false);
    twins.emplace(item, &twin);
    for (const size_t before : division.items()[item].after) {
      if (const auto found = twins.find(before); found != twins.end()) twin.dependencies.push_back({found->second, {}});
    }
    for_each_condition(node, division.conditions(), [&](uint64_t number) { used.insert(number); });
    part.stand_ins->take(twin, true);
    const bool loop = node.choice == CU_GRAPH_COND_TYPE_WHILE;
    for (const auto& body : twin.bodies) take_from_bodies(*body, loop, *part.stand_ins, loops);
  }
  for (const uint64_t number : used) graph.conditions.push_back(division.conditions().at(number));
  if (loops) {
    complain("the body of a while node copies from page-locked memory: under xMIG each turn reads what is there when the "
             "launch comes to the node, also if the program changes it meanwhile");
  }
  bool met = false;
  for (const auto& twin : graph.nodes) {
    for_each_parameter(*twin, [&](uint64_t word) { met = met || part.stand_ins->has_taken(word); });
  }
  if (met) {
    say("a graph copies page-locked memory in the body of a conditional node, or on the way to one, and gives a kernel there the "
        "address of the same memory: xMIG cannot have both, since a copy does not see what such a kernel writes (use two "
        "allocations)");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (const CUresult error = part.stand_ins->settle(); error != CUDA_SUCCESS) return error;
  part.graph = create_handle(journal::Kind::kGraphExec);
  if (!part.graph) return CUDA_ERROR_OUT_OF_MEMORY;
  if (const CUresult error = send_graph(graph, part.graph, flags, false); error != CUDA_SUCCESS) {
    free_handle(part.graph);
    return error;
  }
  parts_.push_back(std::move(part));
  return CUDA_SUCCESS;
}

Parts::~Parts() {
  for (const Part& part : parts_) {
    if (!part.graph) continue;
    const Args_xmGraphDestroy args{.exec = part.graph};
    // Without a context it is the server's until its own goes, and so is its number.
    if (append(Op::xmGraphDestroy, &args, sizeof(args)) == CUDA_SUCCESS) free_handle(part.graph);
  }
}

CUresult Parts::launch(CUstream stream) {
  StandIns::give_back();
  for (const Part& part : parts_) {
    CUresult result = CUDA_SUCCESS;
    if (part.played) {
      result = play(*part.played, stream);
    } else {
      for (size_t i = 0; i < part.awaited.size() && result == CUDA_SUCCESS; ++i) {
        result = client::cuStreamWaitEvent(stream, part.awaited[i], 0);
      }
      if (result == CUDA_SUCCESS) result = part.stand_ins->before(stream);
      const Args_xmGraphLaunch args{
          .exec = part.graph, .stream = reinterpret_cast<uint64_t>(stream), .upload = false, .reserved = 0};
      if (result == CUDA_SUCCESS) result = append(Op::xmGraphLaunch, &args, sizeof(args));
      if (result == CUDA_SUCCESS) result = part.stand_ins->after(stream);
      for (size_t i = 0; i < part.recorded.size() && result == CUDA_SUCCESS; ++i) {
        result = client::cuEventRecordWithFlags(part.recorded[i], stream, 0);
      }
    }
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

}  // namespace xmig::client
