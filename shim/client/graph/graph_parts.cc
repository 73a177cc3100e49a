#include "client/graph/graph_parts.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "client/bootstrap/message.h"
#include "client/graph/graph_play.h"
#include "client/journal/append.h"
#include "client/journal/context.h"
#include "client/journal/streams.h"
#include "client/journal/thread.h"
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
  return node.event || node.collectives || std::any_of(node.operations.begin(), node.operations.end(),
                                   [](const Operation& operation) { return is_programs(operation.op); });
}

bool copies_pinned(const Operation& operation) {
  return operation.op == Op::xmCopyFromPinned || operation.op == Op::xmCopyToPinned;
}

// May it be between a kernel that sets a condition and the node that follows it?
bool can_be_between(const Node& node) {
  return !takes_part(node) || node.event ||
         (!node.collectives && std::all_of(node.operations.begin(), node.operations.end(), copies_pinned));
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

Context& context_of(CUstream stream) {
  const Stream* const known = find_stream(stream);
  return known ? *known->context : *this_thread().context;
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
    std::optional<size_t> last;  // collectives: they stay in this order
    for (size_t i = 0; i < items_.size(); ++i) {
      if (!items_[i].node->collectives) continue;
      if (last) tied_[i].push_back(*last);
      last = i;
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
  std::vector<std::vector<size_t>> tied_;  // to each item: others that it stays together with, or comes after
  std::unordered_map<uint64_t, Condition> conditions_;  // of bodies not: nobody else can use those
};

// Which part is in which lane, and what waits for what.
class Parts::Plan {
 public:
  using Unit = std::vector<size_t>;
  Plan(Parts& parts, const std::vector<Item>& items, const std::vector<Unit>& units, Context& context)
      : parts_(parts), items_(items), units_(units), part_of_(items.size(), kStart) {
    add_lane({&context, 0});
  }

  const Collectives* collectives(const Unit& unit) const { return items_[unit[0]].node->collectives.get(); }

  // For these collectives: the first one, if they wait for the last part there, and the next work for them. Then nothing is gained by
  // another, and nobody waits longer.
  std::vector<size_t> lanes_for(size_t at) {
    const Unit& unit = units_[at];
    const std::vector<size_t>& before = items_[unit[0]].after;
    const bool behind = last_[0] == kStart || std::any_of(before.begin(), before.end(), [&](size_t one) { return part_of_[one] == last_[0]; });
    const bool ahead = at + 1 == units_.size() || std::any_of(units_[at + 1].begin(), units_[at + 1].end(), [&](size_t next) {
      const std::vector<size_t>& after = items_[next].after;
      return std::find(after.begin(), after.end(), unit[0]) != after.end();
    });
    std::vector<size_t> lanes;
    for (Context* const context : collectives(unit)->contexts()) {
      const bool here = behind && ahead && context->ordinal == parts_.lanes_[0].context->ordinal;
      lanes.push_back(here ? 0 : lane_of({context, collectives(unit)->communicator()}));
    }
    return lanes;
  }

  // What the lane has to wait for ahead of this unit, from now on.
  std::vector<Wait> waits_for(const Unit& unit, size_t lane) {
    std::map<size_t, size_t> last;  // by lane: the part
    for (const size_t item : unit) {
      for (const size_t before : items_[item].after) {
        const size_t part = part_of_[before];
        if (part == kStart) continue;  // not there yet: it is in the same stretch
        for (const size_t other : parts_.parts_[part].lanes) {
          if (other == lane || (known_[lane].contains(other) && known_[lane][other] > part)) continue;
          const auto [at, added] = last.try_emplace(other, part);
          at->second = std::max(at->second, part);
        }
      }
    }
    std::vector<Wait> waits;
    if (lane != 0 && !last.contains(0) && !known_[lane].contains(0)) {
      waits.push_back({lane, 0, kStart});
      known_[lane][0] = 0;
      if (!parts_.start_) parts_.start_ = std::make_unique<Mark>();
    }
    for (const auto& [other, part] : last) waits.push_back(wait(lane, other, part));
    return waits;
  }

  // The last part is of these items.
  void placed(const Unit& items) {
    const size_t part = parts_.parts_.size() - 1;
    for (const size_t item : items) part_of_[item] = part;
    for (const size_t lane : parts_.parts_[part].lanes) last_[lane] = part;
  }

  void end() {
    for (size_t lane = 1; lane < parts_.lanes_.size(); ++lane) {
      if (known_[0].contains(lane) && known_[0][lane] > last_[lane]) continue;
      parts_.at_end_.push_back(wait(0, lane, last_[lane]));
    }
  }

 private:
  Wait wait(size_t lane, size_t for_lane, size_t part) {
    known_[lane][for_lane] = part + 1;
    std::unique_ptr<Mark>& mark = parts_.parts_[part].marks[for_lane];
    if (!mark) mark = std::make_unique<Mark>();
    return {lane, for_lane, part};
  }
  size_t add_lane(const Lane& lane) {
    parts_.lanes_.push_back(lane);
    known_.emplace_back();
    last_.push_back(kStart);
    return parts_.lanes_.size() - 1;
  }
  size_t lane_of(const Lane& lane) {
    for (size_t i = 1; i < parts_.lanes_.size(); ++i) {
      if (parts_.lanes_[i].context == lane.context && parts_.lanes_[i].communicator == lane.communicator) return i;
    }
    return add_lane(lane);
  }

  Parts& parts_;
  const std::vector<Item>& items_;
  const std::vector<Unit>& units_;
  std::vector<size_t> part_of_;                 // each item; kStart: none yet
  std::vector<std::map<size_t, size_t>> known_;  // each lane, of each other: how many parts it has waited for
  std::vector<size_t> last_;                    // part of each lane
};

CUresult Parts::make(const Graph& graph, cuuint64_t flags, Context& context, std::unique_ptr<Parts>& made) {
  Division division;
  if (!division.read(graph)) return CUDA_ERROR_INVALID_VALUE;
  const std::vector<Item>& items = division.items();
  std::unique_ptr<Parts> parts(new Parts);
  const std::vector<std::vector<size_t>> units = division.units();
  Plan plan(*parts, items, units, context);
  std::vector<size_t> stretch;  // what the device does alone, until something comes that it does not
  std::vector<Wait> waits;      // ahead of it
  const auto close = [&]() -> CUresult {
    const std::vector<size_t> all = std::exchange(stretch, {});
    if (all.empty()) return CUDA_SUCCESS;
    if (all.size() == 1 && items[all[0]].node->bodies.empty()) {
      parts->parts_.push_back({.played = items[all[0]].node});
    } else if (const CUresult result = parts->add_graph(division, all, flags); result != CUDA_SUCCESS) {
      return result;
    }
    parts->parts_.back().waits = std::exchange(waits, {});
    plan.placed(all);
    return CUDA_SUCCESS;
  };
  for (size_t at = 0; at < units.size(); ++at) {
    const std::vector<size_t>& unit = units[at];
    const bool alone = unit.size() == 1;
    const auto node = [&](size_t item) -> const Node& { return *items[item].node; };
    CUresult result = CUDA_SUCCESS;
    if (alone && takes_part(node(unit[0]))) {
      if (result = close(); result != CUDA_SUCCESS) return result;
      Part part{.played = &node(unit[0])};
      if (plan.collectives(unit)) {
        part.lanes = plan.lanes_for(at);
        parts->collectives_ = true;
      }
      for (const size_t lane : part.lanes) {
        const std::vector<Wait> of_lane = plan.waits_for(unit, lane);
        part.waits.insert(part.waits.end(), of_lane.begin(), of_lane.end());
      }
      parts->parts_.push_back(std::move(part));
      plan.placed(unit);
    } else if (!std::all_of(unit.begin(), unit.end(), [&](size_t item) { return can_be_between(node(item)); })) {
      say("a graph has a host function, a memory operation or a collective between a kernel that sets a conditional handle and "
          "the conditional node that follows it: xMIG needs the two without it between them (set the handle behind it)");
      return CUDA_ERROR_NOT_SUPPORTED;
    } else {
      // What is recorded behind the part, and waited for ahead of it, is so for no more than has to be.
      const bool events = std::any_of(unit.begin(), unit.end(), [&](size_t item) { return node(item).event != nullptr; });
      std::vector<Wait> of_unit = plan.waits_for(unit, 0);
      if (events || !of_unit.empty()) result = close();
      waits.insert(waits.end(), of_unit.begin(), of_unit.end());
      stretch.insert(stretch.end(), unit.begin(), unit.end());
      if (events && result == CUDA_SUCCESS) result = close();
    }
    if (result != CUDA_SUCCESS) return result;
  }
  if (const CUresult result = close(); result != CUDA_SUCCESS) return result;
  plan.end();
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

CUresult Parts::check() const {
  for (const Part& part : parts_) {
    if (!part.played || !part.played->collectives) continue;
    if (const CUresult result = part.played->collectives->check(); result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

CUresult Parts::launch(CUstream stream, Lanes& lanes) {
  StandIns::give_back();
  Context& context = context_of(stream);
  const bool elsewhere = collectives_ && context.ordinal != lanes_[0].context->ordinal;
  std::vector<CUstream> streams(lanes_.size(), stream);
  for (size_t i = elsewhere ? 0 : 1; i < lanes_.size(); ++i) {
    const CUresult result = lanes.find(*lanes_[i].context, lanes_[i].communicator, streams[i]);
    if (result != CUDA_SUCCESS) return result;
  }
  if (!elsewhere) return run(streams);
  CUresult result = entered_.record(context, stream);
  if (result == CUDA_SUCCESS) result = entered_.await(streams[0]);
  if (result == CUDA_SUCCESS) {
    const WithContext of_it(*lanes_[0].context);
    result = run(streams);
  }
  if (result == CUDA_SUCCESS) result = left_.record(*lanes_[0].context, streams[0]);
  return result == CUDA_SUCCESS ? left_.await(stream) : result;
}

CUresult Parts::run(std::span<const CUstream> streams) {
  CUresult result = start_ ? start_->record(context_of(streams[0]), streams[0]) : CUDA_SUCCESS;
  for (size_t i = 0; i < parts_.size() && result == CUDA_SUCCESS; ++i) result = run(parts_[i], streams);
  return result == CUDA_SUCCESS ? wait(at_end_, streams) : result;
}

CUresult Parts::wait(const std::vector<Wait>& waits, std::span<const CUstream> streams) const {
  for (const Wait& one : waits) {
    const Mark& mark = one.part == kStart ? *start_ : *parts_[one.part].marks.at(one.for_lane);
    if (const CUresult result = mark.await(streams[one.lane]); result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

CUresult Parts::run(const Part& part, std::span<const CUstream> streams) const {
  CUresult result = wait(part.waits, streams);
  if (result != CUDA_SUCCESS) return result;
  const Collectives* const collectives = part.played ? part.played->collectives.get() : nullptr;
  if (collectives) {
    const std::span<Context* const> contexts = collectives->contexts();
    result = collectives->begin([&](const Context& context) {
      const auto which = std::find(contexts.begin(), contexts.end(), &context) - contexts.begin();
      return streams[part.lanes[static_cast<size_t>(which)]];
    });
  } else {
    result = part.played ? play(*part.played, streams[0]) : launch(part, streams[0]);
  }
  for (const auto& [lane, mark] : part.marks) {
    if (result == CUDA_SUCCESS) result = mark->record(context_of(streams[lane]), streams[lane]);
  }
  return result;
}

CUresult Parts::launch(const Part& part, CUstream stream) {
  CUresult result = CUDA_SUCCESS;
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
  return result;
}

}  // namespace xmig::client
