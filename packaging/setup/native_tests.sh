#!/usr/bin/env bash
# native_tests.sh native|asan|tsan: build the native part with its tests, and run them.
set -euo pipefail
cd "$(dirname "$0")/../.."
configuration="$1"
packaging/setup/native.sh "$configuration" all
# What a sanitizer finds fails the test; so does a leak.
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
# Most of what they do is to wait for each other's processes; with a sanitizer, less of it.
jobs=$(($(nproc) + 1))
[ "$configuration" != native ] || jobs=$((2 * $(nproc)))
.venv/bin/ctest --test-dir "build/$configuration" --output-on-failure --no-tests=error --timeout 300 --parallel "$jobs"
