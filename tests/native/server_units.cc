// The parts of the server that need no device: the snapshot's file, the live set, requests, records, when to take a snapshot.
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "check.h"
#include "common/hex.h"
#include "device/device.h"
#include "ipc/seqpacket.h"
#include "ops.h"
#include "server/channel/daemon.h"
#include "server/channel/job.h"
#include "server/channel/meetings.h"
#include "server/channel/requests.h"
#include "server/control/first_record.h"
#include "server/cuda/handlers/intake.h"
#include "server/cuda/objects/communicator_place.h"
#include "server/cuda/objects/prepared_communicators.h"
#include "server/cuda/objects/variable_directory.h"
#include "server/executor/progress.h"
#include "server/executor/working.h"
#include "server/faults/watchdog.h"
#include "server/memory/live_set.h"
#include "server/migration/pace.h"
#include "server/options.h"
#include "server/records/record.h"
#include "server/snapshot/snapshot_file.h"
#include "server/snapshot/snapshot_policy.h"
#include "server/snapshot/stall.h"

namespace {

using namespace xmig;
using namespace xmig::server;

SnapshotContent example() {
  SnapshotContent content;
  content.number = 7;
  content.position = 4096;
  content.sequence = 99;
  content.failures[1] = {719, 0, 42};
  content.memory = {{journal::kDeviceBase, 4 << 20}, {journal::kDeviceBase + (64 << 20), 2 << 20}};
  content.live = {{journal::kDeviceBase, 100, 3}, {journal::kDeviceBase + 512, 1 << 20, 4}};
  content.chunks = {{journal::kDeviceBase, 0x1234, kShadowBase}, {journal::kDeviceBase + (2 << 20), 5, kShadowBase + 7}};
  content.images = {{1, 1000}};
  content.events = {{3, 98}};
  for (size_t i = 0; i < 5; ++i) content.objects.add(std::vector<std::byte>(56 + i * 8, std::byte(i)));
  return content;
}

void snapshot_file() {
  const SnapshotContent content = example();
  const std::vector<std::byte> bytes = serialise(content);
  const auto read = parse_snapshot(bytes);
  CHECK(read && read->number == 7 && read->position == 4096 && read->sequence == 99);
  CHECK(read->failures[1].error == 719 && read->failures[1].sequence == 42 && read->failures[0].error == 0);
  CHECK(read->memory.size() == 2 && read->memory[1].bytes == 2 << 20);
  CHECK(read->live.size() == 2 && read->live[1].context == 4);
  CHECK(read->chunks.size() == 2 && read->chunks[0].hash == 0x1234);
  CHECK(read->images.size() == 1 && read->events.size() == 1 && read->events[0].sequence == 98);
  CHECK(read->objects.size() == 5 && std::ranges::equal(read->objects.bytes(), content.objects.bytes()));
  for (size_t length = 0; length < bytes.size(); ++length) CHECK(!parse_snapshot(std::span(bytes).first(length)));
  std::mt19937 random(5);
  for (int i = 0; i < 2000; ++i) {
    std::vector<std::byte> damaged = bytes;
    damaged[random() % damaged.size()] ^= static_cast<std::byte>(1u << random() % 8);
    CHECK(!parse_snapshot(damaged));
  }
}

// What says where variables are kept: written, read, and damaged.
void variable_directory() {
  std::vector<KeptVariable> variables = {{"counter", 4, 0, 0, true}, {"where", 16, 0, 1, true}, {"table", 1 << 20, 0, 0, false}};
  const uint64_t bytes = place_variables(variables);
  CHECK(bytes > (1 << 20) + 36 && bytes < (1 << 20) + 4096);
  uint64_t end = 0;  // none lies in another, and each as its device wants it
  for (const KeptVariable& variable : variables) {
    CHECK(variable.content >= end && variable.content % 16 == 0);
    end = variable.content + variable.bytes;
    if (variable.first == 0) continue;
    CHECK(variable.first >= end && variable.first % 16 == 0);
    end = variable.first + variable.bytes;
  }
  CHECK(end <= bytes && variables[1].first != 0 && variables[0].first == 0);
  const std::vector<std::byte> good = serialise_variables(variables, bytes);
  CHECK(good.size() <= variables[0].content && variable_directory_bytes(std::span(good).first(64), bytes) == good.size());
  const auto same = parse_variables(good, bytes);
  CHECK(same && serialise_variables(*same, bytes) == good && (*same)[1].name == "where" && (*same)[0].written);
  for (size_t length = 0; length < good.size(); ++length) {
    const auto short_of = parse_variables(std::span(good).first(length), bytes);
    CHECK(!short_of && !short_of.why().empty());
  }
  for (size_t i = 0; i < good.size(); ++i) {
    std::vector<std::byte> damaged = good;
    damaged[i] ^= std::byte{1};
    CHECK(!parse_variables(damaged, bytes));
  }
  CHECK(!parse_variables(good, bytes + 1) && !parse_variables({}, 0));
  std::vector<KeptVariable> huge = {{"a", ~0ull - 64, 0, 0, false}, {"b", 64, 0, 0, false}};
  CHECK(place_variables(huge) == 0);
  huge = {{std::string(kMaxVariableDirectory, 'x'), 4, 0, 0, false}};
  CHECK(place_variables(huge) == 0);
}

void live_set() {
  LiveSet live;
  CHECK(live.add({1000, 100, 1}));
  CHECK(live.add({1100, 50, 2}));
  CHECK(live.add({2000, 10, 1}));
  CHECK(!live.add({1099, 1, 1}) && !live.add({990, 11, 1}) && !live.add({900, 5000, 1}) && !live.add({5, 0, 1}));
  CHECK(!live.add({~0ull - 5, 10, 1}));
  CHECK(live.contains(1000, 150) && live.contains(1050, 100) && live.contains(1149, 1) && live.contains(7, 0));
  CHECK(!live.contains(1000, 151) && !live.contains(999, 1) && !live.contains(2005, 6) && !live.contains(2000, ~0ull));
  CHECK(live.overlaps(1149, 1) && !live.overlaps(1150, 850) && live.overlaps(1150, 851));
  CHECK(live.bytes() == 160);
  CHECK(live.remove(1100) && !live.remove(1100) && !live.remove(1001));
  CHECK(!live.contains(1000, 101));
  live.remove_context(1);
  CHECK(live.listed().ranges.empty() && live.bytes() == 0 && !live.contains(1000, 1));
}

// What a snapshot writes down, whatever has come and gone since the one before.
void live_set_listed() {
  using journal::kGranule;
  LiveSet live;
  const auto granules = [&](std::vector<uint64_t> expected) {
    for (uint64_t& granule : expected) granule *= kGranule;
    return live.listed().granules == expected;
  };
  CHECK(granules({}));
  live.add({7 * kGranule + 5, 2 * kGranule, 1});
  live.add({2 * kGranule, 10, 1});
  CHECK(granules({2, 7, 8, 9}));
  live.add({2 * kGranule + 10, kGranule, 2});  // of a granule that is there already
  CHECK(granules({2, 3, 7, 8, 9}) && live.listed().ranges.size() == 3 && live.listed().ranges[1].context == 2);
  live.remove(7 * kGranule + 5);
  CHECK(granules({2, 3}));
  live.remove_context(1);
  CHECK(granules({2, 3}) && live.listed().ranges.size() == 1);
  live.clear();
  CHECK(granules({}));
}

// What nobody needs is not written down, for as long as it is allocated.
void live_set_discarded() {
  using journal::kGranule;
  LiveSet live;
  const auto granules = [&](std::vector<uint64_t> expected) {
    for (uint64_t& granule : expected) granule *= kGranule;
    return live.listed().granules == expected;
  };
  live.add({10 * kGranule, 4 * kGranule, 1});
  live.add({14 * kGranule, kGranule + 512, 2});
  CHECK(!live.discard(9 * kGranule, 2 * kGranule) && !live.discard(15 * kGranule, kGranule) && !live.discard(0, 0));
  CHECK(!live.discard(10 * kGranule, ~0ull - kGranule + 1) && granules({10, 11, 12, 13, 14, 15}));
  CHECK(live.discard(11 * kGranule, 4 * kGranule) && granules({10, 15}) && live.listed().ranges.size() == 2);
  CHECK(live.contains(10 * kGranule, 5 * kGranule));  // copies may go there
  CHECK(live.bytes() == kGranule + 512);
  CHECK(live.discard(11 * kGranule, kGranule) && live.bytes() == kGranule + 512);  // once more
  live.reuse(12 * kGranule, kGranule);
  live.reuse(12 * kGranule, kGranule);
  CHECK(granules({10, 12, 15}) && live.bytes() == 2 * kGranule + 512);
  live.reuse(~0ull - kGranule + 1, kGranule);
  // Freed and allocated again, they are preserved.
  CHECK(live.remove(10 * kGranule) && granules({15}) && live.bytes() == 512);
  live.add({10 * kGranule, 4 * kGranule, 1});
  CHECK(granules({10, 11, 12, 13, 15}) && live.bytes() == 4 * kGranule + 512);
  live.remove_context(2);
  CHECK(live.discard(10 * kGranule, 4 * kGranule) && granules({}) && live.bytes() == 0);
  live.clear();
  live.add({10 * kGranule, kGranule, 1});
  CHECK(granules({10}));
}

std::vector<std::byte> record_of(size_t bytes, int content) { return {bytes, static_cast<std::byte>(content)}; }

// They are listed in the order in which they happened, and while somebody keeps them.
void stored_records() {
  StoredRecords records;
  const auto listed = [&](const std::vector<std::vector<std::byte>>& expected) {
    std::vector<std::vector<std::byte>> found;
    for (const std::span<const std::byte> record : records.list()) found.emplace_back(record.begin(), record.end());
    return found == expected && records.list().size() == expected.size();
  };
  CHECK(listed({}));
  auto third = records.keep(30, record_of(5, 3));
  auto first = records.keep(10, record_of(0, 1));
  CHECK(listed({record_of(0, 1), record_of(5, 3)}));
  {
    const auto second = records.keep(20, record_of(9, 2));
    CHECK(listed({record_of(0, 1), record_of(9, 2), record_of(5, 3)}));
  }
  CHECK(listed({record_of(0, 1), record_of(5, 3)}));
  first = records.keep(40, record_of(2, 4));  // set again
  CHECK(listed({record_of(5, 3), record_of(2, 4)}));
  std::vector<StoredRecords::Kept> all;
  all.push_back(std::move(third));
  all.push_back(std::move(first));
  CHECK(listed({record_of(5, 3), record_of(2, 4)}));
  all[0] = {};
  CHECK(listed({record_of(2, 4)}));
  all.clear();
  CHECK(listed({}));
}

Result<Request> parse(std::string_view text, size_t fds = 0) {
  std::vector<ipc::UniqueFd> given;
  for (size_t i = 0; i < fds; ++i) given.emplace_back(::dup(2));
  auto request = parse_request(std::as_bytes(std::span(text)), std::move(given));
  CHECK(request || !request.why().empty());
  return request;
}

void requests() {
  CHECK(std::holds_alternative<Go>(*parse(R"({"type":"go"})")));
  CHECK(!parse(R"({"type":"go","more":1})") && !parse(R"({"type":"go"})", 1) && !parse("{") && !parse("[]"));
  CHECK(!parse(R"({"type":"nothing"})") && !parse(R"({"type":7})") && !parse("") && !parse("{}"));
  const char* assign =
      R"({"type":"assign","job":"a","mode":"recover","client_pid":12,"snapshot_cost":0.01,
          "deliver":{"sequence":18446744073709551615,"error":719},
          "careful":{"after":5,"until":9},
          "injections":[{"id":1,"point":"snapshot","kind":"hang","sequence":3,"error":0}]})";
  const auto request = parse(assign, 5);
  CHECK(request && std::get<Assign>(*request).deliver->sequence == ~0ull);
  CHECK(std::get<Assign>(*request).careful->after == 5 && std::get<Assign>(*request).careful->until == 9);
  CHECK(std::get<Assign>(*request).injections.at(0).point == device::InjectPoint::kSnapshot);
  CHECK(!parse(assign, 4) && !parse(assign, 6));
  CHECK(!parse(R"({"type":"assign","job":"a","mode":"fresh","client_pid":-1,"snapshot_cost":0.01})", 5));
  CHECK(!parse(R"({"type":"assign","job":"a","mode":"fresh","client_pid":1,"snapshot_cost":0})", 5));
  CHECK(!parse(R"({"type":"assign","job":"a","mode":"fresh","client_pid":1,"snapshot_cost":1,"hang_timeout":-1})", 5));
  CHECK(!parse(R"({"type":"assign","job":"a","mode":"fresh","client_pid":1,"snapshot_cost":1,"hang_timeout":"x"})", 5));
  CHECK(!parse(R"({"type":"assign","job":"a","mode":"fresh","client_pid":99999999999,"snapshot_cost":1})", 5));
  const char* memory =
      R"({"type":"memory","op":"add","id":1,"kind":"shadow","ordinal":0,"address":4096,"bytes":1,"name":"host"})";
  CHECK(std::get<MemoryAdd>(*parse(memory, 1)).memory.kind == HostedKind::kShadow);
  CHECK(!parse(memory));
  const char* replica =
      R"({"type":"replica_memory","id":1,"kind":"shadow","ordinal":0,"address":4096,"bytes":1,"name":"","foreign":false})";
  CHECK(std::get<ReplicaMemory>(*parse(replica, 1)).memory.address == 4096 && !parse(replica) && !parse(replica, 2));
  CHECK(parse(R"({"type":"replica_rank"})", 2) && !parse(R"({"type":"replica_rank"})", 1));
  CHECK(parse(R"({"type":"replicas_named"})") && !parse(R"({"type":"replicas_named"})", 1));
  CHECK(!std::get<Pause>(*parse(R"({"type":"pause"})")).at_snapshot);
  CHECK(std::get<Pause>(*parse(R"({"type":"pause","snapshot":true})")).at_snapshot && !parse(R"({"type":"pause","snapshot":1})"));
  CHECK(std::get<CopySnapshot>(*parse(R"({"type":"copy_snapshot","number":7})")).number == 7 && !parse(R"({"type":"copy_snapshot"})"));
  CHECK(std::get<CopySnapshot>(*parse(R"({"type":"copy_snapshot","number":7,"since":5})")).since == 5);
  CHECK(std::get<GroupTake>(*parse(R"({"type":"group_take","round":3,"pauses":true})")).pauses);
  CHECK(parse(R"({"type":"forget_snapshot_copy"})") && !parse(R"({"type":"forget_snapshot_copy","number":7})"));
  CHECK(std::get<Continue>(*parse(R"({"type":"continue","if_paused":true})")).if_paused && !std::get<Continue>(*parse(R"({"type":"continue"})")).if_paused);
  CHECK(std::get<CopyUnique>(*parse(R"({"type":"copy_unique","bytes":7})")).bytes == 7 && !parse(R"({"type":"copy_unique"})"));
  CHECK(!parse(R"({"type":"memory","op":"add","id":1,"kind":"device","ordinal":8,"address":4096,"bytes":1})", 1));
}

void records() {
  alignas(8) std::byte space[512] = {};
  auto* const head = reinterpret_cast<journal::RecordHeader*>(space);
  const auto reset = [&] {
    std::memset(static_cast<void*>(space), 0, sizeof(space));
    head->op = static_cast<uint16_t>(Op::cuStreamSynchronize);
    head->flags = journal::kSynchronous;
    head->sequence = 5;
    head->size = sizeof(journal::RecordHeader) + 8 + 16 + 8;
    head->payload = 9;
    head->reply = 8;
  };
  Record record;
  const char* why = nullptr;
  const auto loads = [&](uint64_t available = 512) { return record.load(space, available, 5, 1, why); };
  reset();
  CHECK(loads() && record.payload().size() == 9 && record.reply_space().data() == space + 56 + 8 + 16);
  CHECK(record.stored().size() == 64 && !record.replied());
  Record stored;
  const std::vector<std::byte> kept = record.stored();
  CHECK(stored.load_stored(kept) && stored.sequence() == 5 && stored.payload().empty());
  CHECK(!stored.load_stored(std::span(kept).first(63)));
  head->state = journal::kReplied | journal::kWaiter;
  CHECK(loads() && record.replied());
  const auto refuses = [&](auto&& damage) {
    reset();
    damage();
    CHECK(!loads() && why);
  };
  refuses([&] { head->size = 57; });
  refuses([&] { head->size = 520; });
  refuses([&] { head->size = 0; });
  refuses([&] { head->op = 0; });
  refuses([&] { head->op = static_cast<uint16_t>(Op::kCount); });
  refuses([&] { head->sequence = 6; });
  refuses([&] { head->thread = journal::kMaxThreads; });
  refuses([&] { head->ordinal = 1; });
  refuses([&] { head->flags = 0; });
  refuses([&] { head->payload = 0xffffffff; });
  refuses([&] { head->reply = 0xfffffff9; });
  reset();
  CHECK(!loads(55) && !loads(80));
}

constexpr uint64_t kMs = 1'000'000;

// A device that works all the time, so that the replay grows with time; no memory, and nothing constant.
SnapshotPolicy::Now working(uint64_t time, uint64_t since) { return {time, time - since, 0, true, 0}; }

// It has taken many that cost as much, one after the other: nothing is owed any more.
SnapshotPolicy settled(uint64_t cost) {
  SnapshotPolicy policy(200 * kMs, 0.01);
  policy.start(0);
  for (int i = 0; i < 40; ++i) policy.taken(0, cost, 0);
  return policy;
}

void policy() {
  SnapshotPolicy first(200 * kMs, 0.01);
  first.start(1000 * kMs);
  CHECK(!first.due(working(1000 * kMs, 1000 * kMs)) && first.due(working(1020 * kMs, 1000 * kMs)));
  CHECK(first.overdue(working(1025 * kMs, 1000 * kMs)));
  const SnapshotPolicy dear = settled(6 * kMs);  // 6 ms at 1 %: every 600 ms, although the stall is beyond its bound by then
  CHECK(!dear.due(working(599 * kMs, 0)) && dear.due(working(600 * kMs, 0)));
  CHECK(!dear.overdue(working(699 * kMs, 0)) && dear.overdue(working(700 * kMs, 0)));
  // But not beyond five bounds, for which four times the cap may be spent.
  const SnapshotPolicy dearer = settled(20 * kMs), dearest = settled(100 * kMs);
  CHECK(!dearer.overdue(working(999 * kMs, 0)) && dearer.overdue(working(1000 * kMs, 0)));
  CHECK(!dearest.overdue(working(2'499 * kMs, 0)) && dearest.overdue(working(2'500 * kMs, 0)));
  SnapshotPolicy policy = settled(kMs);  // every 100 ms, as far as the cap goes: the bound decides
  CHECK(!policy.due(working(99 * kMs, 0)) && policy.due(working(100 * kMs, 0)));
  CHECK(!policy.overdue(working(199 * kMs, 0)) && policy.overdue(working(200 * kMs, 0)));
  // What was done while the device rested for most of the time is replayed quickly.
  CHECK(!policy.due({900 * kMs, 99 * kMs, 0, false, 0}) && policy.due({900 * kMs, 100 * kMs, 0, false, 0}));
  CHECK(policy.due({1'000 * kMs, 1, 0, false, 0}));  // once a second in any case
  // The constant part of a recovery belongs to the stall.
  CHECK(policy.due({300 * kMs, 60 * kMs, 80 * kMs, true, 0}) && !policy.due({300 * kMs, 59 * kMs, 80 * kMs, true, 0}));
  CHECK(policy.overdue({300 * kMs, 120 * kMs, 80 * kMs, true, 0}) && !policy.overdue({300 * kMs, 119 * kMs, 80 * kMs, true, 0}));
  CHECK(!policy.overdue({300 * kMs, 49 * kMs, 999 * kMs, true, 0}));  // where nothing is left of the bound
  for (uint64_t now = 100 * kMs; now < 200 * kMs; now += kMs) {      // no good moment comes
    CHECK(policy.due(working(now, 0)) && !policy.overdue(working(now, 0)));
    policy.busy(now);
    CHECK(!policy.due(working(now + 1000, 0)));
  }
  CHECK(policy.overdue(working(200 * kMs, 0)));
  policy.taken(0, 10, 0);  // never more often than this
  CHECK(!policy.due({49 * kMs, 300 * kMs, 0, true, 0}) && policy.due({50 * kMs, 300 * kMs, 0, true, 0}));
  // Whoever sleeps is woken in time.
  CHECK(policy.due_at({60 * kMs, 40 * kMs, 0, true, 0}) == 120 * kMs);
  CHECK(policy.due_at({60 * kMs, 40 * kMs, 0, false, 0}) == 1'000 * kMs && policy.due_at({10, 0, 300 * kMs, true, 0}) >= 50 * kMs);
  CHECK(SnapshotPolicy::needs_room(75, 1, 100, false, false) && !SnapshotPolicy::needs_room(74, 74, 100, false, false));
  CHECK(SnapshotPolicy::needs_room(50, 25, 100, true, false) && SnapshotPolicy::needs_room(50, 1, 100, true, true));
  CHECK(!SnapshotPolicy::needs_room(100, 0, 100, true, true));
}

// A single dear one is paid for bit by bit: the next comes a quarter later than it would have, and so do those after it.
void policy_owes() {
  const auto due_after = [](const SnapshotPolicy& policy, uint64_t since) {
    uint64_t ms = 0;
    while (!policy.due(working(since + ms * kMs, since))) ++ms;
    return ms;
  };
  SnapshotPolicy policy = settled(2 * kMs);
  CHECK(due_after(policy, 0) == 200);
  uint64_t now = 1'000 * kMs;
  policy.taken(now, 2 * kMs, 0);
  policy.taken(now, 12 * kMs, 0);  // 10 more than usual: 20 intervals of 250 ms
  for (int i = 0; i < 20; ++i) {
    CHECK(due_after(policy, now) == 250);
    now += 250 * kMs;
    policy.taken(now, 2 * kMs, 0);
  }
  CHECK(due_after(policy, now) == 200);
  // Time in which there was none pays, too.
  policy.taken(now, 12 * kMs, 0);
  CHECK(due_after(policy, now) == 250);
  now += 1'250 * kMs;
  policy.taken(now, 2 * kMs, 0);
  CHECK(due_after(policy, now) == 200);
  // More than 20 ms is paid at once, but not for longer than a second.
  policy.taken(now, 28 * kMs, 0);
  CHECK(due_after(policy, now) == 800);
  SnapshotPolicy patient = settled(2 * kMs);
  patient.taken(0, 500 * kMs, 0);
  CHECK(due_after(patient, 0) == 1'000);
  // Those of a new server, beside which the next standby starts, say little of the usual.
  SnapshotPolicy fresh(200 * kMs, 0.01);
  fresh.start(0);
  fresh.taken(0, 0, 0);  // of the first one nothing is known
  CHECK(due_after(fresh, 0) == 100);
  fresh.taken(0, 6 * kMs, 0);
  CHECK(due_after(fresh, 0) == 250);
  fresh.taken(0, 6 * kMs, 0);
  CHECK(due_after(fresh, 0) == 250);
  fresh.taken(0, 6 * kMs, 0);
  CHECK(due_after(fresh, 0) == 750);
}

// A program that needs its memory within a step gets its snapshots where it does not.
void cheap_positions() {
  SnapshotPolicy policy(200 * kMs, 0.01);
  policy.start(0);
  policy.taken(0, kMs, 0);
  const auto live_at = [](uint64_t ms) { return ms % 30 < 2 ? 2ull << 30 : 8ull << 30; };
  uint64_t taken_at = 0;
  for (uint64_t ms = 1; ms < 200 && taken_at == 0; ++ms) {
    policy.saw(live_at(ms));
    const SnapshotPolicy::Now now{ms * kMs, ms * kMs, 0, true, live_at(ms)};
    CHECK(!policy.overdue(now));
    if (policy.due_here(now)) taken_at = ms;
  }
  CHECK(taken_at == 120);  // half of the bound, and then the end of a step
  // Idle moments are no better.
  CHECK(!policy.due({140 * kMs, 140 * kMs, 0, true, 8ull << 30}) && policy.due({140 * kMs, 140 * kMs, 0, true, 2ull << 30}));
  // Where memory does not differ there is nothing to wait for, and no reason to stop a device that works.
  SnapshotPolicy level(200 * kMs, 0.01);
  level.start(0);
  level.taken(0, kMs, 0);
  level.saw(8ull << 30);
  CHECK(!level.due_here({150 * kMs, 150 * kMs, 0, true, 8ull << 30}) && level.due({150 * kMs, 150 * kMs, 0, true, 8ull << 30}));
}

// Whatever costs what, and whatever fails: nothing postpones the next snapshot by more than a second, and where the cap allows it
// the expected stall stays below the bound.
void policy_holds() {
  std::mt19937_64 chance(7);
  const auto between = [&](uint64_t low, uint64_t high) { return low + chance() % (high - low + 1); };
  for (int run = 0; run < 300; ++run) {
    const uint64_t bound = between(100, 1000) * kMs;
    const double cap = static_cast<double>(between(2, 40)) / 1000;
    const uint64_t constant = between(0, 60) * kMs, usual = between(50, 5'000) * 1000;
    const bool rests = run % 3 == 0, gives_up = run % 2 == 0;
    SnapshotPolicy policy(bound, cap);
    uint64_t now = 1000 * kMs, replay = 0, stopped = 0, spent = 0, snapshots = 0;
    policy.start(now);
    const uint64_t share = std::max(static_cast<uint64_t>(static_cast<double>(usual) / cap), 50 * kMs);
    const uint64_t room = std::max(bound - constant, 50 * kMs);
    uint64_t latest = now + 1'000 * kMs;   // for the next one to be overdue
    uint64_t excused = now + 2'000 * kMs;  // until then a dear snapshot, a give-up or the beginning explains a long stall
    const uint64_t began = now, end = now + 30'000 * kMs;
    uint64_t dear = 0, patience = 0;
    while (now < end) {
      now += kMs;
      replay += kMs;
      const SnapshotPolicy::Now known{now, replay, constant, true, 0};
      if (stopped == 0) {
        const bool idle = rests && chance() % 10 == 0;
        const bool overdue = policy.overdue(known);
        if (!overdue) CHECK(now <= latest);
        if (!(idle && policy.due(known)) && !overdue) continue;
        stopped = now;
        patience = policy.patience(now);
        CHECK(patience >= 150 * kMs && patience <= 1'000 * kMs);
      }
      if (gives_up && chance() % 100 != 0) {
        if (now - stopped < patience) continue;
        policy.gave_up(now, now - stopped);
        stopped = 0;
        latest = now + 1'000 * kMs;
        excused = now + 2'000 * kMs;
        continue;
      }
      const bool at_once = stopped == now;  // what the device needs to finish comes on top, until it is known
      if (at_once && now > excused && share + share / 4 < room / 2) CHECK(replay <= room);
      const bool outlier = ++snapshots % 17 == 0;
      const uint64_t cost = outlier ? between(20, 400) * kMs : usual;
      now += cost;
      if (outlier) {
        excused = now + 2'000 * kMs;
        dear += cost;
      } else {
        spent += cost;
      }
      policy.taken(now, cost, now - stopped - cost);
      // As the cap or the bound alone would have it, a quarter more for what is owed, and a second for one that was dear.
      latest = now + std::max(share + share / 4 + std::min(share / 4, 100 * kMs), room) + (outlier ? 1'000 * kMs : kMs);
      replay = 0;
      stopped = 0;
    }
    // What snapshots cost as a rule stays within the cap.
    CHECK(static_cast<double>(spent) <= 1.1 * cap * static_cast<double>(now - began) + 2.0 * static_cast<double>(usual) ||
          share * 4 > 5 * bound);
    CHECK(snapshots > 5 && dear < now);
  }
}

// The expected stall: what is counted, what is learnt, and what a program that writes into the header can do.
void stall() {
  journal::StallWords words{};
  Stall one(40 * kMs);
  one.start(words, 200 * kMs, 1'000 * kMs);
  CHECK(one.expected() == 40 * kMs && words.bound == 200 * kMs && words.reported_at == 1'000 * kMs && words.working == 0);
  one.passed(1'010 * kMs, true, true);  // the executor has worked
  one.passed(1'050 * kMs, false, true);  // the device has
  one.slept(1'060 * kMs);                // still
  CHECK(one.replay() == 60 * kMs && words.working == 1 && words.replay == 60 * kMs);
  one.passed(1'061 * kMs, false, false);  // it is found idle
  one.passed(1'500 * kMs, false, false);
  one.slept(3'000 * kMs);
  CHECK(one.replay() == 61 * kMs && words.working == 0 && words.reported_at == 3'000 * kMs);
  one.passed(3'001 * kMs, true, true);
  CHECK(one.expected() == 102 * kMs);
  one.snapshot(3'010 * kMs, 5 * kMs);
  CHECK(one.expected() == 40 * kMs && words.peak == 102 * kMs && words.spent == 5 * kMs && words.working == 0);
  one.passed(3'110 * kMs, true, true);
  CHECK(words.replay == 100 * kMs && words.working == 1);

  // It dies. 80 ms later its memory is back, and the replay takes half as long as the work did.
  Stall two(40 * kMs);
  two.start_replay(words, 200 * kMs, 3'190 * kMs);
  CHECK(two.constant() == 80 * kMs && two.replay() == 100 * kMs && words.spent == 5 * kMs);
  two.passed(3'240 * kMs, true, true);
  CHECK(two.replay() == 100 * kMs && words.working == 0);  // a server that dies now leaves all of it to do
  two.replayed(3'240 * kMs);
  CHECK(words.correction == 750 && two.replay() == 75 * kMs);
  two.passed(3'280 * kMs, true, true);
  CHECK(two.replay() == 105 * kMs && two.expected() == 185 * kMs);
  // Once more, after 40 ms: the mean of both.
  Stall three(40 * kMs);
  three.start_replay(words, 200 * kMs, 3'320 * kMs);
  CHECK(three.constant() == 60 * kMs);
  three.passed(3'380 * kMs, true, true);
  three.snapshot(3'390 * kMs, 10 * kMs);  // in the replay: what is left of it
  CHECK(words.replay == 80 * kMs && words.spent == 15 * kMs);
  three.passed(3'440 * kMs, true, true);
  three.replayed(3'440 * kMs);
  CHECK(words.correction == (750 + 110'000 / 140) / 2);

  // It was drained and stood still: no time that comes again.
  three.passed(3'450 * kMs, true, true);
  const uint64_t before = three.replay();
  three.rested(4'000 * kMs);
  CHECK(three.replay() == before && words.working == 0);
  // It dies while nothing happens: nobody knows when, and nothing is learnt from it.
  three.passed(4'500 * kMs, false, false);
  Stall four(40 * kMs);
  four.start_replay(words, 200 * kMs, 9'000 * kMs);
  CHECK(four.constant() == 60 * kMs && four.replay() > 0);
  // It dies in a snapshot, and the device's memory is its content: nothing is to be done again.
  Stall in_snapshot(40 * kMs);
  in_snapshot.start_replay(words, 200 * kMs, 9'000 * kMs, false);
  CHECK(in_snapshot.replay() == 0 && words.replay == 0);

  // The program has written there.
  for (auto* word : {&words.reported_at, &words.working, &words.replay, &words.correction, &words.constant, &words.spent,
                     &words.recoveries}) {
    *word = ~0ull;
  }
  Stall five(40 * kMs);
  five.start_replay(words, 200 * kMs, 9'000 * kMs);
  five.passed(9'001 * kMs, true, true);
  five.replayed(9'002 * kMs);
  CHECK(five.constant() <= 2'000 * kMs && five.replay() <= 8 * 3'600'000 * kMs && five.expected() >= five.replay());
}

// Pieces are as large as fits into their time, and get there from a small one.
void pace() {
  const auto settled = [](uint64_t ns_each) {
    Pace pace(10'000'000, 256);
    for (int i = 0; i < 10; ++i) pace.took(pace.size(), pace.size() * ns_each);
    return pace.size();
  };
  CHECK(settled(100'000) == 100);
  CHECK(settled(1'000'000) == 10);
  CHECK(settled(0) == 256 && settled(1) == 256);
  CHECK(settled(1'000'000'000) == 4);
  Pace pace(10'000'000, 256);
  const size_t first = pace.size();
  CHECK(first < 256);
  pace.took(first - 1, 1'000'000'000);
  CHECK(pace.size() == first);
  pace.took(first, 0);
  CHECK(pace.size() == 2 * first);
}

void intake() {
  Intake intake{DriverTable{}};
  CHECK(!intake.is_written(0, ~0ull));
  intake.will_write(100, 10);
  intake.will_write(120, 10);
  CHECK(intake.is_written(109, 1) && intake.is_written(90, 11) && intake.is_written(0, 1000));
  CHECK(!intake.is_written(110, 10) && !intake.is_written(90, 10) && !intake.is_written(130, 10));
  intake.will_write(105, 15);  // closes the gap
  CHECK(intake.is_written(110, 1) && intake.is_written(115, 100) && !intake.is_written(130, 1));
  intake.will_write(200, 0);
  CHECK(!intake.is_written(190, 20));
  intake.drained();
  CHECK(!intake.is_written(100, 30));
  for (uint64_t i = 0; i < 2000; ++i) intake.will_write(i * 10, 1);
  CHECK(intake.is_written(5, 1));  // too many to tell apart
  intake.drained();
  CHECK(!intake.is_written(0, 1));
  intake.may_write_all();
  CHECK(intake.is_written(7, 1));
}

// What a device has done so far is known from its marks alone: they are written when the test says so.
struct Marks {
  struct Mark {
    CUstream stream;
    CUdeviceptr address;
    uint64_t value;
  };
  static inline std::vector<Mark> pending;
  static inline CUstream idle = nullptr;  // has nothing to do

  static DriverTable driver() {
    DriverTable table{};
    table.cuMemHostRegister_v2 = [](void*, size_t, unsigned) { return CUDA_SUCCESS; };
    table.cuMemHostUnregister = [](void*) { return CUDA_SUCCESS; };
    table.cuStreamQuery = [](CUstream stream) { return stream == idle ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY; };
    table.cuStreamWriteValue64_v2 = [](CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned) {
      pending.push_back({stream, address, value});
      return CUDA_SUCCESS;
    };
    return table;
  }
  // The stream's work is done up to its next mark.
  static void advance(CUstream stream) {
    const auto next = std::find_if(pending.begin(), pending.end(), [&](const Mark& m) { return m.stream == stream; });
    CHECK(next != pending.end());
    *reinterpret_cast<uint64_t*>(next->address) = next->value;
    pending.erase(next);
  }
};

void progress() {
  const DriverTable driver = Marks::driver();
  Progress progress(driver);
  const auto stream = [](uintptr_t number) { return reinterpret_cast<CUstream>(number); };
  const auto enqueue = [&](uintptr_t number, uint64_t first, uint64_t last) {
    for (uint64_t i = first; i <= last; ++i) CHECK(progress.enqueued(stream(number), 0, i) == CUDA_SUCCESS);
  };
  CHECK(!progress.unfinished() && progress.done() == ~0ull);
  progress.idle(10);
  enqueue(1, 11, 11);
  CHECK(progress.unfinished() && progress.done() == 10);
  enqueue(1, 12, 300);  // two marks on the way
  CHECK(Marks::pending.size() == 2 && progress.done() == 10);
  uint64_t before = progress.signature();
  Marks::advance(stream(1));
  CHECK(progress.signature() != before && progress.done() > 100 && progress.done() < 200);
  Marks::advance(stream(1));
  const uint64_t reached = progress.done();
  CHECK(reached > 200 && reached < 300);
  // Another stream, busy with something later, hides nothing; an earlier one does.
  enqueue(2, 301, 301);
  CHECK(progress.done() == reached);
  progress.idle(301);
  CHECK(!progress.unfinished() && progress.done() == ~0ull);
  enqueue(2, 302, 302);
  enqueue(1, 303, 900);
  while (std::any_of(Marks::pending.begin(), Marks::pending.end(), [](auto& m) { return m.stream != nullptr; })) {
    Marks::advance(stream(1));
  }
  CHECK(progress.done() == 301);
  // The work of a stream that is destroyed still counts, and who gets its handle next begins anew.
  progress.destroyed(stream(2));
  enqueue(2, 901, 901);
  CHECK(progress.done() == 301);
  Marks::advance(stream(2));
  CHECK(progress.done() > 600 && progress.done() < 901);
  // More streams than there are places: nothing is known of their work, and nothing is made up.
  progress.idle(1000);
  for (uintptr_t i = 100; i < 1100; ++i) enqueue(i, 1001 + i, 1001 + i);
  CHECK(progress.done() == 1100);
}

// Otherwise a program that has waited for a stream could be answered that it has work again.
void what_is_done_gets_no_mark() {
  const DriverTable driver = Marks::driver();
  Progress progress(driver);
  Marks::pending.clear();
  const auto first = reinterpret_cast<CUstream>(1), second = reinterpret_cast<CUstream>(2);
  CHECK(progress.enqueued(first, 0, 1) == CUDA_SUCCESS && progress.enqueued(second, 0, 2) == CUDA_SUCCESS);
  Marks::idle = first;
  CHECK(progress.mark_all([](uint32_t) {}) == CUDA_SUCCESS);
  CHECK(Marks::pending.size() == 1 && Marks::pending[0].stream == second && progress.done() != Progress::kAll);
  Marks::advance(second);
  CHECK(progress.done() == Progress::kAll);
  Marks::idle = nullptr;
}

void watchdog() {
  using namespace std::chrono_literals;
  using On = Watchdog::On;
  std::atomic<On> on{On::kDevice};
  std::atomic<bool> moves{true}, stuck{false};
  std::atomic<uint64_t> signature{1}, looks{0}, bites{0}, reports{0};
  const auto look = [&]() -> Watchdog::Look {
    ++looks;
    if (moves) ++signature;
    return {on, signature};
  };
  const auto report = [&](bool is) {
    ++reports;
    stuck = is;
  };
  Watchdog dog(40ms, look, [&] { ++bites; }, report);
  const auto wait_looks = [&](uint64_t more) {
    for (const uint64_t until = looks + more; looks < until;) std::this_thread::sleep_for(1ms);
  };
  wait_looks(30);  // progress
  CHECK(bites == 0);
  on = On::kNothing;  // first: what is under way and does not move is what it bites for
  moves = false;
  wait_looks(30);  // nothing to do
  CHECK(bites == 0);
  on = On::kRanks;
  wait_looks(30);  // whoever it is that hangs
  CHECK(bites == 0 && stuck && reports == 1);
  ++signature;
  wait_looks(3);
  CHECK(!stuck && reports == 2);
  wait_looks(30);
  CHECK(bites == 0 && stuck && reports == 3);
  on = On::kDevice;  // and from now on it is the time for this that counts
  wait_looks(3);
  CHECK(bites == 0 && !stuck && reports == 4);
  wait_looks(30);  // neither progress nor an end
  CHECK(bites != 0 && reports == 4);
}

void options() {
  const auto parse_all = [](std::vector<const char*> arguments) {
    arguments.insert(arguments.begin(), "xmig-server");
    auto parsed = parse_options(static_cast<int>(arguments.size()), const_cast<char**>(arguments.data()));
    CHECK(parsed || !parsed.why().empty());
    return parsed;
  };
  const auto parsed = parse_all({"--device", "cpu:0,1", "--memory=4096", "--control-fd", "3", "--runtime-dir", "/run"});
  CHECK(parsed && parsed->device() == "cpu:0,1" && parsed->memory_bytes == 4096 && parsed->control_fd == 3);
  CHECK(!parse_all({}) && !parse_all({"--device", "cpu", "--control-fd", "3"}));
  CHECK(!parse_all({"--device", "cpu:x", "--control-fd", "3"}) && !parse_all({"--device"}) && !parse_all({"--what", "1"}));
  CHECK(!parse_all({"--device", "cpu:0,0,0,0,0,0,0,0,0", "--control-fd", "3"}));
}

// Two numbers side by side among a kernel's parameters do not look like an address of page-locked memory.
void numbers_are_no_addresses() {
  const auto looks_pinned = [](uint64_t high, uint64_t low) {
    return (high << 32 | low) - journal::kPinnedBase < journal::kPinnedBytes;
  };
  for (const uint64_t step : {128, 1000, 1024}) {
    for (uint64_t high = 0; high <= 1 << 17; high += step) CHECK(!looks_pinned(high, 0) && !looks_pinned(high, 8192));
  }
  CHECK(looks_pinned(journal::kPinnedBase >> 32, journal::kPinnedBase & 0xffffffff));
}

void only_streams_with_work_are_requested() {
  Working working;
  const auto stream = [](uintptr_t number) { return reinterpret_cast<CUstream>(number); };
  std::vector<CUstream> requested;
  const auto ask = [&](auto&& busy) {
    requested.clear();
    return working.ask(1, [&](CUstream one) {
      requested.push_back(one);
      return busy(one);
    });
  };
  for (uintptr_t i = 1; i <= 33; ++i) working.add(stream(i), 1);
  working.add(stream(99), 0);
  CHECK(ask([&](CUstream one) { return one == stream(7); }) == std::vector{stream(7)});
  CHECK(requested.size() == 34 && std::count(requested.begin(), requested.end(), nullptr) == 1);
  working.add(stream(3), 1);
  working.add(stream(7), 1);
  CHECK(ask([&](CUstream one) { return one != nullptr; }).size() == 2 && requested.size() == 3);
  working.forget(stream(7));
  CHECK(ask([](CUstream) { return false; }).empty() && requested.size() == 2);
  CHECK(ask([](CUstream) { return true; }) == std::vector{stream(0)} && requested.size() == 1);
  working.add(stream(5), 1);
  working.clear();
  CHECK(ask([](CUstream) { return false; }).empty() && requested.size() == 1);
}

void hexadecimal() {
  std::byte all[256], read[256];
  for (size_t i = 0; i < 256; ++i) all[i] = std::byte(i);
  const std::string text = to_hex(all);
  CHECK(text.size() == 512 && text.starts_with("000102") && text.ends_with("fdfeff"));
  CHECK(from_hex(text, read) && std::equal(all, all + 256, read));
  CHECK(to_hex({}).empty() && from_hex("", {}));
  const auto pair = std::span(read).first(2);
  CHECK(!from_hex("0aF0", pair) && !from_hex("0ag0", pair) && !from_hex("0af", pair));
  CHECK(!from_hex("0af00", pair) && !from_hex("0x00", pair) && !from_hex(std::string_view("00\00a", 4), pair));
  CHECK(from_hex("0af0", pair) && pair[0] == std::byte{0x0a} && pair[1] == std::byte{0xf0});
}

// What nobody wants any more holds nobody up, whether that is known before a rank begins to wait or while it does.
void meetings() {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::seconds kForEver{600};
  Daemon nobody;
  Meetings meetings(nobody, "");
  std::atomic<bool> unwanted{true};
  const auto waits = [&] { return meetings.attend("meeting", 0, 2, "offer", kForEver, [&] { return unwanted.load(); }); };
  const auto began = Clock::now();
  CHECK(waits().why() == "it is not wanted any more");
  for (int i = 0; i < 200; ++i) {
    unwanted = false;
    std::thread other([&] {
      if (i % 2 != 0) std::this_thread::sleep_for(std::chrono::microseconds(50 * (i % 8)));
      unwanted = true;
      meetings.look_again();
    });
    CHECK(waits().why() == "it is not wanted any more");
    other.join();
  }
  CHECK(Clock::now() - began < kForEver / 10);
  // The answer that all have come stands, though an earlier one comes behind it.
  unwanted = false;
  std::atomic<bool> met{false};
  std::thread rank([&] {
    const Result<std::vector<std::string>> offers = waits();
    CHECK(offers && offers->size() == 2);
    met = true;
  });
  while (!met) {
    meetings.met({"meeting", 0, {"offer", "other"}, "", ""});
    meetings.met({"meeting", 0, {}, "1", ""});
  }
  rank.join();
  meetings.close();
  CHECK(waits().why() == "the server ends");
}

// A server's communicators, and the daemon, which lets each rank find that it is the only one.
class Maker {
 public:
  Maker() {
    int ends[2];
    CHECK(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
    socket_ = ipc::UniqueFd(ends[0]);
    daemon_.attach(ipc::UniqueFd(ends[1]));
    CHECK(device_->start() && contexts_.open());
    Args_xmCommInit args{};
    args.ranks = 1;
    args.join_time = 60'000;
    name_ = meeting_of(place_of(args, {}).group, kJoin);
    std::vector<std::byte> stored(sizeof(journal::RecordHeader) + sizeof(args));
    journal::RecordHeader head{};
    head.op = static_cast<uint16_t>(Op::xmCommInit);
    head.flags = journal::kSynchronous;
    head.size = static_cast<uint32_t>(stored.size());
    std::memcpy(stored.data(), &head, sizeof(head));
    std::memcpy(stored.data() + sizeof(head), &args, sizeof(args));
    content_.objects.add(stored);
  }

  void prepare(uint64_t attempt) { made.prepare(attempt, name_, content_); }
  bool takes() {
    const auto real = made.take(name_, 0, [] {});
    if (real) real->abort();
    return real != nullptr;
  }
  // Whoever is being made waits for the daemon's answer.
  void waits() {
    const std::string before = waiting_.value("meeting", "");
    while (waiting_.value("meeting", "") == before) waiting_ = next("meet");  // offers are repeated
  }
  // Which of them is made, or is not and why. `first`: the one that waits is answered before.
  std::pair<uint64_t, std::string> result(bool first = true) {
    if (first) meetings_.met({waiting_["meeting"], 0, {waiting_["offer"]}, "", ""});
    const nlohmann::json result = next("communicator_prepared");
    return {result["attempt"], result["why"]};
  }

 private:
  nlohmann::json next(std::string_view type) {
    while (true) {
      std::array<std::byte, 4096> buffer;
      const ipc::Received received = ipc::receive_message(socket_.get(), buffer);
      CHECK(received.bytes != 0);
      const auto* const text = reinterpret_cast<const char*>(buffer.data());
      nlohmann::json message = nlohmann::json::parse(text, text + received.bytes);
      if (message["type"] == type) return message;
    }
  }

  static constexpr std::array<int, 1> kOrdinals{0};
  const std::unique_ptr<device::Device> device_ = device::open("cpu", kOrdinals, 1 << 20);
  ipc::UniqueFd socket_;
  Daemon daemon_;
  Log log_{daemon_};
  Contexts contexts_{*device_, 1};
  Meetings meetings_{daemon_, ""};
  SnapshotContent content_;
  std::string name_;
  nlohmann::json waiting_ = nlohmann::json::object();

 public:
  PreparedCommunicators made{*device_, contexts_, meetings_, daemon_, log_};
};

// A rank may take what one move has prepared when the next move, of it or of another, is being prepared already.
void prepared_communicators() {
  using Result = std::pair<uint64_t, std::string>;
  Maker maker;
  maker.prepare(1);
  maker.waits();
  CHECK((maker.result() == Result{1, ""}));
  maker.prepare(2);
  maker.prepare(3);
  maker.waits();
  const std::array<uint64_t, 1> first{1}, second{2};
  maker.made.use(first);
  CHECK(maker.takes() && !maker.takes());
  CHECK((maker.result() == Result{2, ""}));
  maker.waits();
  CHECK((maker.result() == Result{3, ""}));
  maker.made.use(second);
  maker.made.forget(3);
  CHECK(maker.takes());
  // Whoever wanted these is no more: what waits is not begun, and what is being made is given up.
  maker.prepare(4);
  maker.prepare(5);
  maker.waits();
  maker.made.forget_all();
  CHECK((maker.result(false) == Result{4, "it is not wanted any more"}));
  maker.prepare(6);
  maker.waits();
  CHECK((maker.result() == Result{6, ""}));
}

ipc::UniqueFd memory_of(size_t bytes) {
  ipc::UniqueFd fd(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CHECK(fd && ::ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0);
  return fd;
}

// A program that tries again at once, while its first try is being refused: the second is one of its own.
void refused_openings() {
  JobFds fds{memory_of(journal::kHeaderBytes + (4 << 20)), memory_of(journal::kStagingBytes), memory_of(1 << 20), {memory_of(0), memory_of(0)}};
  Result<server::Job> job = server::Job::map("test", ::getpid(), std::move(fds));
  CHECK(job);
  journal::JournalHeader& header = job->header();
  std::vector<journal::RecordHeader*> records;
  const auto append = [&] {
    auto* const record = reinterpret_cast<journal::RecordHeader*>(job->journal().at(header.tail.load()));
    record->op = static_cast<uint16_t>(Op::xmOpen);
    record->flags = journal::kSynchronous;
    record->size = sizeof(*record);
    records.push_back(record);
    header.tail.fetch_add(sizeof(*record));
  };
  const auto is_answered = [&](size_t i) { return (records[i]->state.load() & 0xff) == journal::kReplied; };
  FirstRecord first(*job);
  append();
  CHECK(first.wait());
  append();
  CHECK(first.refuse(2));
  CHECK(is_answered(0) && records[0]->result == 2 && !is_answered(1));
  CHECK(first.wait());
  CHECK(first.refuse(2));
  CHECK(is_answered(1) && records[1]->result == 2);
  first.give_up();
  CHECK(!first.wait());
}

}  // namespace

int main() {
  refused_openings();
  meetings();
  prepared_communicators();
  hexadecimal();
  snapshot_file();
  variable_directory();
  live_set();
  live_set_listed();
  live_set_discarded();
  stored_records();
  requests();
  records();
  policy();
  cheap_positions();
  policy_owes();
  policy_holds();
  stall();
  pace();
  intake();
  numbers_are_no_addresses();
  progress();
  what_is_done_gets_no_mark();
  only_streams_with_work_are_requested();
  watchdog();
  options();
  return 0;
}
