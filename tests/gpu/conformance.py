"""The conformance programs natively, under xMIG, and under xMIG with kills: they print the same lines, all of them.

The programs leave out what no native run can be queried, and say so there (`left_out`); lines that cannot be the same
stand in LEFT_OUT. Both are in the row."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from threading import Timer

from tests.conformance.shared import FOLDER, KILLS, OF_TWO_DEVICES, PROGRAMS, compile_kernels
from tests.gpu.bench import Bench, Failed, gpus
from xmigd.demo.node import Node, Program
from xmigd.errors import XmigError
from xmigd.measurements import Row

# In a rehearsal, of one device and of two; nothing is queried natively there.
REHEARSED = ("captures", "device_queries", "graphs", "libraries", "pools", "second_device")
PATIENCE = 45.0  # seconds, for each run of a program
PATIENCE_WITH_KILLS = 150.0  # most of the servers have to be started
FILLS = "out_of_memory"  # takes what the device has: nobody else's program begins meanwhile
SHOWN = 12  # differences, in the row; all of them are in the logs

# Lines that are not the same, by program: what they look like, and why.
LEFT_OUT = {
    "device_queries": (
        r"attribute (2[1-9]|4[2-9]|5[2-9]|6\d|7[0-4]|77|83|88|89|91|96|99|10[013457]|11[0234678]|119) ",
        "attributes that promise what xMIG has not are 0 (docs/limits.md)",
    )
}


@dataclass(frozen=True)
class Ran:
    """What became of a run: how it ended ("0" if well), what it printed, what it and the daemon reported beside
    that."""

    end: str
    out: list[str]
    reported: str
    recoveries: int = 0
    inexact: int = 0

    def lines(self, program: str) -> list[str]:
        """Those that are compared."""
        pattern, _ = LEFT_OUT.get(program, ("$^", ""))
        return [line for line in self.out if not line.startswith("left out: ") and not re.match(pattern, line)]

    def tail(self) -> str:
        """The end of what it reported: what went wrong stands there as a rule."""
        return " ".join(self.reported.split())[-160:]


@dataclass(frozen=True)
class Compared:
    """A program's runs: how they differ, each in a few words; what it has left out itself."""

    program: str
    different: list[str]
    left_out: list[str]
    recoveries: int
    inexact: int


@dataclass(frozen=True)
class Place:
    """Where programs run; ``native``: also without xMIG."""

    bench: Bench
    node: Node
    kind: str
    native: bool
    variables: dict[str, str] = field(default_factory=dict)

    def all_of(self, program: str) -> Compared:
        """It in all ways, one after the other: one of them may take all of the device's memory."""
        runs = {"natively": self.natively(program)} if self.native else {}
        runs["under xMIG"] = self.under(program, ())
        runs["with kills"] = self.under(program, KILLS)
        for way, ran in runs.items():
            log = self.bench.logs / f"conformance-{program}-{way.replace(' ', '-')}.txt"
            log.write_text("\n".join([f"ended: {ran.end}", *ran.out, "--", ran.reported, ""]))
        reported = dict.fromkeys(line.removeprefix("left out: ") for ran in runs.values() for line in ran.out
                             if line.startswith("left out: "))  # fmt: skip
        all_runs = runs.values()
        return Compared(
            program, differences(program, runs), list(reported), sum(ran.recoveries for ran in all_runs),
            sum(ran.inexact for ran in all_runs),
        )  # fmt: skip

    def natively(self, program: str) -> Ran:
        gpu = "0,1" if program in OF_TWO_DEVICES else str(self.bench.gpu)
        seen = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": gpu, "PYTHONFAULTHANDLER": "1"}
        command = [self.bench.python, str(FOLDER / "programs" / f"{program}.py")]
        process = subprocess.Popen(
            command, env=os.environ | seen | self.variables, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        return ended(process)

    def under(self, program: str, kills: Iterable[int]) -> Ran:
        device = f"{self.kind}:0,1" if program in OF_TWO_DEVICES else f"{self.kind}:{self.bench.gpu}"
        command: list[str | Path] = [self.bench.python, FOLDER / "start.py", FOLDER / "programs" / f"{program}.py"]
        running = self.node.program(
            command, name=program, device=device, environment=self.variables, stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            begin(running, kills)
        except (XmigError, TimeoutError, BrokenPipeError) as error:
            running.process.kill()
            return replace(ended(running.process), end=f"no start: {error}")
        return with_recoveries(ended(running.process, PATIENCE_WITH_KILLS if kills else PATIENCE), running)


def begin(running: Program, kills: Iterable[int]) -> None:
    """Let it begin once its server is there, and is to be killed at these records."""
    process = running.process
    assert process.stdout is not None
    assert process.stdin is not None
    watch = Timer(PATIENCE, process.kill)
    watch.start()
    reported = process.stdout.readline()
    watch.cancel()
    if reported != "ready\n":
        raise Failed(f"it reported {reported!r} for a handshake")
    running.until("running")
    for sequence in kills:
        running.inject("kill", sequence=sequence)
    process.stdin.write("go\n")
    process.stdin.flush()


def ended(process: subprocess.Popen[str], patience: float = PATIENCE) -> Ran:
    """Its end, or the end of our patience. What it has printed until then is kept."""
    end = ""
    try:
        out, reported = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        process.kill()
        out, reported = process.communicate()
        end = f"took more than {patience:.0f} s"
    return Ran(end or str(process.returncode), out.splitlines(), reported)


def with_recoveries(ran: Ran, program: Program) -> Ran:
    with contextlib.suppress(XmigError, TimeoutError):
        program.until("ended")
    recoveries = program.recoveries()
    return replace(
        ran, recoveries=len(recoveries), inexact=sum(r["exact"] is False for r in recoveries),
        reported=ran.reported + "\n".join(program.lines()[-5:]),
    )  # fmt: skip


def differences(program: str, runs: dict[str, Ran]) -> list[str]:
    """Each way against the first one, and the first one against what the program itself expects. A native run that has
    not come to its end is compared as far as it goes, and the others with each other."""
    found = []
    for way, ran in runs.items():
        if ran.end != "0":
            last = ran.out[-1][:60] if ran.out else ""
            found.append(f"{way}: ended with {ran.end} after {len(ran.out)} lines, {last!r}: {ran.tail()}")
    (first, expected), *others = runs.items()
    found += [f"{first}: {line}" for line in expected.out if line.startswith("not as expected")]
    if expected.end != "0" and len(others) > 1:
        (next_way, whole), *others = others
        found += unequal(program, (first, expected), (next_way, whole), len(expected.lines(program)))
        first, expected = next_way, whole
    for way, ran in others:
        found += unequal(program, (first, expected), (way, ran))
    return found


def unequal(program: str, one: tuple[str, Ran], other: tuple[str, Ran], most: int | None = None) -> list[str]:
    """How many lines of two runs are not the same, and which is the first; ``most``: lines that are looked at."""
    pairs = list(zip_longest(one[1].lines(program), other[1].lines(program)))[:most]
    numbers = [number for number, pair in enumerate(pairs) if pair[0] != pair[1]]
    if not numbers:
        return []
    line, there = (repr(str(text)[:90]) for text in pairs[numbers[0]])
    which = f"{len(numbers)} of {len(pairs)} lines, the first is {numbers[0] + 1}"
    return [f"{other[0]}: {which}: {line} {one[0]}, here {there}"]


def measure(bench: Bench) -> Iterator[Row]:
    """On two GPUs if there are two. In a rehearsal on cpu devices, some of them, and not natively."""
    kind = "cpu" if bench.rehearsal else "cuda"
    two = bench.rehearsal or gpus() > 1
    programs = [name for name in PROGRAMS if two or name not in OF_TWO_DEVICES]
    programs = [name for name in programs if name in REHEARSED] if bench.rehearsal else programs
    # The longest first: those that say most.
    programs.sort(key=lambda name: (FOLDER / "programs" / f"{name}.py").stat().st_size, reverse=True)
    settings: dict[str, object] = {"devices": f"{kind}:0,{kind}:1" if two else f"{kind}:{bench.gpu}"}
    if bench.rehearsal:
        settings["device_memory"] = 1 << 30
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="xmig-kernels-") as folder, bench.node(**settings) as node:
        variables = needed(bench, Path(folder))
        place = Place(bench, node, kind, not bench.rehearsal, variables)
        with ThreadPoolExecutor(max(2, (os.cpu_count() or 1) // 2)) as pool:
            others = [name for name in programs if name != FILLS]
            done = [c for c in pool.map(lambda name: in_time(place, name), others) if c is not None]
        done += [c for name in programs if name == FILLS and (c := in_time(place, name)) is not None]
    yield from rows(done, programs, time.monotonic() - began)


def in_time(place: Place, program: str) -> Compared | None:
    return place.all_of(program) if time.monotonic() < place.bench.end else None


def needed(bench: Bench, folder: Path) -> dict[str, str]:
    """The programs' environment: their kernels, the libcudart of the Python that runs them. Raises Failed."""
    cubin = [] if bench.rehearsal else [str(folder / "kernels.cubin")]
    command = [bench.python, str(FOLDER / "compiled.py"), *cubin]
    made = subprocess.run(command, env=bench.natively(), capture_output=True, text=True, check=False, timeout=PATIENCE)
    if made.returncode != 0:
        raise Failed(f"compiled.py: {(made.stderr or made.stdout).strip()[-300:]}")
    kernels = str(compile_kernels(folder)) if bench.rehearsal else cubin[0]
    return {
        "CUDART": made.stdout.strip(), "KERNELS": kernels, "PYTHONPATH": str(FOLDER / "programs"),
        "PYTHONDONTWRITEBYTECODE": "1", "XMIG_TEST_COMPARED": "1",
    }  # fmt: skip


def rows(done: list[Compared], programs: list[str], seconds: float) -> Iterator[Row]:
    different = {one.program: one.different for one in done if one.different}
    ways = f"{len(done)} programs; records {KILLS[0]} to {KILLS[-1]}: {sum(one.recoveries for one in done)} recoveries"
    reported = [f"{ways}, {sum(one.inexact for one in done)} not exact"]
    reported += [f"{name}: {found[0]}" + (f" (and {len(found) - 1} more)" if found[1:] else "")
             for name, found in list(different.items())[:SHOWN]]  # fmt: skip
    reported += [f"also: {', '.join(list(different)[SHOWN:])}"] if different.keys() - list(different)[:SHOWN] else []
    yield Row(
        name="conformance: differences", value=len(different), unit="in all", target=0, better="lower",
        conditions=tidy(reported),
    )  # fmt: skip
    apart = [f"{name}: {why}" for name, (_, why) in LEFT_OUT.items()]
    ordered = sorted(done, key=lambda one: one.program)
    apart += [f"{one.program}: {', '.join(one.left_out)}" for one in ordered if one.left_out]
    missing = sorted(set(PROGRAMS) - {one.program for one in done})
    reported = [f"in {seconds:.0f} s"]
    reported += [f"not run: {', '.join(missing)}"] if missing else []
    reported += [f"left out of them: {'; '.join(apart)}"] if apart else []
    yield Row(
        name="conformance: programs", value=len(done), unit="in all", target=len(programs), better="higher",
        conditions=tidy(reported),
    )  # fmt: skip


def tidy(reported: list[str]) -> str:
    """As one line of a table."""
    return " ".join("; ".join(reported).split()).replace("|", "/")
