#!/usr/bin/env bash
# gpu_kit.sh PYTHON-VERSION: what `make gpu` needs on a machine with a GPU that has no network, no compiler and a Python
# with the frameworks, in build/gpu-kit: the built package, the programs, wheels for that Python, and run.sh.
set -euo pipefail
cd "$(dirname "$0")/../.."
version="$1"
kit=build/gpu-kit
packaging/setup/native.sh native runtime  # or what was built from another commit would be measured
rm -rf "$kit"
mkdir -p "$kit/tests"
git rev-parse --short=12 HEAD >"$kit/commit"
[ -z "$(git status --porcelain -uno)" ] || sed -i 's/$/+changes/' "$kit/commit"

cp -r xmigd migrations "$kit"
cp -r tests/bench tests/conformance tests/differential tests/gpu tests/ports.py "$kit/tests"
: >"$kit/tests/__init__.py"  # or another package of this name, installed there, comes first
(cd "$kit" && PYTHONDONTWRITEBYTECODE=1 "$OLDPWD/.venv/bin/python" -m tests.gpu --help >/dev/null)  # all that it imports is here
find "$kit" -name __pycache__ -prune -exec rm -rf {} +
strip --strip-debug "$kit"/xmigd/native/{libcuda.so.1,libnvidia-ml.so.1,libnccl.so.2,xmig-server,xmig-descriptor-store,xmig-nvml-probe,xmig-pod}
include="$(.venv/bin/python -c 'from tests.bench.native import cuda_include; print(cuda_include())')"
"${CC:-cc}" -O2 -I"$include" tests/gpu/programs/launches.c -o "$kit/tests/gpu/programs/launches" -ldl

# carry NAME PROGRAM LIBRARIES [LOADER-OPTION...]: a program with its own libraries, in a folder of its name.
carry() {
  local name="$1" program="$2" from="$3"
  local folder="$kit/$name"
  shift 3
  mkdir -p "$folder/lib"
  cp -L "$program" "$folder/program"
  "$from"/ld-linux-*.so.* "$@" --list "$folder/program" | awk '$3 ~ /^[.\/]/ {print $3}' | xargs -I {} cp -L {} "$folder/lib"
  cp -L "$from"/ld-linux-*.so.* "$folder/lib"
  cat >"$folder/$name" <<'PROGRAM'
#!/bin/sh
here="$(dirname "$(realpath "$0")")"
exec "$here"/lib/ld-linux-*.so.* --library-path "$here/lib" "$here/program" "$@"
PROGRAM
  chmod 755 "$folder/$name"
}

# CRIU for checkpoints, where the system has none: that machine needs its own. `ip` makes networks of nodes.
packaging/setup/criu.sh >/dev/null || true
if [ -x .cache/criu/criu ]; then
  from=".cache/criu/usr/lib/$(gcc -dumpmachine)"
  carry criu .cache/criu/usr/sbin/criu "$from" --library-path "$from"
fi
carry ip "$(command -v ip)" "/lib/$(gcc -dumpmachine)"

# What the daemon needs, by the names in pyproject.toml; CUDA's bindings are the demo's.
.venv/bin/python - >"$kit/requirements.txt" <<'PYTHON'
import tomllib
print("\n".join(n for n in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"] if not n.startswith("cuda-")))
PYTHON
.venv/bin/python -m pip --disable-pip-version-check --quiet download --only-binary=:all: --python-version "$version" \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
  --constraint packaging/locks/python.txt --requirement "$kit/requirements.txt" --dest "$kit/wheels"

cat >"$kit/run.sh" <<'RUN'
#!/usr/bin/env bash
# run.sh [OPTION...]: `make gpu` from this folder alone; results go to $OUT (default: results), what programs and daemons
# reported into its logs.tar.gz. PYTHON has the frameworks; WHEELS: a folder of wheels other than the one here.
set -euo pipefail
out="$(realpath -m "${OUT:-results}")"
cd "$(dirname "$0")"
python="${PYTHON:-python3}"
packages="$(mktemp -d)"
logs="$(mktemp -d)"
trap 'tar -czf "$out/logs.tar.gz" -C "$logs" .; rm -rf "$packages" "$logs"' EXIT
mkdir -p "$out"
"$python" -m pip --disable-pip-version-check --quiet install --no-index --find-links "${WHEELS:-wheels}" --target "$packages" \
  --requirement requirements.txt 2>"$out/pip.log" || { cat "$out/pip.log" >&2; exit 1; }
PATH="$PATH:$PWD/ip" PYTHONPATH="$PWD:$packages" "$python" -m tests.gpu --out "$out" --work "$logs" --commit "$(cat commit)" \
  --python "$(command -v "$python")" "$@"
RUN
chmod +x "$kit/run.sh"
du -sh "$kit"
