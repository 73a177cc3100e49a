#!/usr/bin/env bash
# Build the source distribution and the wheel into dist/, and check that the wheel, alone in a fresh environment, has
# its parts and runs.
set -euo pipefail
cd "$(dirname "$0")/../.."
rm -rf dist
.venv/bin/python -m build --outdir dist .
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"${PYTHON:-python3}" -m venv "$scratch/venv"
"$scratch/venv/bin/python" -m pip --disable-pip-version-check --quiet install \
  --constraint packaging/locks/python.txt "$(echo dist/*.whl)[demo]"
cd "$scratch"
venv/bin/xmigctl demo
