#include "client/bootstrap/handshake.h"

#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "client/bootstrap/message.h"
#include "client/bootstrap/process.h"
#include "ipc/handshake.h"
#include "ipc/seqpacket.h"
#include "journal/ring.h"

namespace xmig::client {
namespace {

using journal::JournalMapping;
using journal::Mapping;

char job_name[sizeof(ipc::ClientHello::job)];  // as the daemon called it, for a reattach

struct JobMemory {
  JournalMapping journal;
  Mapping staging;
  std::vector<Mapping> ranges;
};

// What is shown to people: the arguments with spaces between them, as far as they fit.
void read_command(char (&command)[256]) {
  FILE* const file = std::fopen("/proc/self/cmdline", "re");
  if (!file) return;
  size_t bytes = std::fread(command, 1, sizeof(command) - 1, file);
  std::fclose(file);
  while (bytes && command[bytes - 1] == 0) --bytes;
  std::replace(command, command + bytes, '\0', ' ');
  command[bytes] = 0;
}

// A list that does not fit loses whole entries: half a UUID may be another device's.
void read_visible(ipc::ClientHello& hello) {
  const char* const every = std::getenv("XMIG_EVERY_DEVICE");
  const char* const value = std::getenv("CUDA_VISIBLE_DEVICES");
  hello.visibility = every && *every ? ipc::kEvery : value ? ipc::kNamed : ipc::kJobDevices;
  if (hello.visibility != ipc::kNamed) return;
  std::string_view list(value);
  if (list.size() >= sizeof(hello.visible)) {
    const size_t comma = list.substr(0, sizeof(hello.visible)).rfind(',');
    list = list.substr(0, comma == list.npos ? 0 : comma);
  }
  std::copy(list.begin(), list.end(), hello.visible);
}

struct Answer {
  bool connected = false;
  int error = 0;  // errno
  ipc::ServerWelcome welcome{};
  std::vector<ipc::UniqueFd> fds;
};

// One message each way. The daemon answers when a server is ready for us, which may take as long as starting one.
Answer exchange(const std::string& path, bool reattach) {
  Answer answer;
  const ipc::UniqueFd socket = ipc::connect_to(path);
  if (!socket) {
    answer.error = errno;
    return answer;
  }
  answer.connected = true;
  ipc::ClientHello hello{};
  hello.magic = ipc::kHandshakeMagic;
  hello.version = ipc::kHandshakeVersion;
  hello.layout = journal::kLayoutVersion;
  hello.reattach = reattach;
  const char* const given = std::getenv("XMIG_JOB");
  const std::string_view job = reattach ? job_name : given ? given : "";
  std::copy_n(job.begin(), std::min(job.size(), sizeof(hello.job) - 1), hello.job);
  read_command(hello.command);
  read_visible(hello);
  answer.error = ipc::send_message(socket.get(), std::as_bytes(std::span(&hello, 1)));
  // A daemon that has closed already may have reported why.
  if (answer.error && answer.error != EPIPE && answer.error != ECONNRESET) return answer;
  answer.error = 0;
  constexpr int kPatienceMs = 15'000;
  for (pollfd poll{socket.get(), POLLIN, 0};;) {
    const int ready = ::poll(&poll, 1, kPatienceMs);
    if (ready > 0) break;
    if (ready == 0) say("still waiting for xmigd at %s to get a GPU server ready", path.c_str());
    if (ready < 0 && errno != EINTR) {
      answer.error = errno;
      return answer;
    }
  }
  ipc::Received received =
      ipc::receive_message(socket.get(), std::as_writable_bytes(std::span(&answer.welcome, 1)), 3);
  const bool whole = received.bytes == sizeof(answer.welcome) && answer.welcome.magic == ipc::kHandshakeMagic &&
                     answer.welcome.version == ipc::kHandshakeVersion && answer.welcome.fds == received.fds.size();
  answer.error = received.error ? received.error : received.bytes == 0 ? ECONNRESET : whole ? 0 : EPROTO;
  answer.welcome.job[sizeof(answer.welcome.job) - 1] = 0;
  answer.welcome.message[sizeof(answer.welcome.message) - 1] = 0;
  answer.fds = std::move(received.fds);
  return answer;
}

// The daemon's own words, which the job's log has already; or, where it had none, what happened instead.
CUresult refusal(const Answer& answer, const std::string& path) {
  if (answer.error) {
    say_aloud("xmigd at %s did not answer the handshake: %s; its log says more (journalctl -u xmigd)", path.c_str(),
              std::strerror(answer.error));
    return CUDA_ERROR_SYSTEM_NOT_READY;
  }
  tell_starter("xmigd refused this process: %s", answer.welcome.message);
  return static_cast<CUresult>(answer.welcome.status);
}

// A piece of address space of the job. A forked child is not part of the job: it has none of it. But for page-locked
// memory, which the driver, too, lets children share: theirs are the program's own bytes, to read and to write.
bool keep(std::vector<Mapping>& kept, Mapping mapping, const char* what, uint64_t address, uint64_t bytes,
          int for_children = MADV_DONTFORK) {
  if (!mapping) {
    say_aloud("cannot %s at %#lx-%#lx: %s; something else in this program uses these addresses, or a limit (ulimit -v) "
              "is too small for them", what, address, address + bytes, std::strerror(errno));
    return false;
  }
  ::madvise(mapping.data(), mapping.size(), for_children);
  kept.push_back(std::move(mapping));
  return true;
}

// The journal as the daemon and the server have prepared it: how many devices it has; 0 if it does not fit.
uint32_t devices_of(const JournalMapping& journal) {
  const journal::JournalHeader& header = journal.header();
  const uint32_t count = header.device_count;
  const bool sound = header.magic == journal::kMagic && header.version == journal::kLayoutVersion &&
                     header.ring_bytes == journal.ring_bytes() && count <= journal::kMaxDevices &&
                     header.tail.load() == 0 && header.trimmed.load() == 0;
  return sound ? count : 0;
}

CUresult map_job(const Answer& answer) {
  struct stat staging {}, pinned {};
  if (answer.fds.size() != 3 || ::fstat(answer.fds[1].get(), &staging) != 0 ||
      ::fstat(answer.fds[2].get(), &pinned) != 0 || static_cast<uint64_t>(staging.st_size) < journal::kStagingBytes ||
      static_cast<uint64_t>(pinned.st_size) < journal::kPinnedBytes) {
    say_aloud("xmigd sent something that is not a job: shim and daemon are of different versions; install one of them "
              "again");
    return CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
  }
  std::optional<JournalMapping> journal = JournalMapping::map(answer.fds[0].get());
  const uint32_t count = journal ? devices_of(*journal) : 0;
  if (count == 0) {
    say_aloud("the journal that xmigd sent cannot be used (%s): shim and daemon are of different versions; install one of "
              "them again", journal ? "its header does not fit" : std::strerror(errno));
    return CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
  }
  ::madvise(journal->data(), journal->size(), MADV_DONTFORK);
  Mapping slots = Mapping::anywhere(answer.fds[1].get(), journal::kStagingBytes);
  if (!slots) {
    say_aloud("cannot map the staging memory: %s", std::strerror(errno));
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  ::madvise(slots.data(), slots.size(), MADV_DONTFORK);
  std::vector<Mapping> mappings;
  if (!keep(mappings, Mapping::at(journal::kPinnedBase, answer.fds[2].get(), journal::kPinnedBytes),
            "map pinned memory", journal::kPinnedBase, journal::kPinnedBytes, MADV_DOFORK)) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  // Host memory must never be where device addresses are.
  for (uint32_t i = 0; i < count; ++i) {
    const uint64_t base = journal::kDeviceBase + i * journal::kDeviceSpan;
    if (!keep(mappings, Mapping::reserve(base, journal::kDeviceSpan), "reserve the addresses of device memory", base,
              journal::kDeviceSpan)) {
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
  }
  // From here on nothing fails, and all of it stays for the life of the process.
  auto* const memory = new JobMemory{std::move(*journal), std::move(slots), std::move(mappings)};
  process.memory = memory;
  process.header = &memory->journal.header();
  process.ring = memory->journal.ring();
  process.ring_bytes = memory->journal.ring_bytes();
  process.staging = memory->staging.data();
  process.device_count = static_cast<int>(count);
  process.driver_version = static_cast<int>(process.header->driver_version);
  for (uint32_t i = 0; i < count; ++i) {
    auto& device = process.devices[i];
    std::memcpy(&device, &process.header->devices[i], sizeof(device));
    device.name[sizeof(device.name) - 1] = 0;
    device.attribute_count = std::min(device.attribute_count, journal::kAttributes);
    if (const uint64_t quota = process.header->memory_quota; quota != 0) device.total_bytes = std::min(device.total_bytes, quota);
  }
  for (auto& thread : process.header->threads) thread.waiting.store(journal::kNotWaiting, std::memory_order_relaxed);
  std::memcpy(job_name, answer.welcome.job, sizeof(job_name));
  return CUDA_SUCCESS;
}

}  // namespace

std::string socket_path() {
  if (const char* path = std::getenv("XMIG_SOCKET"); path && *path) return path;
  const char* const folder = std::getenv("XMIG_RUNTIME_DIR");
  return std::string(folder && *folder ? folder : "/run/xmig") + "/client.sock";
}

Attached attach(bool quiet) {
  const std::string path = socket_path();
  const Answer answer = exchange(path, false);
  if (!answer.connected) {
    static bool reported = false;
    if (!quiet && !std::exchange(reported, true)) {
      tell_starter("no xmigd answers at %s (%s): start it with `xmigd`, or set XMIG_RUNTIME_DIR to where it runs, or set "
                   "XMIG_WITHOUT_DAEMON=native to use this machine's own driver", path.c_str(), std::strerror(answer.error));
    }
    return {CUDA_ERROR_SYSTEM_NOT_READY, true};
  }
  if (answer.error || answer.welcome.status) return {refusal(answer, path), false};
  return {map_job(answer), false};
}

Reattached reattach() {
  const std::string path = socket_path();
  const Answer answer = exchange(path, true);
  if (!answer.connected) return {Reattached::kNoDaemon, CUDA_SUCCESS};
  if (answer.error) return {Reattached::kNoDaemon, CUDA_SUCCESS};  // it went away again: ask the next one
  if (answer.welcome.status) return {Reattached::kRefused, refusal(answer, path)};
  // The memory is the same: the descriptors that come along are not needed.
  return {Reattached::kAccepted, CUDA_SUCCESS};
}

}  // namespace xmig::client
