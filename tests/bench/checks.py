"""`python -m tests.bench.checks`: how long `make check` and `make test` take, into docs/measurements/checks.json.

From a clone of this commit with an empty home: nothing that an earlier run has compiled or downloaded is there, but for
the system's packages. Exits non-zero when one of them fails; then nothing is written.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench.native import Failed
from xmigd.measurements import FOLDER, Measurements, Row, current_commit

WORK = Path("build/checks")
# Of the environment: what says where packages come from, and how. No compiler's cache among it.
KEPT = re.compile("LANG|PATH|PIP_.*|PYTHON|SSL_CERT_FILE|TERM|https?_proxy|no_proxy", re.IGNORECASE)


def clone() -> Path:
    """This commit, as CI gets it."""
    if current_commit().endswith("+changes"):
        raise Failed("there are changes: what is measured is a commit")
    for folder in ("tree", "home"):
        shutil.rmtree(WORK / folder, ignore_errors=True)
    (WORK / "home").mkdir(parents=True)
    subprocess.run(["git", "clone", "--quiet", ".", WORK / "tree"], check=True)
    return WORK / "tree"


def make(tree: Path, target: str, row: str, limit: float) -> Row:
    """`limit`: seconds within which it has to be done."""
    log = WORK / f"{row.replace(', ', '-').replace(' ', '-')}.log"
    environment = {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)}
    environment |= {"HOME": str((WORK / "home").resolve()), "NO_COLOR": "1", "DEBIAN_FRONTEND": "noninteractive"}
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with log.open("wb") as reported:
        done = subprocess.run(
            ["make", target], cwd=tree, env=environment, stdout=reported, stderr=reported, check=False
        )
    took, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        raise Failed(f"make {target} failed: {log} has what it reported")
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    tests = log.read_text(errors="replace").strip().splitlines()[-1].strip(" =")
    conditions = f"{cores} cores, load {load:.1f} before, {used:.0f} s of processor time; {tests}"
    return Row(name=row, value=round(took, 1), unit="s", target=limit, better="lower", conditions=conditions)


def measure(only: str | None) -> Iterator[Row]:
    if only in (None, "check"):
        tree = clone()
        yield make(tree, "check", "check, clean clone", 900)
        yield make(tree, "check", "check, built tree", 480)
    if only in (None, "test"):
        yield make(clone(), "test", "test, clean clone", 2100)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.checks", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", choices=("check", "test"), help="one of the two; default: both")
    parser.add_argument("--out", type=Path, default=FOLDER, help=f"folder of the results (default {FOLDER})")
    options = parser.parse_args()
    rows = []
    try:
        for row in measure(options.only):
            print(f"{row.name:24} {row.value:>8.0f} s   target {row.target:g}   {row.conditions}", flush=True)
            rows.append(row)
    except Failed as error:
        print(f"checks: {error.message}", file=sys.stderr)
        return 1
    print(f"written to {Measurements.here('checks', rows).write(options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
