#!/usr/bin/env bash
# native.sh CONFIGURATION TARGET [CMAKE-OPTION...]: bring a target of the native part up to date in build/CONFIGURATION.
# What the configuration `native` builds for run time is also put where the Python package looks for it.
set -euo pipefail
cd "$(dirname "$0")/../.."
configuration="$1" target="$2"
shift 2
export PATH="$PWD/.venv/bin:$PATH"
# For who has ccache for a launcher: headers are precompiled.
export CCACHE_SLOPPINESS="${CCACHE_SLOPPINESS:-pch_defines,time_macros}"
build="build/$configuration"
cmake -S shim -B "$build" -G Ninja -Wno-dev --log-level=WARNING -DPython3_EXECUTABLE="$PWD/.venv/bin/python" "$@" >/dev/null
cmake --build "$build" --target "$target"
[ "$configuration" != native ] || cmake --install "$build" --component native --prefix . >/dev/null
