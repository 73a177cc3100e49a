#!/usr/bin/env bash
# Print the path of an etcd: the system's, or that of the machine's own Debian release (etcd-server), unpacked into
# .cache/etcd without touching the system. Fails with one sentence where neither can be had.
set -euo pipefail
cd "$(dirname "$0")/../.."
prefix="$PWD/.cache/etcd"

mkdir -p .cache
exec 9>.cache/etcd.lock
flock 9  # another one may be at it

fail() {
  echo "etcd.sh: $1" >&2
  exit 1
}

for candidate in etcd "$prefix/usr/bin/etcd"; do
  if "$candidate" --version >/dev/null 2>&1; then
    command -v "$candidate"
    exit 0
  fi
done
command -v apt-get >/dev/null || fail "there is no etcd here, and no apt-get to take it from"
[ -n "$(apt-cache policy etcd-server 2>/dev/null)" ] || apt-get update -qq >&2 || fail "apt-get knows no packages"
[ -n "$(apt-cache policy etcd-server 2>/dev/null)" ] || fail "the package sources have no etcd-server"

unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT
mkdir "$unpacked/root"
# It is linked statically but for the C library.
(cd "$unpacked" && apt-get download -qq -o APT::Sandbox::User=root etcd-server >&2) || fail "its package does not come"
dpkg-deb --extract "$unpacked"/etcd-server_*.deb "$unpacked/root"
rm -rf "$prefix"
mv "$unpacked/root" "$prefix"
chmod 755 "$prefix"
"$prefix/usr/bin/etcd" --version >/dev/null || {
  rm -rf "$prefix"
  fail "the etcd of this Debian does not run here"
}
echo "$prefix/usr/bin/etcd"
