// A daemon and a server for the tests of the client, in a process of their own: it answers the handshake, takes records
// off the ring, does nothing with them, and answers as the test says. What it saw, the test reads in shared memory.
#pragma once

#include <cuda.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "ipc/handshake.h"
#include "ipc/seqpacket.h"
#include "journal/futex.h"
#include "journal/module_info.h"
#include "journal/ring.h"
#include "ops.h"

#define CU(call) CHECK((call) == CUDA_SUCCESS)

namespace harness {

using namespace xmig;

// Between the test and its server; both write.
struct Control {
  // What the server is to do.
  std::atomic<bool> trim_freely{true};    // otherwise: only when the client waits for room
  std::atomic<bool> hold_answers{false};  // synchronous records stay unanswered
  std::atomic<bool> hold_events{false};   // events do not complete
  std::atomic<bool> post_twice{false};    // host functions
  std::atomic<int> asleep_on{-1};         // it says that it sleeps on this processor, and never that it has heard the bell
  std::atomic<int> refuse{0};             // a handshake: this status
  std::atomic<int> refuse_reattach{0};
  std::atomic<uint32_t> fault{0};         // of ordinal 0, from the next record on
  std::atomic<uint32_t> refuse_launch{0};  // a first launch: this result
  std::atomic<uint64_t> variable_bytes{0};  // how much it takes to keep a module's variables in
  // What it saw.
  std::atomic<uint64_t> records{0};
  std::atomic<uint64_t> host_functions_done{0};
  std::atomic<uint64_t> synchronise_notes{0};  // cuEventSynchronize that nobody waits for
  std::atomic<uint64_t> context_resets{0};
  std::atomic<uint64_t> limits_requested{0};
  std::atomic<uint64_t> image_bytes{0}, image_files{0};
  std::atomic<uint32_t> jobs{0};
  std::atomic<uint32_t> reattached{0};
  std::atomic<uint32_t> bad{0};  // records that broke a rule of layout.h
  Args_xmLaunch launch{};
  Args_xmTensorMap tensor_map{};
  Args_xmVariables variables{};
  std::atomic<uint64_t> variables_kept{0};      // modules with such a place
  std::atomic<uint64_t> launched_without{0};    // kernels that were launched before the last one had its place
  unsigned char parameters[36 << 10]{};
  std::atomic<uint64_t> launches{0};
  std::atomic<uint64_t> first_launches{0};  // those whose answer the program waits for
};

// The kernel that every module has: eight parameters, one of them a structure.
inline constexpr journal::ParameterInfo kLayout[] = {{0, 8},  {8, 4},  {16, 8},  {24, 4},
                                                     {32, 8}, {40, 4}, {44, 12}, {56, 8}};
inline constexpr uint32_t kParameters = std::size(kLayout);
inline constexpr uint32_t kKernelBytes = 64;

// Kernel number 1 has parameters of odd sizes, and as many bytes of them as CUDA allows.
inline constexpr journal::ParameterInfo kOddLayout[] = {{0, 1}, {2, 2}, {4, 3}, {8, 5}, {16, 16}, {32, 4200}, {4240, 28524}};
inline constexpr uint32_t kOddBytes = 32764;

inline std::vector<std::byte> module_description(uint32_t extra_kernels) {
  std::vector<std::byte> text;
  const auto put = [&](const void* data, size_t bytes) {
    const auto* from = static_cast<const std::byte*>(data);
    text.insert(text.end(), from, from + bytes);
  };
  const auto pad = [&] { text.resize(journal::align8(text.size())); };
  journal::ModuleInfo info{.kernel_count = 1 + extra_kernels, .global_count = 0};
  put(&info, sizeof(info));
  const auto kernel = [&](std::string_view name) {
    const journal::KernelName prefix{static_cast<uint32_t>(name.size())};
    put(&prefix, sizeof(prefix));
    put(name.data(), name.size());
    pad();
  };
  kernel("many");
  for (uint32_t i = 0; i < extra_kernels; ++i) {
    kernel("kernel number " + std::to_string(i) + std::string(100, '.'));
  }
  info.bytes = static_cast<uint32_t>(text.size());
  std::memcpy(text.data(), &info, sizeof(info));
  return text;
}

// Kernel number 0 is the one of kLayout, number 1 that of kOddLayout; the others have no parameters.
inline std::vector<std::byte> kernel_description(uint32_t number) {
  journal::KernelInfo info{};
  if (number == 0) {
    info.parameter_count = kParameters;
    info.parameter_bytes = kKernelBytes;
    info.attributes[CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK] = 512;
    info.attributes[CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES] = 4096;
  } else {
    info.attributes[0] = 1024;
  }
  std::span<const journal::ParameterInfo> layout;
  if (number == 0) layout = kLayout;
  if (number == 1) {
    layout = kOddLayout;
    info.parameter_count = std::size(kOddLayout);
    info.parameter_bytes = kOddBytes;
  }
  std::vector<std::byte> text(sizeof(info) + layout.size_bytes());
  std::memcpy(text.data(), &info, sizeof(info));
  if (!layout.empty()) std::memcpy(text.data() + sizeof(info), layout.data(), layout.size_bytes());
  return text;
}

// One job, in a process of its own.
class JobServer {
 public:
  JobServer(Control& control, journal::JournalMapping&& journal) : control_(control), journal_(std::move(journal)) {}

  [[noreturn]] void serve() {
    journal::JournalHeader& header = journal_.header();
    for (;;) {
      const uint64_t tail = header.tail.load(std::memory_order_acquire);
      if (position_ != tail) {
        execute();
        header.executed.store(position_, std::memory_order_release);
      } else {
        rest(header, tail);
      }
      trim(header);
    }
  }

 private:
  journal::RecordHeader& at(uint64_t position) {
    return *reinterpret_cast<journal::RecordHeader*>(journal_.at(position));
  }

  void rest(journal::JournalHeader& header, uint64_t tail) {
    answer_held();
    const int on = control_.asleep_on.load();
    header.server_sleeping.store(on < 0 ? journal::kAsleep : journal::kAsleepOn + static_cast<uint32_t>(on));
    const uint32_t rung = header.doorbell.load(std::memory_order_seq_cst);
    if (header.tail.load(std::memory_order_seq_cst) == tail && header.trimmed_waiters.load() == 0) {
      journal::futex_wait(header.doorbell, rung, std::chrono::milliseconds(1));
    }
    header.server_sleeping.store(0, std::memory_order_seq_cst);
  }

  // Up to the oldest reply that a thread has not read yet, as layout.h says.
  void trim(journal::JournalHeader& header) {
    if (!control_.trim_freely.load() && header.trimmed_waiters.load() == 0) return;
    uint64_t until = position_;
    for (auto& thread : header.threads) until = std::min(until, thread.waiting.load());
    for (const uint64_t held : held_) until = std::min(until, held);
    if (until <= header.trimmed.load()) return;
    // What was trimmed means nothing any more.
    std::memset(journal_.at(header.trimmed.load()), 0xee, until - header.trimmed.load());
    header.trimmed.store(until, std::memory_order_release);
    header.trimmed_futex.fetch_add(1);
    if (header.trimmed_waiters.load()) journal::futex_wake(header.trimmed_futex);
  }

  void reply(uint64_t position, CUresult result) {
    journal::RecordHeader& record = at(position);
    record.result = result;
    const uint32_t before = record.state.exchange(journal::kReplied);
    if (before & journal::kWaiter) journal::futex_wake(record.state);
  }

  void answer_held() {
    if (control_.hold_answers.load()) return;
    for (const uint64_t position : held_) reply(position, CUDA_SUCCESS);
    held_.clear();
  }

  template <typename T>
  T arguments(const journal::RecordHeader& record) {
    T args;
    std::memcpy(&args, &record + 1, sizeof(args));
    return args;
  }

  static uint32_t number_of(uint64_t function) { return journal::handle_index(function) & (journal::kMaxKernels - 1); }
  static uint32_t parameter_bytes(uint64_t function) {
    const uint32_t number = number_of(function);
    return number == 0 ? kKernelBytes : number == 1 ? kOddBytes : 0;
  }

  void execute() {
    journal::JournalHeader& header = journal_.header();
    journal::RecordHeader& record = at(position_);
    const uint32_t size = record.size;
    const std::byte* const payload = reinterpret_cast<const std::byte*>(&record) +
                                     journal::align8(sizeof(record) + kOpInfo[record.op].args_bytes);
    std::byte* const space = const_cast<std::byte*>(payload) + journal::align8(record.payload);
    const bool synchronous = record.flags & journal::kSynchronous;
    if (size % 8 || record.sequence != ++sequence_ || record.thread >= journal::kMaxThreads ||
        record.context == 0 ||
        (synchronous && static_cast<Op>(record.op) != Op::cuEventSynchronize &&
         header.threads[record.thread].waiting.load() > position_)) {
      control_.bad.fetch_add(1);
    }
    control_.records.fetch_add(1);
    CUresult result = CUDA_SUCCESS;
    switch (static_cast<Op>(record.op)) {
      case Op::xmFirstLaunch:
        control_.first_launches.fetch_add(1);
        result = static_cast<CUresult>(control_.refuse_launch.load());
        // The driver's word on packed parameters that are too few.
        if (const auto args = arguments<Args_xmLaunch>(record); args.parameter_bytes < parameter_bytes(args.function)) {
          result = CUDA_ERROR_INVALID_VALUE;
        }
        if (result != CUDA_SUCCESS) break;
        [[fallthrough]];
      case Op::xmLaunch:
        control_.launch = arguments<Args_xmLaunch>(record);
        std::memcpy(control_.parameters, payload, std::min<size_t>(record.payload, sizeof(control_.parameters)));
        control_.launches.fetch_add(1);
        break;
      case Op::cuEventRecordWithFlags: {
        const auto args = arguments<Args_cuEventRecordWithFlags>(record);
        if (!control_.hold_events.load()) {
          header.events[journal::handle_index(args.hEvent)].store(record.sequence, std::memory_order_release);
        }
        break;
      }
      case Op::cuEventSynchronize:
        if (header.threads[record.thread].waiting.load() > position_) control_.synchronise_notes.fetch_add(1);
        break;
      case Op::xmContextReset:
        control_.context_resets.fetch_add(1);
        header.context_error.store(0);
        break;
      case Op::xmLimit: {
        const auto args = arguments<Args_xmLimit>(record);
        control_.limits_requested.fetch_add(1);
        if (args.limit >= CU_LIMIT_MAX) {
          result = CUDA_ERROR_UNSUPPORTED_LIMIT;
          break;
        }
        if (args.set && args.value > 1 << 20) result = CUDA_ERROR_INVALID_VALUE;
        if (args.set && result == CUDA_SUCCESS) limits_[args.limit % CU_LIMIT_MAX] = (args.value + 15) / 16 * 16;
        std::memcpy(space, &limits_[args.limit % CU_LIMIT_MAX], sizeof(uint64_t));
        record.reply_bytes = sizeof(uint64_t);
        break;
      }
      case Op::xmTensorMap:
        control_.tensor_map = arguments<Args_xmTensorMap>(record);
        record.reply_bytes = record.reply;
        std::memset(space, 0x11, record.reply);
        break;
      case Op::xmImage:
        control_.image_bytes.fetch_add(record.payload);
        break;
      case Op::xmImageFile:
        control_.image_files.fetch_add(1);
        break;
      case Op::xmModuleLoad:
      case Op::xmModuleInfo: {
        if (description_.empty()) description_ = module_description(2000);
        const bool rest = static_cast<Op>(record.op) == Op::xmModuleInfo;
        const size_t from = rest ? arguments<Args_xmModuleInfo>(record).offset : 0;
        record.reply_bytes = static_cast<uint32_t>(std::min<size_t>(record.reply, description_.size() - from));
        std::memcpy(space, description_.data() + from, record.reply_bytes);
        break;
      }
      case Op::xmKernel: {
        const uint64_t function = arguments<Args_xmKernel>(record).function;
        auto text = kernel_description(number_of(function));
        const uint64_t variable_bytes = control_.variable_bytes.load();
        std::memcpy(text.data() + offsetof(journal::KernelInfo, variable_bytes), &variable_bytes, sizeof(variable_bytes));
        record.reply_bytes = static_cast<uint32_t>(text.size());
        std::memcpy(space, text.data(), std::min<size_t>(record.reply, text.size()));
        break;
      }
      case Op::xmVariables:
        control_.variables = arguments<Args_xmVariables>(record);
        control_.variables_kept.fetch_add(1);
        control_.launched_without.store(control_.launches.load());
        break;
      case Op::xmHostFunc:
        post(header, position_);
        break;
      default:
        if (synchronous && record.reply) {
          std::memset(space, 0x11, record.reply);
          record.reply_bytes = record.reply;
        }
    }
    if (const uint32_t fault = control_.fault.exchange(0)) {
      header.context_error_ordinal.store(0);
      header.context_error.store(fault);
    }
    if (synchronous) {
      if (control_.hold_answers.load()) {
        held_.push_back(position_);
      } else {
        reply(position_, result);
      }
    }
    position_ += size;
  }

  void post(journal::JournalHeader& header, uint64_t position) {
    journal::RecordHeader& record = at(position);
    record.state.store(journal::kPosted);
    for (int i = 0; i < (control_.post_twice.load() ? 2 : 1); ++i) {
      const uint64_t posted = header.callbacks_posted.load();
      header.callbacks[posted % journal::kCallbackSlots].store(position);
      header.callbacks_posted.store(posted + 1);
      header.callback_doorbell.fetch_add(1);
      journal::futex_wake(header.callback_doorbell);
    }
    for (uint32_t seen; (seen = record.state.load()) != journal::kAcknowledged;) {
      journal::futex_wait(record.state, seen, std::chrono::seconds(1));
    }
    control_.host_functions_done.fetch_add(1);
  }

  Control& control_;
  journal::JournalMapping journal_;
  std::vector<std::byte> description_;
  std::vector<uint64_t> held_;
  uint64_t limits_[CU_LIMIT_MAX] = {};
  uint64_t position_ = 0;
  uint64_t sequence_ = 0;
};

inline journal::DeviceDescription describe(int ordinal) {
  journal::DeviceDescription device{};
  std::snprintf(device.name, sizeof(device.name), "a device of the tests, number %d", ordinal);
  device.total_bytes = 1ull << 30;
  device.attribute_count = CU_DEVICE_ATTRIBUTE_MAX;
  device.attributes[CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK] = 1024;
  for (int i = 0; i < 3; ++i) device.attributes[CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X + i] = 1024;
  for (int i = 0; i < 3; ++i) device.attributes[CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X + i] = 65535;
  device.attributes[CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN] = 100 << 10;
  device.attributes[CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH] = 1;
  device.attributes[CU_DEVICE_ATTRIBUTE_PCI_BUS_ID] = ordinal + 1;
  return device;
}

// The daemon's half of the handshake; each job gets a process.
class Daemon {
 public:
  Daemon(Control& control, std::string path) : control_(control), path_(std::move(path)) {
    int ready[2];
    CHECK(::pipe(ready) == 0);
    const pid_t test = ::getpid();
    pid_ = ::fork();
    CHECK(pid_ >= 0);
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != test) ::_exit(0);
      listen(ready[1]);
    }
    char byte;
    CHECK(::read(ready[0], &byte, 1) == 1);
    ::close(ready[0]);
    ::close(ready[1]);
  }
  ~Daemon() { kill(); }
  Daemon(const Daemon&) = delete;

  // The daemon and every server of it.
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  [[noreturn]] void listen(int ready) {
    ::unlink(path_.c_str());
    const int socket = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path_.copy(address.sun_path, sizeof(address.sun_path) - 1);
    CHECK(::bind(socket, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 && ::listen(socket, 8) == 0);
    CHECK(::write(ready, "r", 1) == 1);
    for (;;) {
      ipc::UniqueFd client(::accept4(socket, nullptr, nullptr, SOCK_CLOEXEC));
      if (client) welcome(client.get());
    }
  }

  void refuse(int socket, int status, const char* message) {
    ipc::ServerWelcome answer{ipc::kHandshakeMagic, ipc::kHandshakeVersion, status, 0, {}, {}};
    std::snprintf(answer.message, sizeof(answer.message), "%s", message);
    ipc::send_message(socket, std::as_bytes(std::span(&answer, 1)));
  }

  void welcome(int socket) {
    ipc::ClientHello hello;
    const auto got = ipc::receive_message(socket, std::as_writable_bytes(std::span(&hello, 1)));
    if (got.bytes != sizeof(hello) || hello.magic != ipc::kHandshakeMagic) return;
    ipc::ServerWelcome answer{ipc::kHandshakeMagic, ipc::kHandshakeVersion, 0, 3, "test", {}};
    if (hello.reattach) {
      control_.reattached.fetch_add(1);
      if (const int status = control_.refuse_reattach.load()) {
        return refuse(socket, status, "this job is not known here");
      }
      answer.fds = 0;
      ipc::send_message(socket, std::as_bytes(std::span(&answer, 1)));
      return;
    }
    if (const int status = control_.refuse.load()) return refuse(socket, status, "all devices are taken");
    const auto memory = [](const char* name, uint64_t bytes) {
      const int fd = ::memfd_create(name, MFD_CLOEXEC);
      CHECK(fd >= 0 && ::ftruncate(fd, static_cast<off_t>(bytes)) == 0);
      return ipc::UniqueFd(fd);
    };
    const ipc::UniqueFd journal = memory("journal", journal::kHeaderBytes + journal::kMinRingBytes);
    const ipc::UniqueFd staging = memory("staging", journal::kStagingBytes);
    const ipc::UniqueFd pinned = memory("pinned", journal::kPinnedBytes);
    auto mapping = journal::JournalMapping::map(journal.get());
    CHECK(mapping);
    journal::JournalHeader& header = mapping->header();
    header.magic = journal::kMagic;
    header.version = journal::kLayoutVersion;
    header.device_count = 2;
    header.ring_bytes = mapping->ring_bytes();
    header.driver_version = CUDA_VERSION;
    for (int i = 0; i < 2; ++i) header.devices[i] = describe(i);
    header.daemon_pid = static_cast<uint32_t>(::getpid());
    header.state = static_cast<uint32_t>(journal::ServerState::kRunning);
    const pid_t daemon = ::getpid();
    const pid_t server = ::fork();
    CHECK(server >= 0);
    if (server == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != daemon) ::_exit(0);  // it was killed before it could have been noticed
      JobServer(control_, std::move(*mapping)).serve();
    }
    header.server_pid = static_cast<uint32_t>(server);
    control_.jobs.fetch_add(1);
    const int fds[] = {journal.get(), staging.get(), pinned.get()};
    ipc::send_message(socket, std::as_bytes(std::span(&answer, 1)), fds);
  }

  Control& control_;
  std::string path_;
  pid_t pid_ = -1;
};

inline Control& make_control() {
  void* const memory =
      ::mmap(nullptr, sizeof(Control), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED);
  return *new (memory) Control;
}

// Wait for something that another process does.
template <typename Condition>
void eventually(Condition&& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!condition()) {
    CHECK(std::chrono::steady_clock::now() < end);
    std::this_thread::yield();
  }
}

}  // namespace harness
