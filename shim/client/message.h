// What the shim has to say to people, on the standard error of the program.
#pragma once

namespace xmig::client {

// One line, prefixed "xmig: ".
[[gnu::format(printf, 1, 2)]] void say(const char* format, ...);

// The same about a call of the program that is refused: programs try out what they can have, so each text comes once, and
// three of one `format` are enough.
[[gnu::format(printf, 1, 2)]] void complain(const char* format, ...);

}  // namespace xmig::client
