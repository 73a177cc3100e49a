#!/usr/bin/env bash
# system.sh build|fuzz|packages|boot: the system packages that are missing, installed where this may be done; otherwise one line
# that says exactly what to install.
set -euo pipefail

works() { printf '%s\n' "$2" | c++ -std=c++20 -x c++ -fsyntax-only $1 - 2>/dev/null; }

apt=() dnf=()
need() { apt+=("$1") dnf+=("$2"); }

case "${1:-build}" in
build)
  works "" '#if __GNUC__ < 12 && !defined(__clang__)
#error too old
#endif
#include <span>
#include <atomic>' || need g++ gcc-c++
  works "" '#include <xxhash.h>' || need libxxhash-dev xxhash-devel
  works "" '#include <lz4.h>' || need liblz4-dev lz4-devel
  works "" '#include <zstd.h>' || need libzstd-dev libzstd-devel
  works "" '#include <nlohmann/json.hpp>' || need nlohmann-json3-dev json-devel
  python="${PYTHON:-python3}"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "xMIG needs Python 3.11 or later; $python is $("$python" -V). Name another: make PYTHON=python3.12" >&2
    exit 1
  }
  # Debian keeps ensurepip, without which a venv has no pip, in a package of its own.
  "$python" -c 'import ensurepip, venv' 2>/dev/null || need python3-venv python3-pip
  # Tests of several nodes give each a network of its own.
  command -v ip >/dev/null && command -v tc >/dev/null || need iproute2 iproute
  # A test of a failing disk makes one; outside of root's path it is found all the same.
  PATH="$PATH:/usr/sbin:/sbin" command -v mkfs.ext4 >/dev/null || need e2fsprogs e2fsprogs
  ;;
packages)
  command -v rpmbuild >/dev/null || need rpm rpm-build
  command -v rpmlint >/dev/null || need rpmlint rpmlint
  command -v systemd-analyze >/dev/null || need systemd systemd
  ;;
boot)
  command -v systemd-nspawn >/dev/null || need systemd-container systemd-container
  command -v debootstrap >/dev/null || need debootstrap debootstrap
  ;;
fuzz)
  "$(dirname "$0")/clang.sh" >/dev/null 2>&1 || { need clang clang && need libclang-rt-dev compiler-rt; }
  ;;
esac

[ ${#apt[@]} -gt 0 ] || exit 0
as_root=()
if [ "$(id -u)" -ne 0 ]; then
  as_root=(sudo -n)
  sudo -n true 2>/dev/null || as_root=(false)
fi
if command -v apt-get >/dev/null; then
  install="apt-get install -y --no-install-recommends ${apt[*]}"
  update="apt-get update -qq"
elif command -v dnf >/dev/null; then
  install="dnf install -y ${dnf[*]}"
  update="true"
else
  echo "xMIG needs these packages (Debian's names): ${apt[*]}" >&2
  exit 1
fi
if [ "${as_root[*]}" = false ]; then
  echo "xMIG needs system packages; as root: $install" >&2
  exit 1
fi
echo "installing: $install"
mkdir -p "$(dirname "$0")/../../.cache"
exec 9>"$(dirname "$0")/../../.cache/system.lock"
flock 9  # what is fetched in the background may be installed just now (browser.sh)
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" $update && "${as_root[@]}" $install >/dev/null || {
  echo "that failed; as root: $install" >&2
  exit 1
}
