#!/usr/bin/env bash
# Print the path of a CRIU 4.2 or later: the system's, or, on Debian, one from the release that has it (earlier ones dump
# no IP sockets on Linux 6.16 and later), unpacked with its own libraries into .cache/criu without touching the system.
# Fails with one sentence where neither can be had.
set -euo pipefail
cd "$(dirname "$0")/../.."
prefix="$PWD/.cache/criu"
release=forky

mkdir -p .cache
exec 9>.cache/criu.lock
flock 9  # another one may be at it

fail() {
  echo "criu.sh: $1" >&2
  exit 1
}

for candidate in criu "$prefix/criu"; do
  if "$candidate" --version 2>/dev/null | grep -qE '^Version: (4\.[2-9]|4\.[1-9][0-9]|[5-9]|[1-9][0-9])'; then
    command -v "$candidate"
    exit 0
  fi
done
command -v apt-get >/dev/null || fail "there is no CRIU 4.2 here; install it (dnf install criu)"
# The mirror that the machine's own sources name.
mirror=$(apt-get indextargets --format '$(SITE)' 2>/dev/null | grep -E '/debian/?$' | head -n 1 || true)
[ -n "$mirror" ] || fail "there is no CRIU 4.2 here, and no Debian mirror among the package sources to take it from"

unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT
mkdir -p "$unpacked"/{lists/partial,archives/partial,packages,root}
touch "$unpacked/status"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $release main" >"$unpacked/sources.list"
cat >"$unpacked/apt.conf" <<CONF
Dir::Etc::SourceList "$unpacked/sources.list";
Dir::Etc::SourceParts "/dev/null";
Dir::State::Lists "$unpacked/lists";
Dir::State::Status "$unpacked/status";
Dir::Cache "$unpacked";
APT::Sandbox::User "root";
CONF
export APT_CONFIG="$unpacked/apt.conf"
only_needed=(--no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances)
apt-get update -qq >&2
mapfile -t packages < <(apt-cache depends --recurse "${only_needed[@]}" criu | grep -oE '^[a-z0-9][a-z0-9.+-]+$' | sort -u)
(cd "$unpacked/packages" && apt-get download -qq "${packages[@]}" >&2)
for package in "$unpacked"/packages/*.deb; do dpkg-deb --extract "$package" "$unpacked/root"; done

rm -rf "$prefix"
mkdir -p "$(dirname "$prefix")"
mv "$unpacked/root" "$prefix"
chmod 755 "$prefix"
libraries="$prefix/usr/lib/$(gcc -dumpmachine)"
cat >"$prefix/criu" <<WRAPPER
#!/bin/sh
exec "$libraries"/ld-linux-*.so.* --library-path "$libraries" "$prefix/usr/sbin/criu" "\$@"
WRAPPER
chmod 755 "$prefix/criu"
"$prefix/criu" --version >/dev/null || fail "the CRIU of Debian $release does not run here"
echo "$prefix/criu"
