#!/usr/bin/env bash
# build.sh: the images from variables.cu, with nvcc: PTX, a cubin, one that was linked, and a fat binary of several.
set -euo pipefail
cd "$(dirname "$0")"
nvcc -ptx -arch=compute_80 variables.cu -o variables.ptx
nvcc -cubin -arch=sm_90 variables.cu -o variables.cubin
nvcc -rdc=true -dlink -cubin -arch=sm_90 variables.cu -o linked.cubin
nvcc -fatbin --compress-mode=size -gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90,code=sm_90 \
  -gencode=arch=compute_90,code=compute_90 variables.cu -o variables.fatbin
