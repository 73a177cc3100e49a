#include "client/bootstrap/requested.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "client/bootstrap/native.h"

namespace xmig::client {
namespace {

const char* path() {
  static const char* const given = std::getenv("XMIG_REQUESTED");
  return given && *given ? given : nullptr;
}

void note(const char* kind, const char* what) {
  const char* const file = path();
  if (!file) return;
  char line[512];
  const int length = std::snprintf(line, sizeof(line), "%s %.480s\n", kind, what);
  const int fd = ::open(file, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
  if (fd < 0) return;
  [[maybe_unused]] const ssize_t ignored = ::write(fd, line, static_cast<size_t>(length));
  ::close(fd);
}

}  // namespace

bool requested_wanted() { return path() != nullptr; }

void note_called(int slot) {
  static constinit std::array<std::atomic<bool>, 1024> called{};
  const auto index = static_cast<size_t>(slot);
  if (index < called.size() && !called[index].exchange(true, std::memory_order_relaxed)) note("called", kNativeNames[slot]);
}

void note_refused(const char* name) { note("refused", name); }

void note_missing(const char* name) { note("missing", name); }

void note_missing_table(const char (&uuid)[16]) {
  char text[37];
  char* to = text;
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) *to++ = '-';
    to += std::snprintf(to, 3, "%02x", static_cast<unsigned char>(uuid[i]));
  }
  note("table", text);
}

}  // namespace xmig::client
