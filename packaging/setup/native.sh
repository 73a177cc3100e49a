#!/usr/bin/env bash
# native.sh native|asan|tsan TARGET [CMAKE-OPTION...]: bring a target of the native part up to date, in build/native with
# nothing that is for tests alone, in the others with sanitizers. What `native` has for run time is also put where the
# Python package looks for it.
set -euo pipefail
cd "$(dirname "$0")/../.."
configuration="$1" target="$2"
shift 2
export PATH="$PWD/.venv/bin:$PATH"
options=()
case "$configuration" in
# Everything is compiled by clang, which libFuzzer needs: once for fuzzing and for the tests with this sanitizer.
asan)
  clang="$(command -v "$(packaging/setup/clang.sh)")"
  # What another compiler has left: CMake would begin anew, and forget the options.
  grep -qs "^CMAKE_CXX_COMPILER:[A-Z]*=$clang\$" build/asan/CMakeCache.txt || rm -rf build/asan
  options=(-DXMIG_SANITIZE=address,undefined -DXMIG_FUZZ=ON -DCMAKE_CXX_COMPILER="$clang" -DCMAKE_C_COMPILER="${clang/++/}")
  ;;
tsan) options=(-DXMIG_SANITIZE=thread) ;;
esac
# For who has ccache for a launcher: headers are precompiled.
export CCACHE_SLOPPINESS="${CCACHE_SLOPPINESS:-pch_defines,time_macros}"
build="build/$configuration"
cmake -S shim -B "$build" -G Ninja -Wno-dev --log-level=WARNING -DPython3_EXECUTABLE="$PWD/.venv/bin/python" "${options[@]}" "$@" >/dev/null
cmake --build "$build" --target "$target"
[ "$configuration" != native ] || cmake --install "$build" --component native --prefix . >/dev/null
