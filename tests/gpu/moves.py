"""Moves between two GPUs, suspension and resumption, beside the driver's own checkpoint."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from functools import cache
from statistics import median
from typing import Any

from tests.gpu.bench import Bench, Failed, Outcome, Running, wait_until
from tests.gpu.cases import DRIVEN, INFERRED, MOVED, SMALL_MOVED, SMALLEST_MOVED, TRAINED, Case
from xmigd.client import Client
from xmigd.measurements import Row

OVER = ("succeeded", "failed", "cancelled")
ROUND_TRIPS = 20
QUIET = 0.5  # seconds before and after moves: steps with which those of a move are compared
AFTERWARDS = 1.5  # seconds after a move in which what it still costs is seen
TIMEOUT = 120
POOL_MIB = 40960
SWITCHES = 5
NVLINK, HASH = 394, 4500  # GB/s: measured between two of these GPUs, and what hashing is to reach


class Moving:
    """A running program that is moved back and forth, and what the daemon says of each move."""

    def __init__(self, running: Running, devices: tuple[str, ...] = (), client: Client | None = None) -> None:
        """`devices`: two, for moves. `client`: of the daemon that moves a program which runs natively."""
        self.program = running.program
        if client is None:
            assert running.program is not None
            client = running.program.node.client
        self.client = client
        self.devices = devices
        self.spans: list[tuple[float, float]] = []  # CLOCK_MONOTONIC, as the program's own steps

    def info(self) -> dict[str, Any]:
        found = None if self.program is None else self.program.info()
        if found is None:
            raise Failed("the daemon does not know the program")
        return found

    def move(self) -> dict[str, Any]:
        """To the other device; the migration's record."""
        info = self.info()
        target = self.devices[info["device"] == self.devices[0]]
        return self._ended("/v1/migrations", {"process": info["id"], "target": target})

    def move_native(self, process: str, target: str) -> dict[str, Any]:
        """The same of a program that was not started under xMIG, `pid:1234`."""
        return self._ended("/v1/migrations", {"process": process, "target": target, "engine": "driver"})

    def suspend(self) -> dict[str, Any]:
        return self._ended(f"/v1/processes/{self.info()['id']}:suspend", {"to": "host"})

    def resume(self) -> dict[str, Any]:
        return self._ended(f"/v1/processes/{self.info()['id']}:resume", {})

    def _ended(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        began = time.monotonic()
        operation = self.client.post(path, body)
        while operation["state"] not in OVER:
            if time.monotonic() - began > TIMEOUT:
                raise Failed(f"{path} is not over after {TIMEOUT} s: {operation['phase']}")
            operation = self.client.get(f"/v1/operations/{operation['id']}/wait", timeout=10)
        self.spans.append((began, time.monotonic()))
        if operation["state"] != "succeeded":
            error = operation["error"] or {}
            raise Failed(f"{path}: {error.get('code')}: {error.get('detail')}")
        found = [m for m in self.client.get("/v1/migrations", limit=100) if m["operation_id"] == operation["id"]]
        if not found:
            raise Failed(f"{path}: no record of it")
        return dict(found[0])


def forty(bench: Bench) -> Iterator[Row]:
    """A 40 GB job: downtime, the parts of a move, what it costs the running program."""
    yield Row(
        name="move-16MB: downtime", value=round(switch(bench), 1), unit="ms", better="lower",
        conditions=f"{SMALLEST_MOVED.reported}; median of {SWITCHES}: what it takes to go on in another context",
    )  # fmt: skip
    moves, outcome = moved(bench, MOVED, 4, pause=AFTERWARDS)
    yield from downtime(bench, "move-40GB", moves, outcome, MOVED, 500)
    yield floor(bench, "move-40GB", moves, outcome)
    yield Row(
        name="move-40GB: whole move", value=round(median(seconds(m) for m, _ in moves), 3), unit="s", better="lower",
        conditions=f"median of {len(moves)}, from the request to its end; set-up "
        f"{max(m['setup_ms'] or 0 for m, _ in moves):.0f} ms at most; "
        f"rounds {', '.join(str(len(m['iterations'])) for m, _ in moves)}",
    )  # fmt: skip
    copied = sum(i["copied_bytes"] for m, _ in moves for i in m["iterations"])
    took = sum(i["ms"] for m, _ in moves for i in m["iterations"])
    if took:
        yield Row(
            name="move-40GB: copied and hashed", value=round(copied / took / 1e6, 1), unit="GB/s", better="higher",
            conditions="all rounds together, from the source's shadow",
        )  # fmt: skip
    yield slow_down(moves, outcome)
    yield longest_step(moves, outcome)


def back_and_forth(bench: Bench) -> Iterator[Row]:
    """A job of 4 GB that is moved twenty times."""
    moves, outcome = moved(bench, SMALL_MOVED, 2 if bench.rehearsal else ROUND_TRIPS)
    yield from downtime(bench, "move-4GB", moves, outcome, SMALL_MOVED, None)


def training(bench: Bench) -> Iterator[Row]:
    moves, outcome = yield from framework(bench, TRAINED, 2 if bench.rehearsal else ROUND_TRIPS, 500)
    yield floor(bench, TRAINED.name, moves, outcome)


def inference(bench: Bench) -> Iterator[Row]:
    yield from framework(bench, INFERRED, 2, 100)


@cache
def switch(bench: Bench) -> float:
    """Milliseconds of a move of next to no memory."""
    moves, _ = moved(bench, SMALLEST_MOVED, SWITCHES)
    return float(median(record["downtime_ms"] or 0 for record, _ in moves))


def suspension(bench: Bench) -> Iterator[Row]:
    """40 GB to host memory and back: to memory that was kept ready, and to what there was."""
    yield from suspended(bench, "", target=1.2)
    yield from suspended(bench, ", no pool", target=None, pool=False)


def suspended(bench: Bench, how: str, *, target: float | None, pool: bool = True) -> Iterator[Row]:
    mib = (64 if bench.rehearsal else POOL_MIB) if pool else 0
    with bench.node(host_pool_mib=mib) as node, bench.started(MOVED, node) as running:
        running.holding()
        began = time.monotonic()
        while pool_bytes(node.client) < mib << 20:
            if time.monotonic() - began > TIMEOUT:
                raise Failed(f"the pool is not full after {TIMEOUT} s: {pool_bytes(node.client) >> 20} MiB")
            time.sleep(0.1)
        filled = time.monotonic() - began
        moving = Moving(running)
        used = bench.device_used()
        away = moving.suspend()
        left = bench.device_used()
        back = moving.resume()
        outcome = running.finish()
    kept = f", {mib} MiB of host memory kept ready, made in {filled:.0f} s" if pool else ""
    for name, record in (("suspend", away), ("resume", back)):
        phases = ", ".join(f"{p['name']} {p['ms'] or 0:.0f}" for p in record["phases"])
        stands = "" if record is back else f"the program stands from {away['downtime_ms'] or 0:.0f} ms before its end; "
        yield Row(
            name=f"{name}-40GB{how}", value=round(seconds(record), 3), unit="s", target=target, better="lower",
            conditions=f"{MOVED.reported}{kept}; from the request to the end; {stands}{phases} ms; device memory "
            f"in use {used / 1e9:.1f} GB before, {left / 1e9:.1f} while suspended",
        )  # fmt: skip
    yield corrupted(f"suspend-40GB{how}", outcome)


def pool_bytes(client: Client) -> int:
    lines = client.get_text("/metrics").splitlines()
    return next(int(float(line.split()[1])) for line in lines if line.startswith("xmigd_host_pool_bytes "))


def driver(bench: Bench, name: str) -> Iterator[Row]:
    """The driver's own checkpoint of the same program, which runs natively: the peer that a move is compared with."""
    if bench.rehearsal:
        raise Failed("the driver's own checkpoint needs its driver")
    devices = bench.two()
    case, times, compared = DRIVEN[name]
    with bench.node(devices=bench.two_devices()) as node, bench.started(case, None) as running:
        running.holding()
        moving = Moving(running, devices, node.client)
        process = f"pid:{running.process.pid}"
        records = [moving.move_native(process, devices[1 - number % 2]) for number in range(times)]
        outcome = running.finish()
    moves = list(zip(records, moving.spans, strict=True))
    yield from downtime(bench, name, moves, outcome if case.program == "moved" else None, case, None)
    if compared in bench.downtimes:
        yield against_driver(bench, name, compared)


def against_driver(bench: Bench, name: str, compared: str) -> Row:
    """The longest standstill of a move against that of the driver's own checkpoint, both of this run."""
    ours, its = bench.downtimes[compared], bench.downtimes[name]
    return Row(
        name=f"{compared}: downtime against {name}", value=round(ours / its, 5), unit="×",
        target=1 / 40, better="lower",
        conditions=f"{ours:.1f} ms and {its:.0f} ms, the longest of each in this run",
    )  # fmt: skip


def moved(bench: Bench, case: Case, times: int, *, pause: float = 0.0) -> tuple[list[Any], Outcome]:
    """Each move's record and when it was; the program's outcome. `pause`: seconds after each, and what it takes until
    the target has taken a snapshot."""
    with bench.node(devices=bench.two_devices()) as node, bench.started(case, node) as running:
        running.holding()
        moving = Moving(running, bench.two())
        time.sleep(QUIET)
        records = []
        for _ in range(times):
            records.append(moving.move())
            if pause:
                time.sleep(pause)
                wait_until(lambda: last_snapshot(moving) > records[-1]["ended_at"], "a snapshot on the target")
        time.sleep(QUIET)
        outcome = running.finish()
    return list(zip(records, moving.spans, strict=True)), outcome


def last_snapshot(moving: Moving) -> float:
    """When it was, in Unix seconds; 0: there is none."""
    snapshots = moving.client.get(f"/v1/processes/{moving.info()['id']}/segments", limit=1)
    return float(snapshots[0]["at"]) if snapshots else 0.0


def framework(
    bench: Bench, case: Case, times: int, target: float
) -> Generator[Row, None, tuple[list[Any], Outcome]]:  # fmt: skip
    """Moves of a PyTorch program while it runs; its results are those of an undisturbed run."""
    undisturbed = bench.native(case)
    with bench.node(devices=bench.two_devices()) as node, bench.started(case, node) as running:
        assert running.program is not None
        running.program.until("running")
        moving = Moving(running, bench.two())
        records = [moving.move() for _ in range(times)]
        outcome = running.finish()
    moves = list(zip(records, moving.spans, strict=True))
    yield from downtime(bench, case.name, moves, None, case, target)
    compared = ("losses", "tokens", "sha256")
    different = [name for name in compared if undisturbed.result.get(name) != outcome.result.get(name)]
    yield Row(
        name=f"{case.name}: differences", value=len(different), unit="in all", target=0, better="lower",
        conditions=f"after {times} moves, from a native run without one: losses or tokens, and the SHA-256 of weights "
        f"or caches{'; different: ' if different else ''}{', '.join(different)}",
    )  # fmt: skip
    return moves, outcome


def downtime(
    bench: Bench, name: str, moves: list[Any], outcome: Outcome | None, case: Case, target: float | None
) -> Iterator[Row]:  # fmt: skip
    times = [record["downtime_ms"] or 0 for record, _ in moves]
    bench.downtimes[name] = max(times)
    longest = max((record for record, _ in moves), key=lambda record: record["downtime_ms"] or 0)
    phases = ", ".join(f"{p['name']} {p['ms'] or 0:.0f}" for p in longest["phases"])
    yield Row(
        name=f"{name}: downtime", value=round(max(times), 1), unit="ms", target=target, better="lower",
        conditions=f"{case.reported}; the longest of {len(times)}, median {median(times):.1f}; its phases: {phases} ms",
    )  # fmt: skip
    if outcome is not None:
        yield corrupted(name, outcome)


def floor(bench: Bench, name: str, moves: list[Any], outcome: Outcome) -> Row:
    """The downtime against what it cannot be shorter than."""
    times = [record["downtime_ms"] or 0 for record, _ in moves]
    snapshots = [snapshot for snapshot in outcome.snapshots if snapshot["reason"] == "handover"]
    if not snapshots:
        raise Failed("nothing was executed before a move, or no snapshot is known")
    dirty, live = (median(snapshot[which] for snapshot in snapshots) for which in ("copied_bytes", "live_bytes"))
    copied, hashed = dirty / NVLINK / 1e6, live / HASH / 1e6
    least = copied + hashed + switch(bench)
    return Row(
        name=f"{name}: downtime against its floor", value=round(median(times) / least, 2), unit="×",
        target=1.5, better="lower",
        conditions=f"median of {len(times)}, the longest {max(times) / least:.2f}; "
        f"{least:.1f} ms: {copied:.1f} for the {dirty / 1e6:.0f} MB that the last snapshot found changed at "
        f"{NVLINK} GB/s, {hashed:.1f} to hash {live / 1e9:.1f} GB at {HASH} GB/s, "
        f"{switch(bench):.1f} for the switch, as of the job with 16 MB",
    )  # fmt: skip


def corrupted(name: str, outcome: Outcome) -> Row:
    return Row(
        name=f"{name}: differences", value=outcome.result["corrupted"], unit="in all", target=0, better="lower",
        conditions="pieces of memory that are not as they were, or as they were last written",
    )  # fmt: skip


def slow_down(moves: list[Any], outcome: Outcome) -> Row:
    """A step that was over while a move copied, against one of quiet times. The downtime itself is not in it."""
    steps = list(zip(outcome.result["ends"], outcome.result["lengths"], strict=True))
    spans = [span for _, span in moves]
    during = [length for end, length in steps if any(a <= end - length and end <= b for a, b in spans)]
    quiet = [length for end, length in steps if all(end < a or end - length > b for a, b in spans)]
    if not during or not quiet:
        raise Failed("no step was over while a move copied")
    return Row(
        name="move-40GB: step while copying", value=round(median(during) / median(quiet), 3), unit="× a quiet one",
        target=1.1, better="lower", conditions=f"median of {len(during)} steps, {len(quiet)} quiet ones",
    )  # fmt: skip


def longest_step(moves: list[Any], outcome: Outcome) -> Row:
    """What the program itself sees: the downtime, and the first snapshot on the target, which comes later."""
    steps = list(zip(outcome.result["ends"], outcome.result["lengths"], strict=True))
    # A step that begins in it may end later; there is none where the program itself stood all the while.
    longest = [
        max((length for end, length in steps if a <= end and end - length <= b + AFTERWARDS), default=0.0)
        for _, (a, b) in moves
    ]
    usual = median(outcome.result["lengths"])
    later = [[snapshot for snapshot in outcome.snapshots if snapshot["at"] > record["ended_at"]] for record, _ in moves]
    if not all(later):
        raise Failed("a target has taken no snapshot")
    first = [min(snapshots, key=lambda snapshot: float(snapshot["at"])) for snapshots in later]
    copied = max(snapshot["copied_bytes"] for snapshot in first)
    return Row(
        name="move-40GB: longest step", value=round(1e3 * max(longest), 1), unit="ms", target=500, better="lower",
        conditions=f"in any move and {AFTERWARDS:g} s after it; of each move "
        f"{', '.join(f'{1e3 * each:.0f}' for each in longest)} ms; the first snapshot there takes "
        f"{', '.join(str(round(snapshot['ms'])) for snapshot in first)} ms and copies {copied / 1e6:.0f} MB at most; "
        f"the median step takes {1e3 * usual:.2f} ms",
    )  # fmt: skip


def seconds(record: dict[str, Any]) -> float:
    return float((record["ended_at"] or record["started_at"]) - record["started_at"])
