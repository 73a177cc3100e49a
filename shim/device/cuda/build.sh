#!/usr/bin/env bash
# build.sh: hash.ptx and faults.ptx from their sources, with nvcc. The version in the text is lowered to what drivers for
# CUDA 12.4 read; nothing newer is used.
set -euo pipefail
cd "$(dirname "$0")"
for name in hash faults; do
  nvcc -ptx -arch=compute_80 "$name.cu" -o "$name.ptx"
  sed -i 's/^\.version .*/.version 8.0/' "$name.ptx"
done
