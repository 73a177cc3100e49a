// What the shim has to say to people: lines of the job's log, which the daemon keeps (`xmigctl logs`).
//
// Invariants:
//   No descriptor of the program's is written to, whatever its number: descriptor 2 may be a file of the program's own, or a pipe
//   that nobody reads. What one starts a program with is another matter: tell_starter().
//   Nobody waits: a line for which there is no room is counted and left out.
#pragma once

namespace xmig::client {

// One line.
[[gnu::format(printf, 1, 2)]] void say(const char* format, ...);

// The same about a call of the program that is refused: programs try out what they can have, so each text comes once, and
// three of one `format` are enough.
[[gnu::format(printf, 1, 2)]] void complain(const char* format, ...);

// One line, prefixed "xmig: ", to whoever started the program: the standard error of `xmigctl run`, as long as descriptor 2 is
// provably that; otherwise the process's terminal; otherwise nobody. For what keeps a program from having a daemon at all.
[[gnu::format(printf, 1, 2)]] void tell_starter(const char* format, ...);

// Both: what goes wrong between a program and a daemon that answers.
[[gnu::format(printf, 1, 2)]] void say_aloud(const char* format, ...);

}  // namespace xmig::client
