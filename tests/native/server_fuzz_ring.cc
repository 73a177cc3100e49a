// A journal of garbage, executed on the null device. The input is a run of records: one byte of operation, one of
// shape, then arguments and payload; what is not garbage by accident is made so by the bytes themselves.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "device/device.h"
#include "server/executor/executor.h"

namespace {

using namespace xmig;
using namespace xmig::server;

ipc::UniqueFd memfd(uint64_t bytes) {
  ipc::UniqueFd fd(::memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd || ::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) std::abort();
  return fd;
}

class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  bool empty() const { return size_ == 0; }
  uint8_t byte() {
    uint8_t value = 0;
    fill(&value, 1);
    return value;
  }
  void fill(void* to, size_t bytes) {
    const size_t have = std::min(bytes, size_);
    if (have != 0) std::memcpy(to, data_, have);
    data_ += have;
    size_ -= have;
  }

 private:
  const uint8_t* data_;
  size_t size_;
};

// Numbers in arguments that lead somewhere: handles and addresses near the beginning of their ranges.
void make_plausible(std::byte* arguments, size_t bytes, uint8_t shape) {
  for (size_t i = 0; i + 8 <= bytes; i += 8) {
    uint64_t word;
    std::memcpy(&word, arguments + i, sizeof(word));
    switch ((shape >> (i / 8 % 4 * 2)) & 3) {
      case 1: word = journal::make_handle(static_cast<journal::Kind>(1 + word % 11), (word >> 8) % 8); break;
      case 2: word = journal::kDeviceBase + word % 64 * (1 << 20); break;
      case 3: word = word % (8 << 20); break;
      default: break;
    }
    std::memcpy(arguments + i, &word, sizeof(word));
  }
}

bool waits_for_the_program(uint16_t op) {
  return op == static_cast<uint16_t>(Op::xmHostFunc) || op == static_cast<uint16_t>(Op::cuStreamWaitValue32_v2) ||
         op == static_cast<uint16_t>(Op::cuStreamWaitValue64_v2);
}

// There is no program here. Garbage in the headers makes records that wait for one, too, also of what was meant as another's
// payload: the journal is read as the server reads it, and ends at the first of them.
void end_before_waits(const journal::JournalMapping& journal) {
  const uint64_t tail = journal.header().tail.load();
  for (uint64_t at = 0; tail - at >= sizeof(journal::RecordHeader);) {
    auto* const head = reinterpret_cast<journal::RecordHeader*>(journal.at(at));
    if (waits_for_the_program(head->op)) head->op = static_cast<uint16_t>(Op::kNone);
    if (head->size == 0 || head->size % 8 != 0 || head->size > tail - at) return;
    at += head->size;
  }
}

void write_records(Input input, const journal::JournalMapping& journal) {
  uint64_t tail = 0, sequence = 0;
  while (!input.empty() && tail + (1 << 17) < journal.ring_bytes()) {
    const auto op = static_cast<uint16_t>(1 + input.byte() % (static_cast<uint16_t>(Op::kCount) - 1));
    const uint8_t shape = input.byte();
    if (waits_for_the_program(op)) continue;
    const OpInfo& info = kOpInfo[op];
    auto* const head = reinterpret_cast<journal::RecordHeader*>(journal.at(tail));
    std::memset(static_cast<void*>(head), 0, sizeof(*head));
    head->op = op;
    head->flags = info.call == CallClass::kSynchronous ? journal::kSynchronous : 0;
    head->sequence = ++sequence;
    head->context = 1;
    head->payload = shape & 1 ? input.byte() * 8u : 0;
    head->reply = shape & 2 ? 64 : 0;
    head->size = static_cast<uint32_t>(sizeof(*head) + journal::align8(info.args_bytes) + head->payload + head->reply);
    std::byte* const arguments = journal.at(tail) + sizeof(*head);
    std::memset(arguments, 0, head->size - sizeof(*head));
    input.fill(arguments, info.args_bytes);
    make_plausible(arguments, info.args_bytes, input.byte());
    input.fill(arguments + journal::align8(info.args_bytes), head->payload);
    if (shape == 0xff) input.fill(head, 48);  // the header, too
    const uint32_t size = sizeof(*head) + static_cast<uint32_t>(journal::align8(info.args_bytes));
    tail += std::max<uint64_t>(size, head->size) / 8 * 8 % (1 << 17) + (head->size == 0 ? size : 0);
  }
  journal.header().tail.store(tail);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const int ordinal = 0;
  static const auto device = device::open("null", std::span(&ordinal, 1), 1ull << 30);
  static Daemon daemon;
  static Log log(daemon);
  static Faults faults(*device, daemon);
  static Injector injector(*device, daemon, faults);
  static Contexts contexts(*device, 1);
  static ModulePreload preload(*device, contexts, log);
  static const bool opened = device->start() && contexts.open(0);
  if (!opened) std::abort();

  JobFds fds{memfd(journal::kHeaderBytes + (8 << 20)), memfd(journal::kStagingBytes), memfd(64 << 20), {memfd(0), memfd(0)}};
  auto job = Job::map("fuzz", ::getpid(), std::move(fds));
  if (!job) std::abort();
  Physical physical(*device, daemon, log);
  Meetings meetings(daemon, "");
  Membership membership(daemon);
  ReplicaSources replica_sources;
  StandbyMemory standby_memory(daemon);
  Profiling profiling;
  Sharing sharing;
  const Services services{*device, contexts, daemon, log, faults, injector, *job, meetings, membership,
                          replica_sources, standby_memory, profiling, sharing};
  PreparedCommunicators prepared(*device, contexts, meetings, daemon, log);
  Executor executor(services, *device, preload, prepared, physical, {.snapshot_cost = 1.0});
  if (!Executor::prepare_journal(services, *device) || !executor.start_fresh()) std::abort();
  write_records(Input(data, size), job->journal());
  end_before_waits(job->journal());
  executor.run_to_tail();
  return 0;
}
