#!/usr/bin/env bash
# rpm.sh FOLDER [RELEASE WHEEL]: build the packages of xmig.spec from dist/ (make dist) in FOLDER, the source package among
# them; as another RELEASE out of the WHEEL that an earlier build of the same source has left in FOLDER/wheel. They come
# out the same for the same commit, wherever FOLDER is.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=epoch.sh
. packaging/setup/epoch.sh
mkdir -p "$1"/{SOURCES,tmp}
top="$(realpath "$1")"
rm -rf "$top"/{BUILD,BUILDROOT,RPMS,SRPMS,wheel}
mkdir "$top/wheel"
cp dist/xmig-*.tar.gz dist/{bundled.txt,BUNDLED.md,xmig.cdx.json} "$top/SOURCES"
# rpm knows nothing of what Debian has installed; packaging/setup/system.sh has seen to it, and .venv has the rest.
nodeps=()
[ ! -e /etc/debian_version ] || nodeps=(--nodeps)
export PATH="$PWD/.venv/bin:$PATH" LC_ALL=C.UTF-8 TZ=UTC TMPDIR="$top/tmp"
build() {
  local what="$1"
  shift
  rpmbuild "$what" "${nodeps[@]}" --define "_buildhost xmig" --define "_dbpath $top/db" "$@" "$spec" >>"$top/log" 2>&1 || {
    tail -n 60 "$top/log" >&2
    exit 1
  }
}
spec="$PWD/xmig.spec"
release=(${2:+--define "xmig_release $2"})
: >"$top/log"
build -bb --define "_topdir $top" --define "xmig_keep_wheel $top/wheel" "${release[@]}" ${3:+--define "xmig_wheel $3"}
# rpm writes the spec, with every path in it, into the source package: there they are relative. And its files are nobody's.
cd "$top"
build -bs --define "_topdir ." --define "_srcdefattr (0644,root,root)" "${release[@]}"
find "$top"/{RPMS,SRPMS} -name '*.rpm'
