#!/usr/bin/env bash
# native.sh [CONFIGURATION [CMAKE-OPTION...]]: configure and build the native part in build/CONFIGURATION, or bring it
# up to date. The default configuration, `native`, is also put where the Python package looks for it.
set -euo pipefail
cd "$(dirname "$0")/../.."
configuration="${1:-native}"
shift || true
export PATH="$PWD/.venv/bin:$PATH"
build="build/$configuration"
cmake -S shim -B "$build" -G Ninja -Wno-dev --log-level=WARNING -DPython3_EXECUTABLE="$PWD/.venv/bin/python" "$@" >/dev/null
cmake --build "$build"
[ "$configuration" != native ] || cmake --install "$build" --component native --prefix . >/dev/null
