#!/usr/bin/env bash
# build.sh: kernels.ptx from kernels.cu, with nvcc. The version in the text is lowered to what drivers for CUDA 12.4 read;
# nothing newer is used. -rdc: the variable is visible, and so nothing that the compiler knows everything about.
set -euo pipefail
cd "$(dirname "$0")"
nvcc -ptx -rdc=true -arch=compute_80 kernels.cu -o kernels.ptx
sed -i 's/^\.version .*/.version 8.0/' kernels.ptx
