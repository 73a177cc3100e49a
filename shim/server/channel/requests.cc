#include "server/channel/requests.h"

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>

#include "journal/collectives.h"

namespace xmig::server {
namespace {

using Json = nlohmann::json;

// One JSON object, read field by field. The first field that is missing or has the wrong type makes it bad, and so does
// one that nobody requested.
class Fields {
 public:
  explicit Fields(const Json& object) : object_(object) {
    if (!object.is_object()) fail("not an object");
  }

  template <typename T>
  void unsigned_number(const char* name, T& value) {
    const Json* field = find(name);
    if (!field) return;
    if (!field->is_number_unsigned() || field->get<uint64_t>() > std::numeric_limits<T>::max()) {
      return fail(std::string(name) + " is no unsigned number, or too large");
    }
    value = static_cast<T>(field->get<uint64_t>());
  }
  void integer(const char* name, int& value) {
    uint32_t number = 0;
    unsigned_number(name, number);
    if (number > static_cast<uint32_t>(std::numeric_limits<int>::max())) return fail(std::string(name) + " is too large");
    value = static_cast<int>(number);
  }
  void boolean(const char* name, bool& value) {
    const Json* field = find(name);
    if (!field) return;
    if (!field->is_boolean()) return fail(std::string(name) + " is neither true nor false");
    value = field->get<bool>();
  }
  void real(const char* name, double& value) {
    const Json* field = find(name);
    if (!field) return;
    if (!field->is_number()) return fail(std::string(name) + " is no number");
    value = field->get<double>();
  }
  void string(const char* name, std::string& value, size_t longest) {
    const Json* field = find(name);
    if (!field) return;
    if (!field->is_string() || field->get_ref<const std::string&>().size() > longest) {
      return fail(std::string(name) + " is no string, or too long");
    }
    value = field->get<std::string>();
  }
  template <typename E>
  void choice(const char* name, E& value, std::initializer_list<std::pair<std::string_view, E>> choices) {
    std::string text;
    string(name, text, 64);
    if (!good_) return;
    for (const auto& [known, meaning] : choices) {
      if (known == text) {
        value = meaning;
        return;
      }
    }
    fail(std::string(name) + " cannot be '" + text + "'");
  }
  // Is the field there, and not null?
  bool has(const char* name) {
    if (!good_) return false;
    const auto found = object_.find(name);
    if (found == object_.end()) return false;
    if (!found->is_null()) return true;
    ++seen_;
    return false;
  }
  const Json* find(const char* name) {
    if (!good_) return nullptr;
    const auto found = object_.find(name);
    if (found == object_.end()) {
      fail(std::string(name) + " is missing");
      return nullptr;
    }
    ++seen_;
    return &*found;
  }
  void fail(std::string why) {
    if (good_) why_ = std::move(why);
    good_ = false;
  }
  // Good, and nothing was left unread.
  bool finished() {
    if (good_ && seen_ != object_.size()) fail("fields that this message does not have");
    return good_;
  }
  // What made it bad.
  const std::string& why() const { return why_; }

 private:
  const Json& object_;
  std::string why_;
  size_t seen_ = 0;
  bool good_ = true;
};

void read_injection(Fields& fields, device::Injection& injection) {
  using device::InjectKind, device::InjectPoint;
  fields.unsigned_number("id", injection.id);
  fields.choice("point", injection.point,
                {{"record", InjectPoint::kRecord},
                 {"kernel", InjectPoint::kKernel},
                 {"copy", InjectPoint::kCopy},
                 {"snapshot", InjectPoint::kSnapshot},
                 {"replay", InjectPoint::kReplay},
                 {"import", InjectPoint::kImport}});
  fields.choice("kind", injection.kind,
                {{"kill", InjectKind::kKill},
                 {"fault", InjectKind::kFault},
                 {"hang", InjectKind::kHang},
                 {"flip", InjectKind::kFlip}});
  fields.unsigned_number("sequence", injection.sequence);
  fields.integer("error", injection.error);
  if (fields.has("address")) fields.unsigned_number("address", injection.address);
  if (injection.kind == InjectKind::kFlip && injection.point != InjectPoint::kRecord) fields.fail("a bit is flipped at a record only");
}

// Injections arrive as a message of their own, or in a list inside `assign`, where they may carry the same "type".
Result<> read_listed_injection(const Json& object, device::Injection& injection) {
  Fields fields(object);
  std::string type;
  if (fields.has("type")) fields.string("type", type, 16);
  read_injection(fields, injection);
  if (!fields.finished()) return Error{fields.why()};
  return {};
}

// Communicators.
void read_names(Fields& fields, const char* name, std::vector<std::string>& names) {
  const Json* list = fields.find(name);
  if (!list) return;
  if (!list->is_array()) return fields.fail(std::string(name) + " is no list");
  for (const Json& one : *list) {
    if (!one.is_string()) return fields.fail(std::string(name) + " names what is no string");
    names.push_back(one.get<std::string>());
  }
}

void read_numbers(Fields& fields, const char* name, std::vector<uint64_t>& numbers) {
  const Json* list = fields.find(name);
  if (!list) return;
  if (!list->is_array()) return fields.fail(std::string(name) + " is no list");
  for (const Json& one : *list) {
    if (!one.is_number_unsigned()) return fields.fail(std::string(name) + " has what is no unsigned number");
    numbers.push_back(one.get<uint64_t>());
  }
}

void read_chunks(Fields& fields, size_t most, std::vector<ChunkHash>& found) {
  const Json* chunks = fields.find("chunks");
  if (!chunks) return;
  if (!chunks->is_array() || chunks->size() > most) return fields.fail("chunks is no list, or a long one");
  for (const Json& one : *chunks) {
    const bool numbers = one.is_array() && one.size() == 2 && one[0].is_number_unsigned() && one[1].is_number_unsigned();
    if (!numbers) return fields.fail("a chunk is no address and hash");
    found.emplace_back(one[0].get<uint64_t>(), one[1].get<uint64_t>());
  }
}

void read_differing(const Json& object, Fields& fields, Assign& assign) {
  Fields inner(object);
  inner.unsigned_number("snapshot", assign.differing_snapshot);
  read_chunks(inner, 256, assign.differing);
  if (!inner.finished()) fields.fail(inner.why());
}

std::optional<Request> read_chunks_brought(Fields& fields, std::vector<ipc::UniqueFd>& fds) {
  ChunksBrought brought;
  fields.unsigned_number("examined", brought.examined);
  read_numbers(fields, "found", brought.found);
  fields.string("why", brought.why, 4096);
  const auto& found = brought.found;
  const bool ordered = std::ranges::adjacent_find(found, std::greater_equal<>()) == found.end();
  if (!ordered || found.size() > kChunksAtOnce || brought.examined > kMostChunks || (!found.empty() && found.back() >= brought.examined)) {
    fields.fail("found has what was not requested");
  }
  if (fds.size() != (found.empty() ? 0 : 1)) fields.fail("chunks_brought comes with a descriptor of what was found");
  if (!fields.finished()) return std::nullopt;
  if (!fds.empty()) brought.content = std::move(fds[0]);
  fds.clear();
  return brought;
}

std::optional<Request> read_read_chunks(Fields& fields, std::vector<ipc::UniqueFd>& fds) {
  ReadChunks read;
  fields.unsigned_number("number", read.number);
  read_chunks(fields, kMostChunks, read.chunks);
  if (fds.size() != 1) fields.fail("read_chunks comes with 1 descriptor");
  if (!fields.finished()) return std::nullopt;
  read.memory = std::move(fds[0]);
  fds.clear();
  return read;
}

void read_quota(Fields& fields, Assign& assign) {
  fields.unsigned_number("memory_quota", assign.memory_quota);
  read_numbers(fields, "quota_slots", assign.quota_slots);
  if (assign.memory_quota == 0) fields.fail("memory_quota is 0");
  const bool there_are = std::ranges::all_of(assign.quota_slots, [](uint64_t slot) { return slot < quota::kSlots; });
  if (assign.quota_slots.empty() || assign.quota_slots.size() > journal::kMaxDevices || !there_are) {
    fields.fail("quota_slots has no slot for each device");
  }
}

std::optional<Request> read_assign(Fields& fields, std::vector<ipc::UniqueFd>& fds) {
  Assign assign;
  fields.string("job", assign.job, 63);
  fields.choice(
      "mode", assign.mode,
      {{"fresh", AssignMode::kFresh},
       {"recover", AssignMode::kRecover},
       {"lost", AssignMode::kLost},
       {"move", AssignMode::kMove},
       {"resume", AssignMode::kResume}});
  fields.integer("client_pid", assign.client_pid);
  fields.real("snapshot_cost", assign.snapshot_cost);
  if (!(assign.snapshot_cost > 0 && assign.snapshot_cost <= 1)) fields.fail("snapshot_cost is not in (0, 1]");
  if (fields.has("stall_bound")) fields.real("stall_bound", assign.stall_bound);
  if (fields.has("copies_on_host")) fields.boolean("copies_on_host", assign.copies_on_host);
  if (!(assign.stall_bound > 0 && assign.stall_bound <= 1e6)) fields.fail("stall_bound is not in (0, 1e6]");
  if (fields.has("hang_timeout")) fields.real("hang_timeout", assign.hang_timeout);
  if (!(assign.hang_timeout >= 0 && assign.hang_timeout <= 1e9)) fields.fail("hang_timeout is not in [0, 1e9]");
  if (fields.has("memory_quota")) read_quota(fields, assign);
  if (fields.has("deliver")) {
    const Json* object = fields.find("deliver");
    Delivery delivery{};
    Fields inner(*object);
    inner.unsigned_number("sequence", delivery.sequence);
    inner.integer("error", delivery.error);
    if (!inner.finished()) {
      fields.fail(inner.why());
      return std::nullopt;
    }
    assign.deliver = delivery;
  }
  if (fields.has("careful")) {
    const Json* object = fields.find("careful");
    Careful careful{};
    Fields inner(*object);
    inner.unsigned_number("after", careful.after);
    inner.unsigned_number("until", careful.until);
    if (!inner.finished()) {
      fields.fail(inner.why());
      return std::nullopt;
    }
    assign.careful = careful;
  }
  if (fields.has("injections")) {
    const Json* list = fields.find("injections");
    if (!list->is_array() || list->size() > 256) {
      fields.fail("injections is no list, or too long");
    } else {
      for (const Json& object : *list) {
        if (const Result<> read = read_listed_injection(object, assign.injections.emplace_back()); !read) {
          fields.fail(read.why());
          return std::nullopt;
        }
      }
    }
  }
  if (fields.has("ahead")) fields.boolean("ahead", assign.ahead);
  if (fields.has("hold")) fields.boolean("hold", assign.hold);
  const bool may_wait = assign.mode == AssignMode::kRecover || assign.mode == AssignMode::kResume;
  if (assign.hold && assign.mode != AssignMode::kRecover) fields.fail("only a recovery is held");
  if (assign.ahead && !may_wait) fields.fail("only a recovery or a resumption is prepared ahead");
  if (fields.has("error")) fields.integer("error", assign.error);
  if (fields.has("text")) fields.string("text", assign.text, 4096);
  if (fields.has("decided")) fields.unsigned_number("decided", assign.decided);
  if (fields.has("gone")) read_names(fields, "gone", assign.gone);
  if (fields.has("communicators")) read_numbers(fields, "communicators", assign.communicators);
  if (fields.has("differing")) read_differing(*fields.find("differing"), fields, assign);
  if (fields.has("first_id")) fields.unsigned_number("first_id", assign.first_id);
  if (assign.first_id == 0 || assign.first_id >= 1ull << 62) fields.fail("first_id is not in [1, 2^62)");
  const bool has_quota = assign.memory_quota != 0;
  if (fds.size() != (has_quota ? 6 : 5)) fields.fail("assign comes with 5 descriptors, and with 6 if there is a quota");
  if (!fields.finished()) return std::nullopt;
  assign.fds = {std::move(fds[0]), std::move(fds[1]), std::move(fds[2]), {std::move(fds[3]), std::move(fds[4])}, {}};
  if (has_quota) assign.fds.quota = std::move(fds[5]);
  fds.clear();
  return assign;
}

std::optional<Hosted> read_hosted(Fields& fields, std::vector<ipc::UniqueFd>& fds) {
  Hosted memory;
  fields.unsigned_number("id", memory.id);
  fields.choice(
      "kind", memory.kind,
      {{"device", HostedKind::kDevice}, {"shadow", HostedKind::kShadow}, {"image", HostedKind::kImage}});
  fields.integer("ordinal", memory.ordinal);
  fields.unsigned_number("address", memory.address);
  fields.unsigned_number("bytes", memory.bytes);
  if (fields.has("name")) fields.string("name", memory.name, 255);
  if (fields.has("foreign")) fields.boolean("foreign", memory.foreign);
  if (fields.has("sealed")) fields.boolean("sealed", memory.sealed);
  if (memory.ordinal >= static_cast<int>(journal::kMaxDevices)) fields.fail("ordinal is too large");
  if (fds.size() != 1) fields.fail("memory comes with 1 descriptor");
  if (!fields.finished()) return std::nullopt;
  memory.fd = std::move(fds[0]);
  fds.clear();
  return memory;
}

std::optional<Request> read_memory(Fields& fields, std::vector<ipc::UniqueFd>& fds) {
  std::string op;
  fields.string("op", op, 8);
  if (op == "drop") {
    MemoryDrop drop;
    fields.unsigned_number("id", drop.id);
    return fields.finished() ? std::optional<Request>(drop) : std::nullopt;
  }
  if (op != "add") fields.fail("op is neither add nor drop");
  std::optional<Hosted> memory = read_hosted(fields, fds);
  return memory ? std::optional<Request>(MemoryAdd{std::move(*memory)}) : std::nullopt;
}

std::optional<Request> read_rebind(Fields& fields, std::vector<ipc::UniqueFd>& fds) {
  Rebind rebind;
  if (fields.has("client_pid")) fields.integer("client_pid", rebind.client_pid);
  if (fds.size() != 3) fields.fail("rebind comes with 3 descriptors");
  if (!fields.finished()) return std::nullopt;
  rebind.journal = std::move(fds[0]);
  rebind.staging = std::move(fds[1]);
  rebind.pinned = std::move(fds[2]);
  fds.clear();
  return rebind;
}

std::optional<Request> read_prepare_suspend(Fields& fields, std::vector<ipc::UniqueFd>& fds) {
  PrepareSuspend prepare;
  fields.choice("to", prepare.to, {{"host", SuspendTo::kHost}, {"file", SuspendTo::kFile}});
  if (fields.has("bytes_hint")) fields.unsigned_number("bytes_hint", prepare.bytes_hint);
  const bool file = prepare.to == SuspendTo::kFile;
  if (fds.size() != (file ? 1 : 0)) fields.fail("prepare_suspend comes with 1 descriptor if it is to a file, else none");
  if (!fields.finished()) return std::nullopt;
  if (file) prepare.directory = std::move(fds[0]);
  fds.clear();
  return prepare;
}

std::optional<Request> read_profiling(Fields& fields, bool trace, std::vector<ipc::UniqueFd>& fds) {
  std::optional<Request> request;
  uint32_t every = 0;
  if (fds.size() != 1) fields.fail("it comes with 1 descriptor");
  if (!trace) fields.unsigned_number("every", every);
  if (fields.finished()) {
    request = trace ? Request(Trace{std::move(fds[0])}) : Request(Profile{every, std::move(fds[0])});
  }
  fds.clear();
  return request;
}

std::optional<Request> read_share(Fields& fields, std::vector<ipc::UniqueFd>& fds) {
  Share share;
  fields.choice("class", share.as, {{"critical", SharingClass::kCritical}, {"best-effort", SharingClass::kBestEffort}});
  fields.unsigned_number("ordinal", share.ordinal);
  fields.unsigned_number("slot", share.slot);
  fields.unsigned_number("backlog", share.backlog);
  fields.unsigned_number("backlog_ns", share.backlog_ns);
  fields.unsigned_number("longest_wait", share.longest_wait);
  fields.unsigned_number("slice", share.slice);
  if (share.ordinal >= journal::kMaxDevices || share.slot >= sharing::kSlots) fields.fail("there is no such device, or no such slot");
  if (share.backlog == 0 || share.slice == 0) fields.fail("backlog and slice are not 0");
  if (share.longest_wait > 10'000'000'000) fields.fail("longest_wait is more than 10 s");
  const bool best_effort = share.as == SharingClass::kBestEffort;
  if (fds.size() != (best_effort ? 2 : 1)) fields.fail("share comes with 1 descriptor, or with 2 if it is best-effort");
  if (!fields.finished()) {
    fds.clear();
    return std::nullopt;
  }
  share.own = std::move(fds[0]);
  if (best_effort) share.critical = std::move(fds[1]);
  fds.clear();
  return share;
}

std::optional<Request> read_met(Fields& fields) {
  Met met;
  fields.string("meeting", met.meeting, 2 * journal::kGroupIdBytes);
  fields.unsigned_number("rank", met.rank);
  if (fields.has("missing")) fields.string("missing", met.missing, 4096);
  if (fields.has("refused")) fields.string("refused", met.refused, 4096);
  if (fields.has("over")) fields.boolean("over", met.over);
  if (fields.has("offers")) {
    fields.string("answer", met.answer, 2 * journal::kGroupIdBytes);
    const Json* list = fields.find("offers");
    if (!list) return std::nullopt;
    if (!list->is_array() || list->size() > journal::kMaxRanks) {
      fields.fail("offers is no list, or too long");
    } else {
      for (const Json& offer : *list) {
        if (!offer.is_string()) fields.fail("an offer is no string");
        if (offer.is_string()) met.offers.push_back(offer.get<std::string>());
      }
    }
  }
  return fields.finished() ? std::optional<Request>(std::move(met)) : std::nullopt;
}

std::optional<Request> read_group_stop(Fields& fields) {
  GroupStop stop;
  fields.unsigned_number("round", stop.round);
  if (fields.has("behind")) fields.unsigned_number("behind", stop.behind.emplace());
  const Json* counts = fields.find("counts");
  if (counts && !counts->is_object()) fields.fail("counts is no object");
  if (!fields.finished()) return std::nullopt;
  for (const auto& [key, count] : counts->items()) {
    if (!count.is_number_unsigned()) {
      fields.fail("counts has what is no unsigned number");
      return std::nullopt;
    }
    stop.counts[key] = count.get<uint64_t>();
  }
  return stop;
}

}  // namespace

Result<Request> parse_request(std::span<const std::byte> message, std::vector<ipc::UniqueFd> fds) {
  const char* const text = reinterpret_cast<const char*>(message.data());
  const Json object = Json::parse(text, text + message.size(), nullptr, false);
  if (object.is_discarded()) return Error{"not JSON"};
  Fields fields(object);
  std::string type;
  fields.string("type", type, 32);
  std::optional<Request> request;
  if (type == "assign") {
    request = read_assign(fields, fds);
  } else if (type == "memory") {
    request = read_memory(fields, fds);
  } else if (type == "rebind") {
    request = read_rebind(fields, fds);
  } else if (type == "inject") {
    Inject inject;
    read_injection(fields, inject.injection);
    if (fields.finished()) request = inject;
  } else if (type == "stop") {
    Stop stop;
    if (fields.has("reason")) fields.string("reason", stop.reason, 4096);
    if (fields.finished()) request = std::move(stop);
  } else if (type == "go") {
    if (fields.finished()) request = Go{};
  } else if (type == "enter") {
    Enter enter;
    if (fields.has("gone")) read_names(fields, "gone", enter.gone);
    if (fields.finished()) request = std::move(enter);
  } else if (type == "snapshot") {
    TakeSnapshot snapshot;
    if (fields.has("host")) fields.boolean("host", snapshot.host.emplace());
    if (fields.finished()) request = snapshot;
  } else if (type == "round") {
    Round round;
    fields.unsigned_number("number", round.number);
    fields.unsigned_number("snapshot", round.snapshot);
    if (fields.finished()) request = round;
  } else if (type == "handover") {
    if (fields.finished()) request = Handover{};
  } else if (type == "take") {
    Take take;
    fields.unsigned_number("snapshot", take.snapshot);
    if (fields.has("communicators")) read_numbers(fields, "communicators", take.communicators);
    if (fields.finished()) request = std::move(take);
  } else if (type == "room") {
    if (fds.empty()) fields.fail("room comes with descriptors");
    if (fields.finished()) request = Room{std::move(fds)};
    fds.clear();
  } else if (type == "prepare_suspend") {
    request = read_prepare_suspend(fields, fds);
  } else if (type == "suspend") {
    if (fields.finished()) request = Suspend{};
  } else if (type == "open") {
    OpenDevices open;
    fields.unsigned_number("devices", open.devices);
    if (fields.finished()) request = open;
  } else if (type == "preload") {
    if (fds.size() != 2) fields.fail("preload comes with 2 descriptors");
    if (fields.finished()) request = LoadAhead{{std::move(fds[0]), std::move(fds[1])}};
    fds.clear();
  } else if (type == "ahead") {
    RoundAhead round;
    fields.unsigned_number("number", round.number);
    read_numbers(fields, "most_bytes", round.most_bytes);
    if (fds.size() != 2) fields.fail("ahead comes with 2 descriptors");
    if (fields.finished()) {
      round.snapshots = {std::move(fds[0]), std::move(fds[1])};
      request = std::move(round);
    }
    fds.clear();
  } else if (type == "prepare_communicator") {
    PrepareCommunicator prepare;
    fields.unsigned_number("attempt", prepare.attempt);
    fields.string("name", prepare.name, 2 * journal::kGroupIdBytes);
    if (fds.size() != 2) fields.fail("prepare_communicator comes with 2 descriptors");
    if (fields.finished()) {
      prepare.snapshots = {std::move(fds[0]), std::move(fds[1])};
      request = std::move(prepare);
    }
    fds.clear();
  } else if (type == "forget_communicator") {
    ForgetCommunicator forget;
    fields.unsigned_number("attempt", forget.attempt);
    if (fields.finished()) request = forget;
  } else if (type == "memory_given_up") {
    MemoryGivenUp given_up;
    fields.unsigned_number("number", given_up.number);
    fields.unsigned_number("bytes", given_up.bytes);
    if (fields.finished()) request = given_up;
  } else if (type == "abort_suspend") {
    if (fields.finished()) request = AbortSuspend{};
  } else if (type == "pause") {
    Pause pause;
    if (fields.has("snapshot")) fields.boolean("snapshot", pause.at_snapshot);
    if (fields.finished()) request = pause;
  } else if (type == "copy_snapshot") {
    CopySnapshot copy;
    fields.unsigned_number("number", copy.number);
    if (fields.has("since")) fields.unsigned_number("since", copy.since);
    if (fields.has("keep_bits")) fields.unsigned_number("keep_bits", copy.keep_bits);
    if (fields.finished()) request = std::move(copy);
  } else if (type == "forget_snapshot_copy") {
    if (fields.finished()) request = ForgetSnapshotCopy{};
  } else if (type == "continue") {
    Continue go_on;
    if (fields.has("if_paused")) fields.boolean("if_paused", go_on.if_paused);
    if (fields.finished()) request = go_on;
  } else if (type == "met") {
    request = read_met(fields);
  } else if (type == "group_stop") {
    request = read_group_stop(fields);
  } else if (type == "group_hold") {
    GroupHold hold;
    fields.unsigned_number("round", hold.round);
    if (fields.has("suspends")) fields.boolean("suspends", hold.suspends);
    read_names(fields, "gone", hold.gone);
    if (fields.finished()) request = std::move(hold);
  } else if (type == "group_take") {
    GroupTake take;
    fields.unsigned_number("round", take.round);
    if (fields.has("moves")) fields.boolean("moves", take.moves);
    if (fields.has("leaves")) fields.boolean("leaves", take.leaves);
    if (fields.has("suspends")) fields.boolean("suspends", take.suspends);
    if (fields.has("pauses")) fields.boolean("pauses", take.pauses);
    if (fields.has("communicators")) read_numbers(fields, "communicators", take.communicators);
    if (fields.finished()) request = std::move(take);
  } else if (type == "group_continue") {
    GroupContinue go_on;
    fields.unsigned_number("round", go_on.round);
    if (fields.finished()) request = go_on;
  } else if (type == "communicator_lost") {
    CommunicatorLost lost;
    fields.string("name", lost.name, 2 * journal::kGroupIdBytes);
    if (fields.finished()) request = std::move(lost);
  } else if (type == "replica_rank") {
    if (fds.size() != 2) fields.fail("replica_rank comes with 2 descriptors");
    if (fields.finished()) request = ReplicaRank{{std::move(fds[0]), std::move(fds[1])}};
    fds.clear();
  } else if (type == "replica_memory") {
    std::optional<Hosted> memory = read_hosted(fields, fds);
    if (memory) request = ReplicaMemory{std::move(*memory)};
  } else if (type == "replicas_named") {
    ReplicasNamed named;
    fields.unsigned_number("far", named.far);
    if (fields.finished()) request = named;
  } else if (type == "chunks_brought") {
    request = read_chunks_brought(fields, fds);
  } else if (type == "read_chunks") {
    request = read_read_chunks(fields, fds);
  } else if (type == "copy_unique") {
    CopyUnique copy;
    fields.unsigned_number("snapshot", copy.snapshot);
    fields.unsigned_number("bytes", copy.bytes);
    if (fds.size() > 1) fields.fail("copy_unique comes with a descriptor of hashes, or with none");
    if (fds.size() == 1) copy.elsewhere = std::move(fds[0]);
    if (fields.finished()) request = std::move(copy);
    fds.clear();
  } else if (type == "profile" || type == "trace") {
    request = read_profiling(fields, type == "trace", fds);
  } else if (type == "share") {
    request = read_share(fields, fds);
  } else if (type == "end_trace") {
    if (fields.finished()) request = EndTrace{};
  } else if (type == "output") {
    if (fds.size() != 1) fields.fail("output comes with 1 descriptor");
    if (fields.finished()) request = Output{std::move(fds[0])};
    fds.clear();
  } else if (type == "backlog") {
    if (fds.size() != 1) fields.fail("backlog comes with 1 descriptor");
    if (fields.finished()) request = Backlog{std::move(fds[0])};
    fds.clear();
  } else {
    fields.fail("unknown type '" + type + "'");
  }
  if (request && !fds.empty()) return Error{"descriptors that this message does not have"};
  if (!request) return Error{type.empty() ? fields.why() : type + ": " + fields.why()};
  return std::move(*request);
}

}  // namespace xmig::server
