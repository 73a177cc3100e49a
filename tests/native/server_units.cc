// The other parts of the server that need no device: requests, records, progress, the watchdog, options.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "check.h"
#include "common/hex.h"
#include "device/device.h"
#include "ipc/seqpacket.h"
#include "ops.h"
#include "server/channel/job.h"
#include "server/channel/requests.h"
#include "server/contexts.h"
#include "server/control/first_record.h"
#include "server/cuda/handlers/intake.h"
#include "server/executor/progress.h"
#include "server/executor/working.h"
#include "server/faults/watchdog.h"
#include "server/options.h"
#include "server/records/record.h"

namespace {

using namespace xmig;
using namespace xmig::server;

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
  CHECK(std::get<OpenDevices>(*parse(R"({"type":"open","devices":5})")).devices == 5);
  CHECK(!parse(R"({"type":"open"})") && !parse(R"({"type":"open","devices":-1})"));
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
  CHECK(std::get<ReplicasNamed>(*parse(R"({"type":"replicas_named","far":2})")).far == 2 && !parse(R"({"type":"replicas_named","far":2})", 1));
  CHECK(!parse(R"({"type":"replicas_named"})"));
  CHECK(std::get<ChunksBrought>(*parse(R"({"type":"chunks_brought","examined":3,"found":[0,2],"why":""})", 1)).found.size() == 2);
  CHECK(parse(R"({"type":"chunks_brought","examined":3,"found":[],"why":""})") && !parse(R"({"type":"chunks_brought","examined":3,"found":[],"why":""})", 1));
  CHECK(!parse(R"({"type":"chunks_brought","examined":3,"found":[3],"why":""})", 1) && !parse(R"({"type":"chunks_brought","examined":3,"found":[1,1],"why":""})", 1));
  CHECK(!parse(R"({"type":"chunks_brought","examined":3,"found":[1],"why":""})") && !parse(R"({"type":"chunks_brought","examined":513,"found":[1],"why":""})", 1));
  CHECK(!parse(R"({"type":"chunks_brought","examined":99,"found":[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16],"why":""})", 1));
  CHECK(std::get<ReadChunks>(*parse(R"({"type":"read_chunks","number":3,"chunks":[[1,2]]})", 1)).chunks.front().second == 2);
  CHECK(!parse(R"({"type":"read_chunks","number":3,"chunks":[[1]]})", 1) && !parse(R"({"type":"read_chunks","number":3,"chunks":[]})"));
  CHECK(!std::get<Pause>(*parse(R"({"type":"pause"})")).at_snapshot);
  CHECK(std::get<Pause>(*parse(R"({"type":"pause","snapshot":true})")).at_snapshot && !parse(R"({"type":"pause","snapshot":1})"));
  CHECK(std::get<CopySnapshot>(*parse(R"({"type":"copy_snapshot","number":7})")).number == 7 && !parse(R"({"type":"copy_snapshot"})"));
  CHECK(std::get<CopySnapshot>(*parse(R"({"type":"copy_snapshot","number":7,"since":5})")).since == 5);
  CHECK(std::get<CopySnapshot>(*parse(R"({"type":"copy_snapshot","number":7,"keep_bits":5})")).keep_bits == 5);
  CHECK(!parse(R"({"type":"copy_snapshot","number":7,"keep_bits":-1})"));
  CHECK(std::get<GroupTake>(*parse(R"({"type":"group_take","round":3,"pauses":true})")).pauses);
  CHECK(parse(R"({"type":"forget_snapshot_copy"})") && !parse(R"({"type":"forget_snapshot_copy","number":7})"));
  CHECK(std::get<Continue>(*parse(R"({"type":"continue","if_paused":true})")).if_paused && !std::get<Continue>(*parse(R"({"type":"continue"})")).if_paused);
  const char* unique = R"({"type":"copy_unique","snapshot":5,"bytes":7})";
  CHECK(std::get<CopyUnique>(*parse(unique)).bytes == 7 && std::get<CopyUnique>(*parse(unique)).snapshot == 5);
  CHECK(!parse(R"({"type":"copy_unique","bytes":7})") && !parse(R"({"type":"copy_unique","snapshot":5})"));
  CHECK(std::get<CopyUnique>(*parse(unique, 1)).elsewhere && !parse(unique, 2));
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
  // Where the journal ended at the answer; what is farther away than the mark can say is taken for nearer, never for farther.
  for (const uint64_t position : {uint64_t{0}, uint64_t{0x7fff8}, uint64_t{0x123456789a0}}) {
    for (const uint64_t appended : {uint64_t{80}, uint64_t{4096}, uint64_t{0x7fff8}}) {
      head->answered = journal::tail_mark(position + appended);
      CHECK(loads());
      record.lies_at(position);
      CHECK(record.answered_at() == position + appended);
    }
    head->answered = journal::tail_mark(position + 0x80050);
    CHECK(loads());
    record.lies_at(position);
    CHECK(record.answered_at() == position + 0x50);
  }
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
  const auto opens = [&](const char* which) { return parse_all({"--device", "cpu:0,1,2", "--control-fd", "3", "--open", which}); };
  CHECK(parsed->open == ~0ull && opens("late")->open == 0 && opens("1")->open == 0b10 && opens("0,2")->open == 0b101);
  CHECK(!opens("") && !opens("first") && !opens("0,") && !opens("64") && !opens("-1"));
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
  append();
  append();
  records[3]->ordinal = 1;
  CHECK(first.wait() && first.devices() == 0b1);
  CHECK(first.refuse(2));
  CHECK(is_answered(2) && !is_answered(3));  // another device may have room
  CHECK(first.wait() && first.devices() == 0b10);
  CHECK(first.refuse(2));
  CHECK(is_answered(3));
  first.give_up();
  CHECK(!first.wait());
}

// Each when it is needed, whatever its number; what goes over all goes over these.
void contexts() {
  const int ordinals[] = {0, 1, 2, 3};
  const auto device = device::open("null", ordinals, 1 << 30);
  CHECK(device->start());
  Contexts contexts(*device, 4);
  std::vector<uint32_t> heard;
  contexts.hear([&](uint32_t ordinal) { heard.push_back(ordinal); });
  CHECK(contexts.opened() == 0 && contexts.count() == 4 && !contexts.is_open(0));
  CHECK(contexts.open_all(0) && contexts.opened() == 0);
  CHECK(contexts.open(2) && contexts.open(2) && contexts.home() == 2);
  CHECK(contexts.is_open(2) && !contexts.is_open(0) && !contexts.is_open(4) && !contexts.is_open(64));
  CHECK(contexts.open_all(0b10101) && contexts.opened() == 0b101 && contexts.home() == 2);  // there is no fifth
  contexts.use(3);
  CHECK(contexts.try_open(3) && contexts.real(3) != contexts.real(2));
  CHECK((heard == std::vector<uint32_t>{2, 0, 3}));
}

}  // namespace

int main() {
  contexts();
  refused_openings();
  hexadecimal();
  requests();
  records();
  intake();
  numbers_are_no_addresses();
  progress();
  what_is_done_gets_no_mark();
  only_streams_with_work_are_requested();
  watchdog();
  options();
  return 0;
}
