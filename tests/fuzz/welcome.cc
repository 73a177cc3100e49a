// The daemon's half of the handshake, as a program under the shim receives it: the message, the descriptors that come
// along, and the files behind them. Whatever is sent, the program is refused or served, and a refusal leaves nothing
// behind.
//
// Input: a byte of shape, a byte that says how many descriptors come, the message, the beginning of the journal.
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "client/bootstrap/handshake.h"
#include "ipc/handshake.h"
#include "ipc/seqpacket.h"
#include "journal/layout.h"
#include "journal/ring.h"

namespace {

using namespace xmig;

enum Shape : uint8_t {
  kPlausibleMessage = 1,
  kPlausibleFiles = 2,
  kPlausibleJournal = 4,
  kLongMessage = 8,
  kReattach = 16,
};

// A socket to which the client under test connects.
int listening() {
  char folder[] = "/tmp/xmig-fuzz-XXXXXX";
  if (!::mkdtemp(folder)) std::abort();
  const std::string path = std::string(folder) + "/client.sock";
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::copy(path.begin(), path.end(), address.sun_path);
  const int fd = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (fd < 0 || ::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 || ::listen(fd, 8) != 0) {
    std::abort();
  }
  ::setenv("XMIG_SOCKET", path.c_str(), 1);
  static const std::string remove = folder;
  std::atexit([] { std::filesystem::remove_all(remove); });
  return fd;
}

ipc::UniqueFd file(uint64_t bytes, std::span<const uint8_t> content = {}) {
  ipc::UniqueFd fd(::memfd_create("fuzz", MFD_CLOEXEC));
  if (!fd || ::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) std::abort();
  if (!content.empty() && ::pwrite(fd.get(), content.data(), content.size(), 0) < 0) std::abort();
  return fd;
}

std::vector<uint8_t> journal_start(std::span<const uint8_t> input, uint8_t shape) {
  std::vector<uint8_t> start(input.begin(), input.end());
  if (shape & kPlausibleJournal) {
    constexpr size_t kFrom = offsetof(journal::JournalHeader, device_count);
    start.resize(std::max(start.size(), offsetof(journal::JournalHeader, job)));
    const uint64_t ring = journal::kMinRingBytes;
    const uint32_t devices = 1 + start[kFrom] % 2;
    std::memcpy(start.data(), &journal::kMagic, sizeof(uint64_t));
    std::memcpy(start.data() + offsetof(journal::JournalHeader, version), &journal::kLayoutVersion, sizeof(uint32_t));
    std::memcpy(start.data() + kFrom, &devices, sizeof(devices));
    std::memcpy(start.data() + offsetof(journal::JournalHeader, ring_bytes), &ring, sizeof(ring));
  }
  return start;
}

size_t open_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const int listener = listening();
  if (size < 2) return 0;
  const uint8_t shape = data[0];
  const size_t count = data[1] % (ipc::kMaxFds + 1);
  std::span<const uint8_t> input(data + 2, size - 2);

  ipc::ServerWelcome welcome{};
  const size_t message = std::min(input.size(), sizeof(welcome));
  std::memcpy(static_cast<void*>(&welcome), input.data(), message);
  input = input.subspan(message);
  if (shape & kPlausibleMessage) {
    welcome.magic = ipc::kHandshakeMagic;
    welcome.version = ipc::kHandshakeVersion;
    welcome.fds = static_cast<uint32_t>(count);
  }
  std::vector<std::byte> bytes(sizeof(welcome) + (shape & kLongMessage ? 64 : 0));
  std::memcpy(bytes.data(), &welcome, sizeof(welcome));
  if (!(shape & kPlausibleMessage)) bytes.resize(message);

  const std::vector<uint8_t> start = journal_start(input, shape);
  std::vector<ipc::UniqueFd> files;
  std::vector<int> fds;
  for (size_t i = 0; i < count; ++i) {
    const bool plausible = shape & kPlausibleFiles;
    const uint64_t sizes[] = {journal::kHeaderBytes + journal::kMinRingBytes, journal::kStagingBytes,
                              journal::kPinnedBytes};
    const uint64_t bytes_of_file = plausible && i < 3 ? sizes[i] : data[1] * 1000;
    files.push_back(file(std::max<uint64_t>(bytes_of_file, i == 0 ? start.size() : 0),
                         i == 0 ? std::span<const uint8_t>(start) : std::span<const uint8_t>()));
    fds.push_back(files.back().get());
  }

  const size_t before = open_descriptors();
  std::thread daemon([&] {
    ipc::UniqueFd client;
    ipc::ClientHello hello{};
    do {  // what an earlier input made the client say comes on a connection of its own
      client = ipc::UniqueFd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
      hello = {};
      ipc::receive_message(client.get(), std::as_writable_bytes(std::span(&hello, 1)));
    } while (hello.magic != ipc::kHandshakeMagic);
    if (!bytes.empty()) ipc::send_message(client.get(), bytes, fds);
  });
  if (shape & kReattach) {
    client::reattach();
  } else {
    client::attach(false);
  }
  daemon.join();
  if (open_descriptors() != before) std::abort();  // the client keeps none, and loses none
  return 0;
}
