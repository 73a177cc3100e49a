#!/usr/bin/env bash
# Print the path of a Chromium for the dashboard's tests: the system's, installed where this may be done. Fails with one
# sentence where it cannot be had.
set -euo pipefail
cd "$(dirname "$0")/../.."
mkdir -p .cache
exec 9>.cache/system.lock
flock 9  # another one may be installing it, or something else (system.sh)
for candidate in chromium chromium-browser google-chrome-stable; do
  if command -v "$candidate"; then exit 0; fi
done

fail() {
  echo "browser.sh: $1" >&2
  exit 1
}

as_root=()
if [ "$(id -u)" -ne 0 ]; then
  as_root=(sudo -n)
  sudo -n true 2>/dev/null || fail "there is no chromium here; as root: apt-get install chromium, or dnf install chromium"
fi
export DEBIAN_FRONTEND=noninteractive
if command -v apt-get >/dev/null; then
  "${as_root[@]}" apt-get update -qq >&2
  "${as_root[@]}" apt-get install -y --no-install-recommends chromium fonts-dejavu-core >/dev/null || fail "chromium cannot be installed"
elif command -v dnf >/dev/null; then
  "${as_root[@]}" dnf install -y chromium dejavu-sans-fonts >/dev/null || fail "chromium cannot be installed"
fi
command -v chromium || command -v chromium-browser || fail "there is no chromium here; install it"
