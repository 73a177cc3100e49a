#!/usr/bin/env bash
# Make .cache/boot/tree: a Debian 12 with systemd and dnf, which tests/packages boot in a container. Does nothing when it is
# there already. Fails with one sentence where it cannot be made, and leaves it in .cache/boot/why.
set -euo pipefail
cd "$(dirname "$0")/../.."
boot=.cache/boot
wanted="$(sha256sum <"$0")"
mkdir -p "$boot"
[ "$(cat "$boot/stamp" 2>/dev/null)" != "$wanted" ] || { rm -f "$boot/why"; exit 0; }

fail() {
  rm -rf --one-file-system "$boot/new"
  echo "$1" | tee "$boot/why" >&2
  exit 1
}

[ "$(id -u)" -eq 0 ] || fail "containers are made and booted by root only"
for command in debootstrap systemd-nspawn; do
  command -v "$command" >/dev/null || fail "there is no $command here; packaging/setup/system.sh packages installs it on Debian"
done
rm -rf --one-file-system "$boot/new" "$boot/tree"
echo "making $boot/tree"
# The mirror that the machine's own sources name.
mirror=$(apt-get indextargets --format '$(SITE)' 2>/dev/null | grep -E '/debian/?$' | head -n 1 || true)
# libpam-systemd and dbus-user-session: users have managers of their own, as on any distribution that people log in to.
packages=systemd,systemd-sysv,dbus,libpam-systemd,dbus-user-session,python3,python3-venv,dnf,rpm,procps
debootstrap --variant=minbase --include="$packages" bookworm "$boot/new" ${mirror:+"$mirror"} >"$boot/log" 2>&1 ||
  fail "debootstrap failed: $(grep -E '^[EW]:' "$boot/log" | tail -n 1)"
rm -rf "$boot"/new/var/cache/apt/* "$boot"/new/var/lib/apt/lists/* "$boot"/new/usr/share/{doc,locale,man}
mv "$boot/new" "$boot/tree"
rm -f "$boot/why"
echo "$wanted" >"$boot/stamp"
