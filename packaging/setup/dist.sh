#!/usr/bin/env bash
# What xmig.spec builds from, into dist/: the source tarball; the wheels of what the distribution lacks and of what builds
# the native part, in one tarball; and the lists of them. The same for the same commit, whenever and wherever it is made.
set -euo pipefail
cd "$(dirname "$0")/../.."
python="$PWD/.venv/bin/python"
# shellcheck source=epoch.sh
. packaging/setup/epoch.sh
version="$("$python" -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["version"])')"
pip=("$python" -m pip --disable-pip-version-check --quiet)

# The wheels change with the lock only. They are of this Python, and so are the packages.
wanted="$("$python" -V) $(cat pyproject.toml packaging/locks/python.txt "$0" | sha256sum)"
vendor=.cache/vendor
if [ "$(cat "$vendor/stamp" 2>/dev/null)" != "$wanted" ]; then
  rm -rf "$vendor"
  mkdir -p "$vendor"/wheels/{run,build}
  "$python" - >"$vendor/requirements.txt" <<'PYTHON'
import tomllib
print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]))
PYTHON
  "${pip[@]}" download --only-binary=:all: --constraint packaging/locks/python.txt --dest "$vendor/wheels/run" \
    --requirement "$vendor/requirements.txt"
  "${pip[@]}" download --only-binary=:all: --constraint packaging/locks/python.txt --dest "$vendor/wheels/build" \
    scikit-build-core nvidia-cuda-runtime nvidia-nvml-dev
  echo "$wanted" >"$vendor/stamp"
fi

rm -rf dist
mkdir dist
# Not isolated: .venv has the build backend, in the version of the lock.
"$python" -m build --sdist --no-isolation --skip-dependency-check --outdir dist . >/dev/null
tar --sort=name --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --mtime="@$SOURCE_DATE_EPOCH" \
  --directory "$vendor" --create wheels | gzip -n >"dist/xmig-$version-wheels.tar.gz"
"$python" packaging/bundle.py "$vendor/wheels/run" dist
(cd dist && sha256sum -- *)
