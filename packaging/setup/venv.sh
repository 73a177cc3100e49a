#!/usr/bin/env bash
# Make .venv with what pyproject.toml asks for in the versions of packaging/locks, and this tree installed in place.
# Does nothing when it is there already.
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON:-python3}"
lock=packaging/locks/python.txt
wanted="$("$python" -V) $PWD $(cat pyproject.toml "$lock" "$0" | sha256sum)"
[ "$(cat .venv/stamp 2>/dev/null)" != "$wanted" ] || exit 0

echo "setting up .venv"
# One that was made by this Python in this place is brought up to date, not made anew.
made_by="$("$python" -V) $PWD"
case "$(cat .venv/stamp 2>/dev/null)" in
"$made_by"*) rm .venv/stamp ;;
*)
  rm -rf .venv
  "$python" -m venv .venv
  ;;
esac
# Compiled bytecode is made of what is imported only.
pip=(.venv/bin/python -m pip --disable-pip-version-check --quiet install --no-compile --constraint "$lock")
"${pip[@]}" scikit-build-core ninja cmake
# The native part is built by native.sh, not by pip: incremental, and once for every way it is used.
"${pip[@]}" --no-build-isolation --config-settings=wheel.cmake=false --config-settings=editable.mode=inplace \
  --editable '.[dev]'
echo "$wanted" >.venv/stamp
