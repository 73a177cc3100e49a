#include "client/message.h"

#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>

namespace xmig::client {

void say(const char* format, ...) {
  char line[1024] = "xmig: ";
  constexpr size_t kPrefix = 6;
  va_list arguments;
  va_start(arguments, format);
  const int written = std::vsnprintf(line + kPrefix, sizeof(line) - kPrefix - 1, format, arguments);
  va_end(arguments);
  if (written < 0) return;
  size_t length = std::min(kPrefix + static_cast<size_t>(written), sizeof(line) - 2);
  line[length++] = '\n';
  // One write, so that lines of several processes do not mix. Nothing can be done if it fails.
  [[maybe_unused]] const ssize_t ignored = ::write(STDERR_FILENO, line, length);
}

}  // namespace xmig::client
