// What the shim has to say to people, on the standard error of the program.
#pragma once

namespace xmig::client {

// One line, prefixed "xmig: ".
[[gnu::format(printf, 1, 2)]] void say(const char* format, ...);

}  // namespace xmig::client
