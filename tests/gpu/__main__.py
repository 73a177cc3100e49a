"""`python -m tests.gpu`: xMIG on a real GPU, beside native runs; writes docs/measurements/gpu.json.

Without a GPU it says so and runs nothing. Exits non-zero only when something could not be measured or was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from threading import Lock

from rich.console import Console
from rich.table import Table

from tests.gpu.bench import Bench, Failed
from tests.gpu.cases import WARM
from tests.gpu.parts import Part, chosen
from xmigd.errors import XmigError
from xmigd.measurements import FOLDER, Measurements, Missing, Row, current_commit, describe_machine, show

TOGETHER = min(12, max(4, (os.cpu_count() or 1) // 2))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", metavar="NAMES", help="parts or groups of them, separated by commas")
    parser.add_argument(
        "--budget", "--seconds", dest="seconds", type=float, default=1200,
        help="seconds; a part that does not fit any more is left out, and named at the end",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help=f"folder of the results (default {FOLDER}, with --only build/gpu)")
    parser.add_argument("--work", type=Path, default=Path("build/gpu"), help="folder of logs and programs' output")
    parser.add_argument("--python", help="a Python with the frameworks (default: the first that has PyTorch)")
    parser.add_argument("--commit", help="the commit that is measured, where there is no git")
    parser.add_argument("--rehearse", action="store_true", help="everything, tiny, on the null device: no figures")
    parser.add_argument("--gpu", type=int, default=0, help="the GPU of what needs one (default 0)")
    parser.add_argument("--faults", type=int, default=100, help="of the part rank-faults (default 100)")
    parser.add_argument("--seed", type=int, default=1, help="which faults, of which rank, and when (default 1)")
    parser.add_argument("--others", type=Path, metavar="FOLDER", help="wheels of what xMIG is compared with: restarts")
    options = parser.parse_args()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 220)
    try:
        parts = chosen(options.only)
    except ValueError as error:
        parser.error(str(error))
    gpu = None if options.rehearse else find_gpu(options.gpu)
    if gpu is None and not options.rehearse:
        console.print(f"no GPU here: {len(parts)} parts skipped; docs/gpu.md says how to run them elsewhere")
        return 0
    python = options.python or find_python()
    if python is None:
        print("gpu: no Python with PyTorch here; name one with --python", file=sys.stderr)
        return 1
    whole = options.only in (None, "migration")
    out = options.out or (FOLDER if whole and gpu else options.work)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the daemon holds a descriptor for each piece of memory
    run = Run(console, out, gpu or "a rehearsal on the null device", options.commit or current_commit())
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory(prefix="xmig-gpu-") as scratch:
        bench = Bench(
            options.work, Path(scratch), python=python, rehearsal=options.rehearse, end=end, gpu=options.gpu,
            faults=options.faults, seed=options.seed, others=options.others,
        )  # fmt: skip
        if parts[0].alone:
            warm(bench)
        for alone, group in groupby(parts, key=lambda part: part.alone):
            together = list(group)
            with (
                bench.ahead([part.pair for part in together if part.pair]),
                ThreadPoolExecutor(1 if alone else TOGETHER) as pool,
            ):
                list(pool.map(lambda part: run.part(bench, part), together))
    run.table()
    return 1 if run.missing else 0


def warm(bench: Bench) -> None:
    """What is compared is not to be the machine's first start. What fails here fails in every part, and says so."""
    with contextlib.suppress(XmigError), bench.node() as node, ThreadPoolExecutor(1) as pool:
        pool.submit(bench.native, WARM)
        bench.under(node, WARM)


class Run:
    """The rows, as they come: a run that is cut off leaves what it has."""

    def __init__(self, console: Console, out: Path, gpu: str, commit: str) -> None:
        self.rows: list[Row] = []
        self.topics: dict[str, str] = {}  # of rows and of parts that are missing, by name
        self.missing: list[Missing] = []
        self.left_out: list[str] = []
        self._console = console
        self._out = out
        self._machine = f"{gpu}; {describe_machine()}"
        self._commit = commit
        self._lock = Lock()

    def part(self, bench: Bench, part: Part) -> None:
        """Do a part. What goes wrong in it is noted, and no other part's business."""
        began = time.monotonic()
        try:
            if bench.end - began < part.seconds and not bench.rehearsal:
                self.left_out.append(part.name)
                raise Failed(f"no time was left for it: it takes {part.seconds:.0f} s")
            for row in part.measure(bench):
                self._measured(row, part.topic)
        except (XmigError, TimeoutError, OSError, subprocess.SubprocessError, LookupError, ValueError) as error:
            why = " ".join(str(error).split()).replace("|", "/")[:400] or type(error).__name__
            with self._lock:
                self.missing.append(Missing(name=part.name, why=why))
                self.topics[part.name] = part.topic
                self._console.print(f"{part.name}: failed: {why}", markup=False, style="red")
        self._console.print(f"[dim]{part.name}: {time.monotonic() - began:.1f} of {part.seconds:.0f} s[/dim]")
        self._write()

    def _measured(self, row: Row, topic: str) -> None:
        target = "" if row.target is None else f"target {row.target:g}"
        with self._lock:
            self.rows.append(row)
            self.topics[row.name] = topic
            measured = f"{row.name:52} {row.value:>10.5g} {row.unit:12} {target:12} {row.conditions}"
            self._console.print(measured, markup=False)
        self._write()

    def _write(self) -> None:
        with self._lock:
            for topic in sorted({self.topics[row.name] for row in self.rows}):
                Measurements(
                    topic=topic, commit=self._commit, date=datetime.now(UTC).date(), machine=self._machine,
                    rows=[row for row in self.rows if self.topics[row.name] == topic],
                    missing=[part for part in self.missing if self.topics[part.name] == topic],
                ).write(self._out)  # fmt: skip

    def table(self) -> None:
        table = Table(title=f"{self._machine}, commit {self._commit}", title_justify="left", box=None, pad_edge=False)
        for name in ("", "measured", "target", "reached"):
            table.add_column(name, justify="left" if not name else "right", no_wrap=True)
        for row in self.rows:
            sign = "≤" if row.better == "lower" else "≥"
            reached = {None: "", True: "yes", False: "[red]no[/red]"}[row.reached]
            target = "" if row.target is None else f"{sign} {show(row.target)}"
            table.add_row(row.name, f"{show(row.value)} {row.unit}", target, reached)
        for missing in self.missing:
            table.add_row(missing.name, "[red]failed[/red]", "", "")
        self._console.print(table)
        if self.left_out:
            again = ",".join(self.left_out)
            self._console.print(f'did not fit: {again}; for these alone: make gpu ARGS="--only {again}"', markup=False)


def find_gpu(number: int) -> str | None:
    """Name and driver of that GPU, or None."""
    if shutil.which("nvidia-smi") is None:
        return None
    requested = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", f"--id={number}"]
    done = subprocess.run(requested, capture_output=True, text=True, check=False)
    name, _, driver = done.stdout.strip().partition(", ")
    return f"{name}, driver {driver}" if done.returncode == 0 and driver else None


def find_python() -> str | None:
    """The first Python that has PyTorch: the frameworks' environment, this one, the system's."""
    for candidate in (".venv-frameworks/bin/python", sys.executable, shutil.which("python3", path=os.defpath) or ""):
        code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
        if shutil.which(candidate) and subprocess.run([candidate, "-c", code], check=False).returncode == 0:
            return candidate
    return None


if __name__ == "__main__":
    sys.exit(main())
