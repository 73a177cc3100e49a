#!/usr/bin/env bash
# Everything that tests/packages test, in build/packages: the packages twice (`first`, `second`: they must be the same), once
# more as their next release (`next`), the wheel, and the wheels that a machine without network installs from.
set -euo pipefail
cd "$(dirname "$0")/../.."
setup=packaging/setup
out=build/packages
python="$PWD/.venv/bin/python"
# shellcheck source=epoch.sh
. "$setup/epoch.sh"
# Two builds prove nothing if one of them takes its objects from the other's.
export CCACHE_DISABLE=1
"$setup/system.sh" packages
trap 'kill $(jobs -p) 2>/dev/null || :' EXIT  # what still runs beside what has failed
{ "$setup/system.sh" boot || :; "$setup/boot_tree.sh"; } &
tree=$!
"$setup/dist.sh" >/dev/null
rm -rf "$out"/{next,wheel,wheels}

# In different folders, by users with different habits; at the same time, because half of the work is one processor's.
(umask 022 && "$setup/rpm.sh" "$out/first" >/dev/null) &
first=$!
(umask 077 && "$setup/rpm.sh" "$out/second" >/dev/null)
wait "$first"
built=("$PWD/$out"/first/wheel/xmig-*.whl)
"$setup/rpm.sh" "$out/next" 2 "${built[0]}" >/dev/null

# The libraries that not every system has go into the wheel, and its name says the oldest glibc that it runs on.
PATH="$PWD/.venv/bin:$PATH" "$python" -m auditwheel repair --wheel-dir "$out/wheel" "${built[0]}" >"$out/auditwheel.log" 2>&1 || {
  cat "$out/auditwheel.log" >&2
  exit 1
}

# What the demo trains with, beside what the packages bundle.
demo=.cache/vendor/demo
if [ ! -d "$demo" ]; then
  "$python" -m pip --disable-pip-version-check --quiet download --only-binary=:all: --dest "$demo.new" \
    --constraint packaging/locks/python.txt cuda-bindings numpy scikit-learn
  mv "$demo.new" "$demo"
fi
mkdir -p "$out/wheels"
cp -- .cache/vendor/wheels/run/*.whl "$demo"/*.whl "$out/wheels"
du --summarize --human-readable "$out"/*/RPMS "$out/wheel"
wait "$tree" || echo "the packages are not installed and run"
