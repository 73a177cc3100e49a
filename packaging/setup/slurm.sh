#!/usr/bin/env bash
# Print the folder of an unpacked Slurm, of the machine's own Debian release: daemons, commands, plug-ins and headers, in
# .cache/slurm, without touching the system. Fails with one sentence where it cannot be had.
set -euo pipefail
cd "$(dirname "$0")/../.."
prefix="$PWD/.cache/slurm"

mkdir -p .cache
exec 9>.cache/slurm.lock
flock 9  # another one may be at it

fail() {
  echo "slurm.sh: $1" >&2
  exit 1
}

if [ -x "$prefix/usr/sbin/slurmctld" ]; then
  echo "$prefix"
  exit 0
fi
command -v apt-get >/dev/null || fail "there is no apt-get here to take Slurm from"
slurm=(slurmctld slurmd slurm-client slurm-wlm-basic-plugins libslurm-dev)
[ -n "$(apt-cache policy slurmctld 2>/dev/null)" ] || apt-get update -qq >&2 || fail "apt-get knows no packages"
# What this machine does not have yet: the libraries, too.
mapfile -t needed < <(apt-get install --simulate --no-install-recommends "${slurm[@]}" 2>/dev/null | sed -n 's/^Inst \([^ ]*\).*/\1/p')
library=$(apt-cache depends libslurm-dev 2>/dev/null | grep -oE 'libslurm[0-9]+' | head -n 1 || true)
[ -n "$library" ] || fail "the package sources have no Slurm"

unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT
mkdir "$unpacked/root"
mapfile -t packages < <(printf '%s\n' "${slurm[@]}" "$library" "${needed[@]}" | sort -u)
(cd "$unpacked" && apt-get download -qq -o APT::Sandbox::User=root "${packages[@]}" >&2) || fail "its packages do not come"
for package in "$unpacked"/*.deb; do dpkg-deb --extract "$package" "$unpacked/root"; done
# Debian's alternatives give them their names, and slurmctld refuses to be called otherwise.
for program in "$unpacked"/root/usr/{bin,sbin}/*-wlm; do
  [ ! -e "$program" ] || [ -e "${program%-wlm}" ] || ln -s "$(basename "$program")" "${program%-wlm}"
done
rm -rf "$prefix"
mv "$unpacked/root" "$prefix"
chmod 755 "$prefix"
libraries="$prefix/usr/lib/$(gcc -dumpmachine)"
LD_LIBRARY_PATH="$libraries:$libraries/slurm-wlm" "$prefix/usr/sbin/slurmctld" -V >/dev/null || {
  rm -rf "$prefix"
  fail "the Slurm of this Debian does not run here"
}
echo "$prefix"
