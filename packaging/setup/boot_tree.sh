#!/usr/bin/env bash
# Make .cache/boot/tree: a Debian 12 with systemd and dnf, which tests/packages boot in a container. Does nothing when it is
# there already. Fails with one sentence where it cannot be made or booted, and leaves it in .cache/boot/why.
set -euo pipefail
cd "$(dirname "$0")/../.."
boot=.cache/boot
wanted="$(sha256sum <"$0")"
mkdir -p "$boot"

fail() {
  rm -rf --one-file-system "$boot/new"
  echo "$1" | tee "$boot/why" >&2
  exit 1
}

# The packages bundle wheels of the Python that they are built with, and the tree has Debian 12's.
version=$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[ "$version" = 3.11 ] || fail "the packages are of Python $version, and the machine to install them on has 3.11 (make PYTHON=python3.11)"

[ "$(id -u)" -eq 0 ] || fail "containers are made and booted by root only"
for command in debootstrap systemd-nspawn; do
  command -v "$command" >/dev/null || fail "there is no $command here; packaging/setup/system.sh boot installs it on Debian"
done

# What tests/packages/container.py does, but for the boot: not everywhere is root allowed to.
finish() {
  local try reported starts=false
  try=$(mktemp --directory)
  mkdir "$try"/{root,upper,work}
  if reported=$(mount -t overlay overlay -o "lowerdir=$PWD/$boot/tree,upperdir=$try/upper,workdir=$try/work" "$try/root" 2>&1); then
    reported=$(systemd-nspawn --quiet --register=no --keep-unit --private-network --pipe "--directory=$try/root" \
      /bin/true 2>&1 </dev/null) && starts=true
    umount --recursive --lazy "$try/root"
  fi
  rm -rf --one-file-system "$try"
  "$starts" || fail "no container starts here: $(tail -n 1 <<<"$reported")"
  rm -f "$boot/why"
}

if [ "$(cat "$boot/stamp" 2>/dev/null)" = "$wanted" ]; then
  finish
  exit 0
fi
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
echo "$wanted" >"$boot/stamp"
finish
