// The way to whoever started the program, without a signal, without waiting, and without touching what the program has made of its
// descriptors.
#pragma once

#include <string_view>

namespace xmig::client {

// $XMIG_STDERR, set by `xmigctl run`, is the device and inode of its own descriptor 2. Is ours the same file still?
bool is_starters_stderr(int fd);

// False: there was nobody to write to, or they do not take it now.
bool write_to_starter(std::string_view line);

}  // namespace xmig::client
