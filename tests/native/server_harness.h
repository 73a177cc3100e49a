// A program and a daemon in one process, for tests of xmig-server: records are written by hand, and whoever dies is
// replaced at once.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "ipc/fd.h"
#include "ipc/seqpacket.h"
#include "journal/clock.h"
#include "journal/futex.h"
#include "journal/mapping.h"
#include "journal/module_info.h"
#include "journal/ring.h"
#include "ops.h"

namespace harness {

using namespace xmig;
using Json = nlohmann::json;

struct Setup {
  std::string server;  // path of xmig-server
  std::string kernels;  // path of the kernels' shared object
  bool preload = false;  // who takes a lost server's place has mapped its memory and loaded its modules beforehand
  bool mistaken = false;  // and was informed of other memory under the same numbers, and of some that is no more
  // Of a recovery that is prepared ahead, when the server has done so and before it may enter; with its control socket.
  std::function<void(int)> prepared;
  // Of a resumption, before its server is given the job; with its control socket.
  std::function<void(int)> ahead;
};
inline Setup setup;
inline std::atomic<uint64_t> preloaded_modules{0}, preloaded_kernels{0};

struct Counters {
  std::atomic<uint64_t> recoveries{0}, resumed{0}, snapshots{0}, faults{0}, program_errors{0}, injected{0}, garbage{0};
  std::atomic<uint64_t> compared{0}, differing{0}, replayed{0}, announced{0}, paused{0}, continued{0}, byes{0};
  std::atomic<uint64_t> paused_snapshot{0}, copied{0}, not_copied{0};
  std::atomic<uint64_t> snapshot_bytes{0}, snapshot_chunks{0}, snapshot_number{0};  // copied, preserved by the last snapshot; which it is
  std::atomic<uint64_t> answers{0};  // to requests for snapshots: one was taken, or the last one has everything
  // Snapshots that found the shadow brought to their device, after a move or a resumption, and what the last of them copied.
  std::atomic<uint64_t> settled{0}, settled_bytes{0};
};

struct Held {
  Json fields;
  ipc::UniqueFd fd;
};
using HeldMap = std::map<uint64_t, Held>;

// The copy of a snapshot, as it was handed over.
struct Copied {
  struct Slab {
    uint64_t address, bytes;
    ipc::UniqueFd fd;
  };
  std::vector<Slab> slabs;
  ipc::UniqueFd file;
};

// A process of xmig-server, and our end of its control socket.
inline std::pair<pid_t, ipc::UniqueFd> spawn_server(const std::string& device, uint64_t memory_bytes,
                                                    const std::string& runtime_dir = "") {
  int pair[2];
  CHECK(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
  const std::string fd = std::to_string(pair[1]);
  const std::string memory = std::to_string(memory_bytes);
  const pid_t pid = ::fork();
  CHECK(pid >= 0);
  if (pid == 0) {
    ::fcntl(pair[1], F_SETFD, 0);
    std::vector<const char*> arguments = {setup.server.c_str(), "--device", device.c_str(), "--memory",
                                          memory.c_str(),       "--control-fd", fd.c_str()};
    if (!runtime_dir.empty()) arguments.insert(arguments.end(), {"--runtime-dir", runtime_dir.c_str()});
    arguments.push_back(nullptr);
    ::execv(setup.server.c_str(), const_cast<char**>(arguments.data()));
    std::_Exit(127);
  }
  ::close(pair[1]);
  return {pid, ipc::UniqueFd(pair[0])};
}

inline void send_to(int socket, const Json& message, std::span<const int> fds = {}) {
  const std::string text = message.dump();
  ipc::send_message(socket, std::as_bytes(std::span(text)), fds);
}

class Job;
// What happens where a test kills the server, if it can. Otherwise false: then it is killed.
inline std::function<bool(Job&)> instead_of_kill;

class Job {
 public:
  struct Options {
    std::string device = "cpu:0";
    uint64_t memory = 1ull << 30;
    uint64_t ring_bytes = 16ull << 20;
    double snapshot_cost = 0.005;
    bool recover = true;  // replace a lost server
  };

  Job() : Job(Options{}) {}
  explicit Job(Options options) : options_(std::move(options)) {
    journal_fd_ = memfd("journal", journal::kHeaderBytes + options_.ring_bytes);
    staging_fd_ = memfd("staging", journal::kStagingBytes);
    pinned_fd_ = memfd("pinned", journal::kPinnedBytes);
    snapshot_fd_[0] = memfd("snapshot0", 0);
    snapshot_fd_[1] = memfd("snapshot1", 0);
    auto mapped = journal::JournalMapping::map(journal_fd_.get());
    CHECK(mapped);
    journal_ = std::move(*mapped);
    staging_ = journal::Mapping::anywhere(staging_fd_.get(), journal::kStagingBytes);
    pinned_ = journal::Mapping::at(journal::kPinnedBase, pinned_fd_.get(), 64 << 20);
    CHECK(staging_ && pinned_);
    start_server();
    supervisor_ = std::thread([this] { supervise(); });
    wait([&] { return ready_.load(); });
  }

  ~Job() {
    ending_ = true;
    kill_server();
    if (supervisor_.joinable()) supervisor_.join();
  }
  Job(const Job&) = delete;

  journal::JournalHeader& header() { return journal_.header(); }
  std::byte* at(uint64_t position) { return journal_.at(position); }
  // One that another thread wrote and the server reported of: an order that a sanitizer cannot see.
  journal::RecordHeader* record(uint64_t position) {
    const std::lock_guard lock(ring_mutex_);
    return reinterpret_cast<journal::RecordHeader*>(at(position));
  }
  std::byte* staging() { return staging_.data(); }
  std::byte* pinned() { return pinned_.data(); }
  // The first bytes of it, from here on for the device to use.
  std::byte* pin(uint64_t bytes) {
    const auto address = reinterpret_cast<uint64_t>(pinned());
    if (call(Op::xmPin, Args_xmPin{address, bytes}) != CUDA_SUCCESS) std::abort();
    return pinned();
  }
  Counters& counters() { return counters_; }
  const Options& options() const { return options_; }
  void kill_server() {
    if (instead_of_kill && !ending_ && instead_of_kill(*this)) return;
    really_kill();
  }
  void really_kill() {
    const std::lock_guard lock(mutex_);
    if (server_ > 0) ::kill(server_, SIGKILL);
  }
  // Once it is counted.
  Copied take_copied() {
    const std::lock_guard lock(mutex_);
    return std::exchange(copied_, {});
  }
  pid_t server() const { return server_; }
  pid_t lost_server() const { return lost_server_; }
  void withhold_memory() { withhold_ = true; }  // from the next server
  uint64_t sequence() const { return sequence_; }
  // For `setup.prepared`, while nothing runs.
  void overwrite_device_memory(int value) {
    for (const auto& [id, held] : memory_) {
      if (held.fields["kind"] != "device") continue;
      const size_t bytes = held.fields["bytes"];
      void* const at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, held.fd.get(), 0);
      CHECK(at != MAP_FAILED);
      std::memset(at, value, bytes);
      ::munmap(at, bytes);
    }
  }
  size_t held() {
    const std::lock_guard lock(mutex_);
    return memory_.size();
  }
  uint64_t held_bytes(const char* kind) {
    const std::lock_guard lock(mutex_);
    uint64_t sum = 0;
    for (const auto& [id, held] : memory_) sum += held.fields["kind"] == kind ? held.fields["bytes"].get<uint64_t>() : 0;
    return sum;
  }

  void send(const Json& message, std::span<const int> fds = {}) {
    const std::lock_guard lock(mutex_);
    send_locked(message, fds);
  }
  // One that is whole, of now: it has all that the program has appended. One that comes by itself may be that one.
  void snapshot() {
    uint64_t now = 0;
    {
      const std::lock_guard lock(ring_mutex_);
      now = tail_;
    }
    do {
      snapshot_unless([] { return false; });
    } while (header().snapshot_position.load() < now);
    wait([&] { return snapshots_are_reported(); });
  }
  // Asks for a snapshot, and waits for the answer or for what keeps the server from giving one.
  template <typename F>
  void snapshot_unless(F&& done) {
    const uint64_t before = counters_.answers;
    send({{"type", "snapshot"}});
    wait([&] { return done() || counters_.answers != before; });
  }
  // Is the last snapshot counted here?
  bool snapshots_are_reported() { return counters_.snapshot_number == header().snapshot.load() >> 1; }
  void inject(const char* point, const char* kind, uint64_t sequence, int error = 719) {
    const std::lock_guard lock(mutex_);
    Json injection = {{"id", ++injections_}, {"point", point}, {"kind", kind}, {"sequence", sequence}, {"error", error}};
    pending_[injections_] = injection;
    injection["type"] = "inject";
    send_locked(injection, {});
  }
  // What is sent here reaches the server of now, and none that takes its place.
  ipc::UniqueFd line() {
    const std::lock_guard lock(mutex_);
    return ipc::UniqueFd(::fcntl(control_.get(), F_DUPFD_CLOEXEC, 0));
  }
  // The daemon dies; its successor, which knows nothing, listens at `directory`.
  void lose_daemon() {
    const std::lock_guard lock(mutex_);
    detached_ = true;
    ::shutdown(control_.get(), SHUT_RDWR);
  }
  std::string runtime_dir;  // of servers that are started from now on

  void adopt_connection(ipc::UniqueFd socket) {
    const std::lock_guard lock(mutex_);
    memory_.clear();
    retired_ = std::exchange(control_, std::move(socket));  // the supervisor may still be looking at it
    detached_ = false;
  }
  // The job is suspended: its server is killed, nobody takes its place, and device memory goes.
  void leave_suspended() {
    parked_ = true;
    kill_server();
    wait([&] { return server_ == -1; });
    const std::lock_guard lock(mutex_);
    std::erase_if(memory_, [](const auto& entry) { return entry.second.fields.at("kind") == "device"; });
  }
  // True when the job has been resumed; false if the server that was to do it could not.
  bool resume(const std::string& device, uint64_t memory_bytes = 1ull << 30) {
    {
      const std::lock_guard lock(mutex_);
      options_.device = device;
      options_.memory = memory_bytes;
      resuming_ = true;
      resume_error_ = "";
    }
    const uint64_t before = counters_.resumed;
    parked_ = false;
    wait([&] { return counters_.resumed != before || parked_; });
    return !parked_;
  }
  // Before a server is given the suspended job: a round of what it has. The answer, or that the server has ended.
  Json work_ahead(int control, uint64_t number, uint64_t most_bytes) {
    const auto tell = [&](const Json& message, std::span<const int> fds) {
      const std::string text = message.dump();
      CHECK(ipc::send_message(control, std::as_bytes(std::span(text)), fds) == 0);
    };
    const int snapshots[] = {snapshot_fd_[0].get(), snapshot_fd_[1].get()};
    tell({{"type", "ahead"}, {"number", number}, {"most_bytes", {most_bytes}}}, snapshots);
    with_held([&](const HeldMap& all) {
      for (const auto& [id, held] : all) {
        const int one = held.fd.get();
        tell(held.fields, std::span(&one, 1));
      }
    });
    tell({{"type", "go"}}, {});
    std::vector<std::byte> buffer(64 << 10);
    while (true) {
      const ipc::Received received = ipc::receive_message(control, buffer, 5);
      if (received.bytes == 0) return {{"type", "closed"}};
      const auto* const text = reinterpret_cast<const char*>(buffer.data());
      Json message = Json::parse(text, text + received.bytes);
      if (message.at("type") == "round" || message.at("type") == "move_failed") return message;
    }
  }
  std::string resume_error() {
    const std::lock_guard lock(mutex_);
    return resume_error_;
  }

  // Called by the supervisor's thread for every message from now on.
  // Whoever was informed before is informed nothing any more after this.
  void on_message(std::function<void(const Json&)> function) {
    const std::lock_guard lock(telling_mutex_);
    on_message_ = std::move(function);
  }
  // Of a server that has the job, or is about to have it.
  void count(const Json& message) {
    const std::string type = message.at("type");
    if (type == "snapshot") {
      counters_.snapshot_bytes = message.at("copied_bytes").get<uint64_t>();
      counters_.snapshot_chunks = message.at("chunks").get<uint64_t>();
      counters_.snapshot_number = message.at("number").get<uint64_t>();
      if (brought_.exchange(false)) {
        counters_.settled_bytes = counters_.snapshot_bytes.load();
        ++counters_.settled;
      }
      ++counters_.snapshots;
      ++counters_.answers;
    } else if (type == "snapshot_stands") {
      ++counters_.answers;
    } else if (type == "log") {
      const std::string text = message.at("text");
      if (text.starts_with("bringing ") && text.find("of the shadow to the device") != text.npos) brought_ = true;
    } else if (type == "phase" && message.at("name") == "replayed") {
      counters_.compared += message.at("compared").get<uint64_t>();
      counters_.differing += message.at("differing").get<uint64_t>();
      counters_.replayed += message.at("records").get<uint64_t>();
    }
  }
  // What is held for the job, under the lock.
  template <typename F>
  void with_held(F&& f) {
    const std::lock_guard lock(mutex_);
    f(memory_);
  }
  std::vector<int> files() const {
    return {journal_fd_.get(), staging_fd_.get(), pinned_fd_.get(), snapshot_fd_[0].get(), snapshot_fd_[1].get()};
  }
  // The job is another server's, on another device: what is held of it is this. The server that has had it is killed.
  void switch_to(const std::string& device, pid_t server, ipc::UniqueFd control, HeldMap memory) {
    {
      const std::lock_guard lock(mutex_);
      options_.device = device;
      next_ = Next{server, std::move(control), std::move(memory)};
    }
    const uint64_t before = switches_;
    really_kill();
    wait([&] { return switches_ != before; });
  }

  template <typename F>
  static void wait(F&& done, int seconds = 60) {
    for (int i = 0; !done(); ++i) {
      if (i > seconds * 1000) {
        std::fprintf(stderr, "waited too long\n");
        std::abort();
      }
      ::usleep(1000);
    }
  }

  uint16_t ordinal = 0;  // whose memory, modules and default stream are meant from now on

  // --- the program -------------------------------------------------------------------------------------------
  struct Call {
    uint64_t position;
    CUresult result = CUDA_SUCCESS;
  };
  template <typename Args>
  uint64_t append(Op op, const Args& args, std::span<const std::byte> payload = {}, uint32_t reply = 0,
                  uint32_t thread = 0, uint16_t ordinal = 0) {
    return append_bytes(op, &args, sizeof(args), payload, payload.size(), reply, thread, ordinal);
  }

  uint64_t append_bytes(Op op, const void* args, size_t args_bytes, std::span<const std::byte> payload,
                        size_t payload_bytes, uint32_t reply, uint32_t thread, uint16_t ordinal) {
    const OpInfo& info = kOpInfo[static_cast<size_t>(op)];
    const uint64_t payload_at = sizeof(journal::RecordHeader) + journal::align8(info.args_bytes);
    const uint64_t reply_at = payload_at + journal::align8(payload_bytes);
    const uint64_t size = reply_at + journal::align8(reply);
    const std::lock_guard lock(ring_mutex_);
    journal::JournalHeader& h = header();
    if (tail_ + size - h.trimmed.load() > journal_.ring_bytes()) {
      h.trimmed_waiters.fetch_add(1);
      while (true) {
        const uint32_t seen = h.trimmed_futex.load();
        if (tail_ + size - h.trimmed.load() <= journal_.ring_bytes()) break;
        ring_doorbell();
        journal::futex_wait(h.trimmed_futex, seen, std::chrono::milliseconds(100));
      }
      h.trimmed_waiters.fetch_sub(1);
    }
    std::byte* const record = at(tail_);
    std::memset(record, 0, sizeof(journal::RecordHeader));
    auto* const head = reinterpret_cast<journal::RecordHeader*>(record);
    head->size = static_cast<uint32_t>(size);
    head->op = static_cast<uint16_t>(op);
    head->flags = (info.call == CallClass::kSynchronous ? journal::kSynchronous : 0) | std::exchange(flags_of_next, uint16_t{0});
    head->sequence = ++sequence_;
    head->thread = thread;
    head->ordinal = ordinal != 0 ? ordinal : this->ordinal;
    head->context = 1;
    head->payload = static_cast<uint32_t>(payload_bytes);
    head->reply = reply;
    if (info.args_bytes != 0) std::memcpy(record + sizeof(*head), args, info.args_bytes);
    (void)args_bytes;
    if (!payload.empty()) std::memcpy(record + payload_at, payload.data(), payload.size());
    if (head->flags) h.threads[thread].waiting.store(tail_);
    const uint64_t position = tail_;
    tail_ += size;
    h.tail.store(tail_);
    if (h.server_sleeping.load() != 0) ring_doorbell();
    return position;
  }

  uint16_t flags_of_next = 0;  // of the next record, beside its own

  // What it seems to take to wake the server, besides what it takes, in ns; 0: it is not reported.
  int64_t wake_up = 0;

  void ring_doorbell() {
    if (wake_up != 0) header().rung_at.store(journal::now_ns() - static_cast<uint64_t>(wake_up));
    header().doorbell.fetch_add(1);
    journal::futex_wake(header().doorbell);
  }

  CUresult finish(uint64_t position, void* reply = nullptr, size_t bytes = 0, uint32_t thread = 0) {
    auto* const head = reinterpret_cast<journal::RecordHeader*>(at(position));
    for (int tries = 0;; ++tries) {
      uint32_t state = head->state.load();
      if ((state & 0xff) == journal::kReplied) break;
      if (header().state.load() == static_cast<uint32_t>(journal::ServerState::kLost)) {
        return static_cast<CUresult>(header().context_error.load());
      }
      if (tries < 2000) continue;
      if (!(state & journal::kWaiter) && !head->state.compare_exchange_strong(state, state | journal::kWaiter)) continue;
      journal::futex_wait(head->state, state | journal::kWaiter, std::chrono::seconds(1));
      CHECK(tries < 2000 + 90);
    }
    const auto result = static_cast<CUresult>(head->result);
    const OpInfo& info = kOpInfo[head->op];
    const std::byte* const at_reply =
        reinterpret_cast<std::byte*>(head) + sizeof(*head) + journal::align8(info.args_bytes) + journal::align8(head->payload);
    if (bytes != 0) std::memcpy(reply, at_reply, std::min<size_t>(bytes, head->reply));
    header().threads[thread].waiting.store(journal::kNotWaiting);
    return result;
  }

  template <typename Args>
  CUresult call(Op op, const Args& args, void* reply = nullptr, size_t reply_bytes = 0, uint32_t thread = 0) {
    const uint64_t position = append(op, args, {}, static_cast<uint32_t>(reply_bytes), thread);
    return finish(position, reply, reply_bytes, thread);
  }

  // Device memory [base + offset, ...): grown and allocated.
  CUresult grow(uint64_t address, uint64_t bytes) { return call(Op::xmGrow, Args_xmGrow{address, bytes}); }
  void alloc(uint64_t address, uint64_t bytes) { append(Op::xmAlloc, Args_xmAlloc{address, bytes, 0, 0, 0}); }
  uint64_t memory(uint64_t bytes) {
    const uint64_t granules = (bytes + journal::kGranule - 1) / journal::kGranule * journal::kGranule;
    const uint64_t address = journal::kDeviceBase + ordinal * journal::kDeviceSpan + used_[ordinal];
    used_[ordinal] += granules;
    CHECK(grow(address, granules) == CUDA_SUCCESS);
    alloc(address, bytes);
    return address;
  }
  void write(uint64_t address, const void* data, size_t bytes, uint64_t stream = 0) {
    const auto* from = static_cast<const std::byte*>(data);
    for (size_t done = 0; done < bytes;) {
      const size_t part = std::min<size_t>(bytes - done, 512 << 10);
      append(Op::xmCopyFromHost, Args_xmCopyFromHost{address + done, part, part, 1, stream},
             std::span(from + done, part));
      done += part;
    }
  }
  CUresult read(uint64_t address, void* data, size_t bytes, uint64_t stream = 0, uint32_t thread = 0) {
    auto* to = static_cast<std::byte*>(data);
    for (size_t done = 0; done < bytes;) {
      const size_t part = std::min<size_t>(bytes - done, bytes <= journal::kInlineReplyBytes
                                                             ? bytes
                                                             : journal::kStagingSlotBytes);
      const bool inline_reply = bytes <= journal::kInlineReplyBytes;
      const Args_xmCopyToHost args{address + done, part, part, 1, stream, inline_reply ? ~0ull : 0};
      const uint64_t position = append(Op::xmCopyToHost, args, {}, inline_reply ? static_cast<uint32_t>(part) : 0, thread);
      const CUresult result = finish(position, to + done, inline_reply ? part : 0, thread);
      if (result != CUDA_SUCCESS) return result;
      if (!inline_reply) std::memcpy(to + done, staging(), part);
      done += part;
    }
    return CUDA_SUCCESS;
  }
  CUresult synchronize(uint64_t stream = 0, uint32_t thread = 0) {
    return call(Op::cuStreamSynchronize, Args_cuStreamSynchronize{stream}, nullptr, 0, thread);
  }
  uint64_t make_stream() {
    const uint64_t handle = journal::make_handle(journal::Kind::kStream, ++streams_);
    append(Op::cuStreamCreateWithPriority, Args_cuStreamCreateWithPriority{handle, CU_STREAM_NON_BLOCKING, 0});
    return handle;
  }
  uint64_t make_event() {
    const uint64_t handle = journal::make_handle(journal::Kind::kEvent, ++events_);
    append(Op::cuEventCreate, Args_cuEventCreate{handle, 0});
    return handle;
  }
  // Sequence of the record.
  uint64_t record_event(uint64_t event, uint64_t stream) {
    append(Op::cuEventRecordWithFlags, Args_cuEventRecordWithFlags{event, stream, 0});
    return sequence_;
  }
  bool event_done(uint64_t event, uint64_t sequence) {
    return header().events[journal::handle_index(event)].load() >= sequence;
  }

  struct Loaded {
    uint64_t module;
    std::map<std::string, uint64_t> kernels;
    std::vector<std::pair<std::string, uint64_t>> globals;  // name, bytes
  };
  void send_image(uint64_t number, const std::vector<std::byte>& bytes) {
    for (size_t offset = 0; offset < bytes.size();) {
      const size_t part = std::min<size_t>(bytes.size() - offset, 100'000);
      append(Op::xmImage, Args_xmImage{number, bytes.size(), offset}, std::span(bytes).subspan(offset, part));
      offset += part;
    }
  }
  Loaded load_kernels() {
    std::vector<std::byte> bytes;
    FILE* const file = std::fopen(setup.kernels.c_str(), "rb");
    CHECK(file);
    std::byte buffer[4096];
    for (size_t n; (n = std::fread(buffer, 1, sizeof(buffer), file)) > 0;) bytes.insert(bytes.end(), buffer, buffer + n);
    std::fclose(file);
    send_image(++images_, bytes);
    Loaded loaded{journal::make_handle(journal::Kind::kModule, ++modules_), {}, {}};
    std::vector<std::byte> reply(16 << 10);
    CHECK(call(Op::xmModuleLoad, Args_xmModuleLoad{loaded.module, images_}, reply.data(), reply.size()) == CUDA_SUCCESS);
    journal::ModuleInfo info;
    std::memcpy(&info, reply.data(), sizeof(info));
    CHECK(info.bytes <= reply.size());
    size_t offset = sizeof(info);
    for (uint32_t i = 0; i < info.kernel_count; ++i) {
      journal::KernelName kernel;
      std::memcpy(&kernel, reply.data() + offset, sizeof(kernel));
      const std::string name(reinterpret_cast<char*>(reply.data() + offset + sizeof(kernel)), kernel.bytes);
      loaded.kernels[name] = journal::make_handle(journal::Kind::kFunction, modules_ << journal::kKernelBits | i);
      offset = journal::align8(offset + sizeof(kernel) + kernel.bytes);
    }
    for (uint32_t i = 0; i < info.global_count; ++i) {
      journal::GlobalInfo global;
      std::memcpy(&global, reply.data() + offset, sizeof(global));
      const std::string name(reinterpret_cast<char*>(reply.data() + offset + sizeof(global)), global.name_bytes);
      loaded.globals.emplace_back(name, global.bytes);
      if (global.address == 0) {
        append(Op::xmBindGlobal, Args_xmBindGlobal{loaded.module, i, 0, memory(global.bytes)});
      }
      offset = journal::align8(offset + sizeof(global) + global.name_bytes);
    }
    return loaded;
  }

  template <typename... P>
  void launch(uint64_t function, uint64_t stream, P... parameters) {
    const uint64_t packed[] = {static_cast<uint64_t>(parameters)..., 0};
    const uint32_t bytes = sizeof...(parameters) * 8;
    append(Op::xmLaunch, Args_xmLaunch{function, 1, 1, 1, 1, 1, 1, 0, 0, bytes, 0, stream},
           std::as_bytes(std::span(packed)).first(bytes));
  }

 private:
  struct Next {
    pid_t server;
    ipc::UniqueFd control;
    HeldMap memory;
  };

  static ipc::UniqueFd memfd(const char* name, uint64_t bytes) {
    ipc::UniqueFd fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
    CHECK(fd && ::ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0);
    return fd;
  }

  void send_locked(const Json& message, std::span<const int> fds) {
    send_to(control_.get(), message, fds);
  }

  void start_server() {
    auto [pid, control] = spawn_server(options_.device, options_.memory, runtime_dir);
    if (setup.preload && started_ && !resuming_) preload(control.get(), pid);
    if (setup.ahead && resuming_) setup.ahead(control.get());
    const std::lock_guard lock(mutex_);
    brought_ = false;
    control_ = std::move(control);
    server_ = pid;
    if (ending_) ::kill(pid, SIGKILL);  // the destructor has found the one before it
    const bool fresh = !started_;
    started_ = true;
    Json deliver;
    if (deliver_) deliver = {{"sequence", deliver_->first}, {"error", deliver_->second}};
    Json injections = Json::array();  // a server that dies has not injected with all of its own
    for (const auto& [id, injection] : pending_) injections.push_back(injection);
    const int fds[] = {journal_fd_.get(), staging_fd_.get(), pinned_fd_.get(), snapshot_fd_[0].get(), snapshot_fd_[1].get()};
    // Half of them prepare before they may enter, as standbys do, and half after the one before has ended.
    const bool ahead = !fresh && !resuming_ && (setup.prepared || counters_.recoveries % 2 == 0);
    Json assign = {{"type", "assign"},
                 {"job", "test"},
                 {"mode", fresh ? "fresh" : resuming_ ? "resume" : "recover"},
                 {"client_pid", ::getpid()},
                 {"snapshot_cost", options_.snapshot_cost},
                 {"deliver", deliver},
                 {"careful", careful_},
                 {"injections", injections}};
    if (ahead) assign["ahead"] = true;
    send_locked(assign, fds);
    if (fresh) return;
    if (!resuming_) ++counters_.recoveries;
    const bool withhold = withhold_.exchange(false);
    for (const auto& [id, held] : memory_) {
      Json message = held.fields;
      const int one = held.fd.get();
      if (!withhold || held.fields["kind"] != "device") send_locked(message, std::span(&one, 1));
    }
    send_locked({{"type", "go"}}, {});
    if (!ahead) return;
    if (setup.prepared && wait_until_prepared(control_.get())) setup.prepared(control_.get());
    send_locked({{"type", "enter"}}, {});
  }

  // False: it has ended instead.
  static bool wait_until_prepared(int control) {
    std::vector<std::byte> buffer(64 << 10);
    while (true) {
      const ipc::Received received = ipc::receive_message(control, buffer, 5);
      if (received.bytes == 0) return false;
      const auto* const text = reinterpret_cast<const char*>(buffer.data());
      const Json message = Json::parse(text, text + received.bytes);
      if (message.at("type") == "log" && message.at("text").get<std::string>().starts_with("prepared")) return true;
    }
  }

  // As the device makes it: it maps nothing else.
  static ipc::UniqueFd other_memory(uint64_t bytes) {
    ipc::UniqueFd fd = memfd("xmig-device-memory-of-cpu:0", bytes);
    CHECK(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
    return fd;
  }

  // As a warm standby is informed. Its last word before the job is what it has loaded.
  void preload(int control, pid_t server) {
    const auto tell = [&](const Json& message, std::span<const int> fds) {
      const std::string text = message.dump();
      CHECK(ipc::send_message(control, std::as_bytes(std::span(text)), fds) == 0);
    };
    for (const auto& [id, held] : memory_) {
      const ipc::UniqueFd other = setup.mistaken ? other_memory(held.fields["bytes"]) : ipc::UniqueFd();
      const int one = other && held.fields["kind"] != "image" ? other.get() : held.fd.get();
      tell(held.fields, std::span(&one, 1));
    }
    if (setup.mistaken) tell_of_what_is_no_more(tell);
    const int snapshots[] = {snapshot_fd_[0].get(), snapshot_fd_[1].get()};
    tell({{"type", "preload"}}, snapshots);
    std::vector<std::byte> buffer(64 << 10);
    while (true) {
      const ipc::Received received = ipc::receive_message(control, buffer, 5);
      if (received.bytes == 0) return;  // it was killed
      const auto* const text = reinterpret_cast<const char*>(buffer.data());
      const Json message = Json::parse(text, text + received.bytes);
      if (message.at("type") != "preloaded") continue;
      preloaded_modules += message.at("modules").get<uint64_t>();
      preloaded_kernels += message.at("kernels").get<uint64_t>();
      check_mapped(server);
      return;
    }
  }

  // Right behind each piece of memory, where the program's next may come to lie.
  void tell_of_what_is_no_more(const std::function<void(const Json&, std::span<const int>)>& tell) {
    uint64_t id = 1ull << 40;
    for (const auto& [number, held] : memory_) {
      if (held.fields["kind"] != "device") continue;
      Json fields = held.fields;
      fields["id"] = id++;
      fields["address"] = held.fields["address"].get<uint64_t>() + held.fields["bytes"].get<uint64_t>();
      const ipc::UniqueFd other = other_memory(held.fields["bytes"]);
      const int one = other.get();
      tell(fields, std::span(&one, 1));
    }
  }

  // Is each piece of memory at its address in the server?
  void check_mapped(pid_t server) {
    std::set<uint64_t> starts;
    std::ifstream maps("/proc/" + std::to_string(server) + "/maps");
    for (std::string line; std::getline(maps, line);) starts.insert(std::stoull(line, nullptr, 16));
    for (const auto& [id, held] : memory_) {
      const bool mappable = held.fields["kind"] != "image" && held.fields["name"] == "";
      if (mappable) CHECK(starts.contains(held.fields["address"].get<uint64_t>()));
    }
  }

  void supervise() {
    std::vector<std::byte> buffer(64 << 10);
    while (true) {
      if (detached_) {
        ::usleep(1000);
        if (ending_) break;
        continue;
      }
      int control;
      {
        const std::lock_guard lock(mutex_);
        control = control_.get();
      }
      ipc::Received received = ipc::receive_message(control, buffer, 5);
      if (received.bytes != 0) {
        const Json message =
            Json::parse(reinterpret_cast<char*>(buffer.data()), reinterpret_cast<char*>(buffer.data()) + received.bytes);
        note(message, std::move(received.fds));
        continue;
      }
      int status = 0;
      pid_t pid;
      {
        const std::lock_guard lock(mutex_);
        if (detached_ || control_.get() != control) continue;  // it was the connection that ended, and there may be another
        pid = server_;
        lost_server_ = pid;
        server_ = -1;
      }
      ::waitpid(pid, &status, 0);
      if (take_next()) continue;
      wait([&] { return !parked_ || ending_; });
      if (ending_ || !options_.recover || over_) break;
      start_server();
    }
  }

  // Somebody else has the job already.
  bool take_next() {
    const std::lock_guard lock(mutex_);
    if (!next_) return false;
    retired_ = std::exchange(control_, std::move(next_->control));
    memory_ = std::move(next_->memory);
    last_fault_ = 0;
    server_ = next_->server;
    next_.reset();
    ++switches_;
    if (ending_) ::kill(server_, SIGKILL);
    return true;
  }

  void note(const Json& message, std::vector<ipc::UniqueFd> fds) {
    const std::string type = message.at("type");
    if (type == "memory") {
      const std::lock_guard lock(mutex_);
      const uint64_t id = message.at("id");
      if (message.at("op") == "drop") {
        CHECK(memory_.erase(id) == 1);
      } else {
        CHECK(fds.size() == 1);
        Json held = message;
        held.erase("change");  // it is not reported again to the next server
        CHECK(memory_.try_emplace(id, Held{std::move(held), std::move(fds[0])}).second);
      }
    } else if (type == "ready") {
      ready_ = true;
    } else if (type == "fault") {
      ++counters_.faults;
      if (!std::exchange(injecting_, false)) note_fault(message);
    } else if (type == "program_error") {
      ++counters_.program_errors;
      deliver_.reset();
      careful_ = nullptr;
    } else if (type == "injected") {
      {
        const std::lock_guard lock(mutex_);
        pending_.erase(message.at("id").get<uint64_t>());
      }
      ++counters_.injected;
      injecting_ = true;
    } else if (type == "garbage") {
      over_ = true;
      ++counters_.garbage;
      std::fprintf(stderr, "server: garbage: %s\n", message.at("text").get<std::string>().c_str());
    } else if (type == "announce") {
      CHECK(fds.size() == 5);
    } else if (type == "announced") {
      ++counters_.announced;
    } else if (type == "paused") {
      counters_.paused_snapshot = message.at("snapshot").get<uint64_t>();
      ++counters_.paused;
    } else if (type == "snapshot_slab") {
      const bool known = message.at("known");
      CHECK(fds.size() == (known ? 0 : 1));
      const std::lock_guard lock(mutex_);
      copied_.slabs.push_back({message.at("address"), message.at("bytes"), known ? ipc::UniqueFd() : std::move(fds[0])});
    } else if (type == "snapshot_copied") {
      CHECK(fds.size() == 1);
      {
        const std::lock_guard lock(mutex_);
        copied_.file = std::move(fds[0]);
      }
      ++counters_.copied;
    } else if (type == "snapshot_not_copied") {
      ++counters_.not_copied;
    } else if (type == "continued") {
      ++counters_.continued;
    } else if (type == "bye") {
      ++counters_.byes;
    } else if (type == "log") {
      std::fprintf(stderr, "server: %s\n", message.at("text").get<std::string>().c_str());
    } else if (type == "phase" && message.at("name") == "resumed") {
      {
        const std::lock_guard lock(mutex_);
        resuming_ = false;
      }
      ++counters_.resumed;
    } else if (type == "resume_failed") {
      const std::lock_guard lock(mutex_);
      resume_error_ = message.at("code");
      parked_ = true;
    }
    count(message);
    if (std::getenv("HARNESS_TRACE")) std::fprintf(stderr, "%s\n", message.dump().c_str());
    const std::lock_guard lock(telling_mutex_);
    if (on_message_) on_message_(message);
  }

  // As the daemon does: a fault that comes back is the program's own, and where nobody knows whose it is, it is looked for.
  void note_fault(const Json& message) {
    const uint64_t sequence = message.at("sequence");
    if (sequence == 0) {
      careful_ = {{"after", message.at("after")}, {"until", message.at("until")}};
      return;
    }
    const bool looked_for = !careful_.is_null() && sequence > careful_.at("after") && sequence <= careful_.at("until");
    if (last_fault_ == sequence || looked_for) deliver_ = {sequence, message.at("error").get<int>()};
    last_fault_ = sequence;
  }

  Options options_;
  ipc::UniqueFd journal_fd_, staging_fd_, pinned_fd_, snapshot_fd_[2];
  journal::JournalMapping journal_;
  journal::Mapping staging_, pinned_;
  Counters counters_;
  std::thread supervisor_;
  std::mutex mutex_;
  ipc::UniqueFd control_, retired_;
  std::mutex telling_mutex_;  // before mutex_
  std::function<void(const Json&)> on_message_;
  std::atomic<pid_t> server_{-1}, lost_server_{-1};
  std::atomic<bool> withhold_{false};
  std::atomic<bool> ready_{false}, ending_{false}, over_{false}, detached_{false};
  std::atomic<bool> brought_{false};  // the shadow, to the device of the server of now; no snapshot has come since
  bool started_ = false;
  HeldMap memory_;
  Copied copied_;  // guarded by mutex_
  std::optional<Next> next_;
  std::atomic<bool> parked_{false};
  bool resuming_ = false;
  std::string resume_error_;
  std::atomic<uint64_t> switches_{0};
  std::optional<std::pair<uint64_t, int>> deliver_;
  uint64_t last_fault_ = 0;
  Json careful_;
  bool injecting_ = false;
  uint64_t injections_ = 0;
  std::map<uint64_t, Json> pending_;

  std::mutex ring_mutex_;
  uint64_t tail_ = 0;
  uint64_t sequence_ = 0;
  std::array<uint64_t, journal::kMaxDevices> used_{};  // of each device's addresses
  uint32_t streams_ = 0, events_ = 0, images_ = 0, modules_ = 0;
};

}  // namespace harness
