#!/bin/sh
# build.sh OUTPUT [FOLDER]: the SPANK plug-in, for the Slurm whose headers are in FOLDER (default: the system's). It is
# built for each major version of Slurm. CC and CFLAGS as usual.
set -eu
source="$(dirname "$0")/spank_xmig.c"
# shellcheck disable=SC2086  # flags are words
exec "${CC:-cc}" -std=gnu11 -O2 -Wall -Wextra -Werror ${CFLAGS:-} ${2:+-isystem "$2"} -shared -fPIC -o "$1" "$source"
