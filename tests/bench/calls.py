"""What calls cost: queued and synchronous records, copies, and doing nothing."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from tests.bench.native import Failed, Programs
from xmigd.demo.node import Node, Program
from xmigd.measurements import Row

REST = 10.0


def measure(programs: Programs, runs: int) -> Iterator[Row]:
    """Rows for calls, medians of `runs` runs of the program."""
    with programs.node("null:0") as node:

        def typical(which: str, key: str) -> float:
            return float(median(programs.run(node, "calls", which)[key] for _ in range(runs)))

        bursts = [programs.run(node, "calls", "queued") for _ in range(runs)]
        for key, name, target, pages in (
            ("ns", "queued record, client side", 150, "touched before"),
            ("first", "queued record, first lap of the journal", None, "touched for the first time"),
        ):
            yield Row(
                name=name, value=round(median(b[key] for b in bursts), 1), unit="ns", target=target, better="lower",
                conditions=f"cuLaunchKernel with 8 parameters, null device, bursts of 20,000; pages {pages}",
            )  # fmt: skip
        yield Row(
            name="sustained records", value=round(typical("sustained", "per_second")), unit="1/s", target=4e6,
            better="higher", conditions="4 million kernel launches with 8 parameters, executed by the null device",
        )  # fmt: skip
        yield Row(
            name="synchronous round trip, both awake", value=round(typical("awake", "us"), 2), unit="µs", target=5,
            better="lower", conditions="cuStreamSynchronize of an idle stream, null device",
        )  # fmt: skip
        yield Row(
            name="synchronous round trip, from idle", value=round(typical("idle", "us"), 2), unit="µs", target=30,
            better="lower", conditions="the same after 20 ms of rest",
        )  # fmt: skip
    with programs.node("cpu:0") as node:
        speeds = [programs.run(node, "calls", "copies") for _ in range(runs)]
        for key, name in (("to_device", "large copy to the device"), ("to_host", "large copy to the host")):
            share = median(s[key] / s["memcpy"] for s in speeds)
            rate = median(s[key] for s in speeds) / 1e9
            yield Row(
                name=name, value=round(share, 3), unit="of memcpy", better="higher",
                conditions=f"64 MiB of pageable memory, cpu device; {rate:.1f} GB/s",
            )  # fmt: skip
        yield from idle(programs, node)


def idle(programs: Programs, node: Node) -> Iterator[Row]:
    program = node.program([programs.built("calls"), programs.kernels, "rest"], stdin=subprocess.PIPE)
    assert program.process.stdout is not None
    if program.process.stdout.readline() != "resting\n":
        raise Failed("the resting program does not rest")
    yield from resting(program)
    program.process.communicate("")


def resting(program: Program) -> Iterator[Row]:
    """Processor time of a program and of its server while both have nothing to do."""
    server = program.until("running")["server_pid"]
    time.sleep(1)
    yield rested("idle server", server, target=0.1)
    yield rested("idle client", program.process.pid, target=0.1)


def rested(name: str, pid: int, *, target: float | None = None) -> Row:
    """What a process that rests takes of a core, from now on for ten seconds."""
    before, began = processor_seconds(pid), time.monotonic()
    time.sleep(REST)
    passed = time.monotonic() - began
    spent = {thread: seconds - before.get(thread, 0) for thread, seconds in processor_seconds(pid).items()}
    busy = sorted(((seconds, name) for (_, name), seconds in spent.items() if seconds > 0), reverse=True)[:3]
    threads = ", ".join(f"{name} {1e6 * seconds / passed:.0f} µs a second" for seconds, name in busy)
    return Row(
        name=name, value=round(100 * sum(spent.values()) / passed, 4), unit="% of a core", target=target,
        better="lower",
        conditions=f"processor time of all threads over {REST:.0f} s" + (f"; {threads}" if threads else ""),
    )  # fmt: skip


def processor_seconds(pid: int) -> dict[tuple[str, str], float]:
    """Processor time of each thread, by its number and name, in nanosecond steps (`schedstat`)."""
    return {
        (task.name, (task / "comm").read_text().strip()): int((task / "schedstat").read_text().split()[0]) / 1e9
        for task in Path(f"/proc/{pid}/task").iterdir()
    }
