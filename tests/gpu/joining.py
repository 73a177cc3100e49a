"""Where the time goes in which two ranks make their communicator: each guess beside the instrument that decides it.

NCCL writes down what each phase of a communicator took ("Init timings"), natively as well as in a server."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tests.gpu import collectives
from tests.gpu.bench import Bench, Failed
from tests.gpu.cases import PROGRAMS
from tests.gpu.collectives import RANKS
from xmigd.demo.node import Node, Program
from xmigd.measurements import Row

PATIENCE = 180.0  # seconds for one run: on a busy machine PyTorch alone takes a minute to be imported
DEBUG = {
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT,BOOTSTRAP,GRAPH,TUNING,ENV",
    "NCCL_DEBUG_TIMESTAMP_LEVELS": "ALL",
    "NCCL_DEBUG_TIMESTAMP_FORMAT": "[%F %T.%6f] ",
}
# What shim/device/cuda/nccl.cc sets beside NCCL_NVLS_ENABLE.
OF_SERVERS = {"NCCL_RUNTIME_CONNECT": "0", "NCCL_CUMEM_HOST_ENABLE": "0", "NCCL_P2P_DIRECT_DISABLE": "1"}
TIMINGS = re.compile(r"Init timings - \S+ rank \d+ nranks (?P<ranks>\d+) total (?P<total>[\d.]+) \((?P<of>[^)]*)\)")
JOINED = re.compile(r"a communicator of \d+ ranks: ([^\"'\n]*)")


@dataclass
class Variant:
    """One way to run the program. `times`: of the slowest rank, seconds, each run's. `phases`: NCCL's, of the first
    and of the second communicator of a process, likewise."""

    runs: list[list[dict[str, Any]]] = field(default_factory=list)
    phases: tuple[list[dict[str, float]], list[dict[str, float]]] = field(default_factory=lambda: ([], []))
    joined: list[str] = field(default_factory=list)  # as servers report it
    processors: set[int] = field(default_factory=set)  # that servers may use

    def ms(self, key: str) -> float:
        """Median of the runs, of the slowest rank in each."""
        return 1e3 * median(collectives.most(ranks, key) for ranks in self.runs)

    def phase(self, name: str, which: int = 0) -> float | None:
        """Median of the ranks and runs, ms; None: NCCL has not reported it."""
        values = [1e3 * found[name] for found in self.phases[which] if name in found]
        return median(values) if values else None


def measure(bench: Bench) -> Iterator[Row]:
    """Natively and under xMIG in turns. A rehearsal has no driver that could answer natively, nor NCCL's log."""
    shared = ["--shared"] if collectives.shares(bench) else []
    native: dict[str, Variant] = {}
    xmig: dict[str, Variant] = {}

    def natively(name: str, more: Mapping[str, str] | None = None, *words: str) -> None:
        if not bench.rehearsal:
            run(bench, None, native.setdefault(name, Variant()), f"native-{name}", [*shared, *words], more or {})

    def under(node: Node, name: str, more: Mapping[str, str] | None = None, *words: str) -> None:
        run(bench, node, xmig.setdefault(name, Variant()), f"xmig-{name}", [*shared, *words], more or {})

    with bench.node(devices=collectives.devices(bench)) as node:
        natively("plain")
        under(node, "plain")
        natively("settings", OF_SERVERS)
        if not bench.rehearsal:
            under(node, "later", {"NCCL_RUNTIME_CONNECT": "1"})
        if not shared:
            natively("own", None, "--own")
            under(node, "own", None, "--own")
            natively("everywhere", None, "--everywhere")
        natively("plain")
        under(node, "plain")
    with bench.node(devices=collectives.devices(bench), standby="false") as node:
        under(node, "no standbys")
        if not bench.rehearsal:
            under(node, "no standbys")
    yield from rows(collectives.place(bench), native, xmig)


def rows(where: str, native: dict[str, Variant], xmig: dict[str, Variant]) -> Iterator[Row]:
    """One for each guess: how many milliseconds it explains."""

    def row(name: str, value: float, how: str) -> Row:
        return Row(
            name=f"init: {name}", value=round(value, 1), unit="ms", better="lower",
            conditions=" ".join(f"{where}; {how}".split()),
        )  # fmt: skip

    def both(one: Variant, other: Variant) -> str:
        return f"{one.ms('first_s'):.0f} and {other.ms('first_s'):.0f} ms"

    ours, alone = xmig["plain"], xmig["no standbys"]
    theirs = native.get("plain")
    joined = "; ".join(ours.joined[:RANKS]) or "not reported, or less than 100 ms"
    beside = "" if theirs is None else f", natively {theirs.ms('first_s'):.0f}"
    yield row(
        "beyond native", ours.ms("first_s") - (theirs.ms("first_s") if theirs else 0),
        f"from the moment when all ranks are there, with contexts, until the first sum is done: "
        f"{ours.ms('first_s'):.0f} ms{beside}; servers report: {joined}",
    )  # fmt: skip
    yield row(
        "standbys that start meanwhile", ours.ms("first_s") - alone.ms("first_s"),
        f"with and without standbys: {both(ours, alone)}",
    )  # fmt: skip
    if theirs is not None:
        yield row(
            "first in its process, beyond native",
            alone.ms("first_s") - alone.ms("second_s") - theirs.ms("first_s") + theirs.ms("second_s"),
            f"library, kernels and what else is there for the second communicator of a process; second one without "
            f"standbys: {alone.ms('second_s'):.0f} ms, natively {theirs.ms('second_s'):.0f}",
        )  # fmt: skip
        yield from phases(row, theirs, alone)
    if settings := native.get("settings"):
        assert theirs is not None
        yield row(
            "settings of servers", settings.ms("first_s") - theirs.ms("first_s"),
            f"natively with and without {', '.join(f'{key}={value}' for key, value in OF_SERVERS.items())}: "
            f"{both(settings, theirs)}",
        )  # fmt: skip
    if later := xmig.get("later"):
        yield row(
            "connections with the communicator", ours.ms("first_s") - later.ms("first_s"),
            f"under xMIG with NCCL_RUNTIME_CONNECT=0 and 1: {both(ours, later)}",
        )  # fmt: skip
    if own := xmig.get("own"):
        less = native.get("own")
        same = "" if less is None or theirs is None else f", natively {both(theirs, less)}"
        natively = 0.0 if less is None or theirs is None else theirs.ms("first_s") - less.ms("first_s")
        yield row(
            "more GPUs visible than used", ours.ms("first_s") - own.ms("first_s") - natively,
            f"all GPUs visible, and each rank's own only: {both(ours, own)}{same}",
        )  # fmt: skip
    if everywhere := native.get("everywhere"):
        assert theirs is not None
        yield row(
            "contexts on GPUs that are not used", everywhere.ms("first_s") - theirs.ms("first_s"),
            f"natively with contexts on all GPUs, and on each rank's own: {both(everywhere, theirs)}",
        )  # fmt: skip
    programs = {rank["processors"] for ranks in ours.runs for rank in ranks}
    yield Row(
        name="init: processors that servers lack", value=max(programs) - min(ours.processors or programs),
        unit="processors", better="lower",
        conditions=f"{where}; programs may use {numbers(programs)}, servers {numbers(ours.processors)}",
    )  # fmt: skip


def phases(row: Callable[[str, float, str], Row], theirs: Variant, ours: Variant) -> Iterator[Row]:
    """NCCL's own account, without standbys: what it has no name for is called `rest`."""
    for which, called in enumerate(("first", "second")):
        names = [name for found in theirs.phases[which][:1] for name in found]
        for name in names:
            beside, here = theirs.phase(name, which), ours.phase(name, which)
            if beside is not None and here is not None:
                yield row(
                    f"NCCL, {called}, {name}", here - beside,
                    f"by NCCL's account, which has steps of 10 ms, without standbys: {here:.0f} ms, natively "
                    f"{beside:.0f}",
                )  # fmt: skip


def numbers(found: set[int]) -> str:
    return ", ".join(map(str, sorted(found))) or "an unknown number"


def run(
    bench: Bench, node: Node | None, into: Variant, name: str, words: list[str], more: Mapping[str, str]
) -> None:  # fmt: skip
    """The program once. Raises Failed."""
    label = f"init-{name.replace(' ', '-')}-{len(into.runs)}"
    logs = bench.logs / label
    logs.mkdir(parents=True, exist_ok=True)
    for old in logs.iterdir():
        old.unlink()
    environment = DEBUG | {"NCCL_DEBUG_FILE": str(logs.absolute() / "%p.nccl")} | dict(more)
    command = [bench.python, str(PROGRAMS / "init_ranks.py"), "--ranks", str(RANKS), *words]
    out = logs / "program.out"
    before = 0 if node is None else node.log.stat().st_size
    with out.open("w") as to:
        options: dict[str, Any] = {"stdout": to, "stderr": subprocess.STDOUT, "start_new_session": True}
        program: Program | None = None
        if node is None:
            process: subprocess.Popen[Any] = subprocess.Popen(
                command, env=bench.natively(RANKS) | environment, **options
            )
        else:
            device = collectives.device_of_job(bench)
            environment = {**bench.environment, **environment}
            program = node.program(command, name="init", device=device, environment=environment, **options)
            process = program.process
        end = min(bench.end, time.monotonic() + PATIENCE)
        while process.poll() is None and time.monotonic() < end:
            if program is not None and not into.processors:
                into.processors |= processors_of_servers(program)
            time.sleep(0.02)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise Failed(f"it takes longer than {PATIENCE:.0f} s; see {out}")
    lines = [json.loads(line) for line in out.read_text().splitlines() if line.startswith("{") and '"rank"' in line]
    if process.returncode != 0 or len(lines) != RANKS:
        raise Failed(f"ranks ended with {process.returncode}, {len(lines)} of {RANKS} have results; see {out}")
    into.runs.append(sorted(lines, key=lambda line: int(line["rank"])))
    for log in sorted(logs.glob("*.nccl")):
        for which, found in enumerate(timings(log.read_text(errors="replace"))[:2]):
            into.phases[which].append(found)
    if node is not None:
        with node.log.open(errors="replace") as daemon:
            daemon.seek(before)
            into.joined += JOINED.findall(daemon.read())


def timings(log: str) -> list[dict[str, float]]:
    """NCCL's account of each communicator of a process, in seconds, by phase; communicators of one rank apart."""
    found = []
    for match in TIMINGS.finditer(log):
        if int(match["ranks"]) > 1:
            parts = (part.split() for part in match["of"].split(","))
            found.append({"total": float(match["total"])} | {words[0]: float(words[1]) for words in parts})
    return found


def processors_of_servers(program: Program) -> set[int]:
    """How many each server of the program may use."""
    found = set()
    for one in program.node.client.get("/v1/processes", job=program.job):
        status = Path(f"/proc/{one['server_pid']}/status")
        try:
            text = status.read_text()
        except OSError:
            continue  # it has none, or it is gone
        if listed := re.search(r"^Cpus_allowed_list:\s*(\S+)$", text, re.MULTILINE):
            pieces = [piece.split("-") for piece in listed[1].split(",")]
            found.add(sum(int(piece[-1]) - int(piece[0]) + 1 for piece in pieces))
    return found
