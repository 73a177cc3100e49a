#!/usr/bin/env bash
# Print a clang++ that can link libFuzzer targets with the headers of this machine's libstdc++; fail if there is none.
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cat >"$scratch/probe.cc" <<'CODE'
#include <span>
#include <nlohmann/json.hpp>
extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, size_t size) {
  return static_cast<int>(std::span(data, size).empty() ? 0 : 0);
}
CODE
for candidate in clang++ clang++-{21,20,19,18,17,16,15,14}; do
  if command -v "$candidate" >/dev/null &&
    "$candidate" -std=c++20 -fsanitize=fuzzer,address,undefined "$scratch/probe.cc" -o "$scratch/probe" 2>/dev/null; then
    echo "$candidate"
    exit 0
  fi
done
echo "no clang++ that can build libFuzzer targets; install clang and its compiler-rt" >&2
exit 1
