#include "client/bootstrap/message.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <string_view>

#include "client/bootstrap/job_log.h"
#include "client/bootstrap/starter.h"

namespace xmig::client {

namespace {

class Line {
 public:
  Line(const char* format, va_list arguments) {
    const int written = std::vsnprintf(text_ + kPrefix, sizeof(text_) - kPrefix - 1, format, arguments);
    length_ = std::min(kPrefix + static_cast<size_t>(std::max(written, 0)), sizeof(text_) - 2);
    text_[length_++] = '\n';
  }
  std::string_view text() const { return {text_ + kPrefix, length_ - kPrefix - 1}; }
  std::string_view whole() const { return {text_, length_}; }  // one write, so that lines of several processes do not mix

 private:
  static constexpr size_t kPrefix = 6;
  char text_[kLongestLine + kPrefix + 2] = "xmig: ";
  size_t length_ = 0;
};

}  // namespace

void say(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const Line line(format, arguments);
  va_end(arguments);
  keep_line(line.text());
}

void complain(const char* format, ...) {
  constexpr size_t kEnough = 3;
  va_list arguments;
  va_start(arguments, format);
  const Line line(format, arguments);
  va_end(arguments);
  static std::mutex& mutex = *new std::mutex;
  static auto& reported = *new std::map<std::string_view, std::set<std::string, std::less<>>>;
  const std::lock_guard lock(mutex);
  auto& lines = reported[format];
  if (lines.size() < kEnough && lines.emplace(line.text()).second) keep_line(line.text());
}

void tell_starter(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const Line line(format, arguments);
  va_end(arguments);
  write_to_starter(line.whole());
}

void say_aloud(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const Line line(format, arguments);
  va_end(arguments);
  keep_line(line.text());
  write_to_starter(line.whole());
}

}  // namespace xmig::client
