// The library that this process would have loaded without xMIG: its server opens the same file, so that versions are equal.
#pragma once

#include <string>

namespace xmig::client {

// The full path; empty: none was found. $XMIG_NATIVE_LIBNCCL, if it is set, or else a libnccl.so.2 beside a library that is loaded
// (as its RPATH has it), or one that is installed.
std::string genuine_nccl();

}  // namespace xmig::client
