// A line on its way to the daemon, which keeps it in the job's log: through the journal's memory where this process has one, by a
// message of its own elsewhere. Nobody waits, and nothing stays open.
#pragma once

#include <cstddef>
#include <string_view>

namespace xmig::client {

inline constexpr size_t kLongestLine = 992;  // bytes

void keep_line(std::string_view text);

}  // namespace xmig::client
