#!/usr/bin/env bash
# Make .venv-frameworks with PyTorch, CuPy, JAX, Triton and Jupyter's kernel as PyPI has them, in the versions of
# packaging/locks: what tests/frameworks run, on a machine with or without a GPU. Does nothing when it is there already.
# Fails with one sentence where they cannot be had, and leaves it in .cache/frameworks for the tests that are skipped.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=.venv-frameworks
lock=packaging/locks/frameworks.txt
needed=10  # GB while it installs; 6 GB afterwards
python="${PYTHON:-python3}"
wanted="$("$python" -V) $PWD $(cat "$lock" "$0" | sha256sum)"
why=.cache/frameworks
mkdir -p .cache
exec 9>.cache/frameworks.lock
flock 9  # another one may be at it
[ "$(cat "$venv/stamp" 2>/dev/null)" != "$wanted" ] || { rm -f "$why"; exit 0; }

fail() {
  rm -rf "$venv"
  echo "$1" | tee "$why" >&2
  exit 1
}

rm -rf "$venv"
free=$(($(df --output=avail --block-size=1 . | tail -n 1) / 1000000000))
[ "$free" -ge "$needed" ] || fail "PyTorch, CuPy and JAX need $needed GB of disk to be installed; $free GB are free"
echo "setting up $venv"
"$python" -m venv "$venv"
# The lock names everything, so nothing is resolved; compiled bytecode is made of what is imported only.
"$venv/bin/python" -m pip --disable-pip-version-check --quiet --retries 1 --timeout 30 install --no-cache-dir --no-compile \
  --no-deps --only-binary=:all: --requirement "$lock" 2>"$why.log" ||
  fail "PyTorch, CuPy and JAX cannot be installed: $(grep ERROR "$why.log" | head -n 1 | cut -c 1-200)"
"$venv/bin/python" -m pip --disable-pip-version-check check >&2
rm -f "$why" "$why.log"
echo "$wanted" >"$venv/stamp"
