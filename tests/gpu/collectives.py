"""Programs of several ranks with NCCL: the same results as natively, and how long operations take. Two GPUs, or two
ranks on one."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from tests.gpu import kills
from tests.gpu.bench import Bench, Failed, gpus
from tests.gpu.cases import PROGRAMS
from xmigd.demo.node import Node, Program
from xmigd.measurements import Row

RANKS = 2
PATIENCE = 240.0
WARMUP = 10  # steps
STALL = 0.1  # seconds beyond the median that count as one
TARGETS = (
    ("ddp: step", "step_s", 1.0),
    ("large all-reduce", "large_s", 1.02),  # 0.98 of the bandwidth
    ("communicators: init", "init_s", 1.1),
)


def measure(bench: Bench) -> Iterator[Row]:
    """Natively, then under xMIG."""
    shared = shares(bench)
    where = "two ranks on one GPU, without P2P and shared memory" if shared else "one GPU for each rank"
    large = 1 << 20 if bench.rehearsal else 1 << (26 if shared else 30)
    # A null device returns nothing: DDP's second step would read from it in which order gradients came.
    steps = 1 if bench.rehearsal else 10
    words = ["--steps", str(steps), "--large", str(large), *(["--shared"] if shared else [])]
    devices = ",".join(f"{bench.kind}:{number}" for number in range(1 if shared else RANKS))
    # A rehearsal has no driver that could answer natively.
    native = None if bench.rehearsal else run(bench, None, words)
    with bench.node(devices=devices) as node:
        xmig = run(bench, node, words)
    compared = [] if native is None else differing(native, xmig)
    wrong = [] if bench.rehearsal else [name for rank in xmig for name in rank["wrong"]]
    named = ", ".join([*compared, *wrong][:4])
    yield Row(
        name="collectives: differences", value=len(set(compared) | set(wrong)), unit="in all", target=0, better="lower",
        conditions=f"{where}; PyTorch, {len(xmig[0]['digests'])} results and {steps} steps with DDP; "
        f"{large >> 20} MiB in the large all-reduce; different: {named or 'none'}",
    )  # fmt: skip
    for name, key, target in TARGETS:
        value = max(rank[key] for rank in xmig)
        if native is None:
            yield Row(name=name, value=round(1e3 * value, 3), unit="ms", better="lower", conditions=where)
            continue
        beside = max(rank[key] for rank in native)
        yield Row(
            name=name, value=round(value / beside, 3), unit="× native", target=target, better="lower",
            conditions=f"{where}; {1e3 * value:.4g} ms, natively {1e3 * beside:.4g}",
        )  # fmt: skip
    small = max(rank["small_s"] for rank in xmig) - (0 if native is None else max(rank["small_s"] for rank in native))
    yield Row(
        name="all-reduce 8 B, beyond native", value=round(1e6 * small, 2), unit="µs",
        target=None if native is None else 3, better="lower", conditions=f"{where}; 500 in a row",
    )  # fmt: skip


def recovery(bench: Bench) -> Iterator[Row]:
    """A data-parallel training whose servers are killed, beside an undisturbed one and a native one."""
    shared = shares(bench)
    where = "two ranks on one GPU, without P2P and shared memory" if shared else "one GPU for each rank"
    small = ["--batch", "2", "--layers", "4"] if shared else []
    tiny = ["--layers", "1", "--width", "64", "--heads", "1", "--words", "512", "--context", "64", "--batch", "1"]
    count = 1 if bench.rehearsal else 60 if shared else 240
    warmup = 0 if bench.rehearsal else WARMUP
    words = ["--deterministic", "--steps", str(count), "--warmup", str(warmup), *small]
    words += [*(["--shared"] if shared else []), *(tiny if bench.rehearsal else [])]
    devices = ",".join(f"{bench.kind}:{number}" for number in range(1 if shared else RANKS))
    native = None if bench.rehearsal else run(bench, None, words, "ddp.py")
    with bench.node(devices=devices) as node:
        plain = run(bench, node, words, "ddp.py")
        status = bench.scratch / "ddp.status"
        killed: list[float] = []
        disturbed = run(
            bench, node, [*words, "--status", str(status)], "ddp.py", partial(kill_servers, bench, status, killed)
        )
        recovered = [one for one in node.client.get("/v1/recoveries") if one["outcome"] == "resumed"]
    step = median(plain[0]["times_s"][warmup:])
    if native is not None:
        beside = median(native[0]["times_s"][warmup:])
        yield Row(
            name="ddp: step, GPT-2", value=round(step / beside, 3), unit="× native", target=1.0, better="lower",
            conditions=f"{where}; {1e3 * step:.4g} ms, natively {1e3 * beside:.4g}; deterministic, snapshots taken",
        )  # fmt: skip
    stalls = sorted(time for time in (max(each) for each in pieces(disturbed[0]["times_s"][warmup:], step)))
    if stalls:
        about = f"{where}; {len(killed)} servers killed, of one rank after the other; {len(recovered)} recoveries"
        for name, value, target in (("median", median(stalls), 1.5), ("worst", stalls[-1], 3.0)):
            yield Row(
                name=f"job recovery without standby communicators: stall, {name}", value=round(value - step, 3),
                unit="s", target=target, better="lower", conditions=about,
            )  # fmt: skip
    reference = plain if native is None else native
    wrong = [
        f"{name} of rank {one['rank']}"
        for runs, called in ((plain, "undisturbed"), (disturbed, "with kills"))
        for one, other in zip(runs, reference, strict=True)
        for key, name in (("losses", f"losses {called}"), ("sha256", f"weights {called}"))
        if one[key] != other[key]
    ]
    yield Row(
        name="job recovery: differences", value=0 if bench.rehearsal else len(wrong), unit="in all", target=0,
        better="lower", conditions=f"{where}; {len(killed)} kills in {count} steps of GPT-2 with DDP; "
        f"different: {', '.join(wrong[:4]) or 'none'}",
    )  # fmt: skip


def pieces(times: list[float], step: float) -> list[list[float]]:
    """Steps that took much longer than the others, those that follow each other together."""
    found: list[list[float]] = []
    before = -9
    for number, time_s in enumerate(times):
        if time_s > step + STALL:
            if number - before > 3:
                found.append([])
            found[-1].append(time_s)
            before = number
    return found


def kill_servers(bench: Bench, status: Path, killed: list[float], program: Program) -> None:
    """One after the other, of one rank after the other, each when all standbys are warm."""
    files = [status.with_suffix(f".{rank}") for rank in range(RANKS)]
    chance = random.Random(1)
    steps = 0
    while program.process.poll() is None:
        if min(kills.step(file) for file in files) < steps + WARMUP or kills.phase(files[0]) == "end":
            time.sleep(0.005)
            continue
        listed = [one for one in program.node.client.get("/v1/processes", job=program.job) if one["state"] == "running"]
        if len(listed) < RANKS or any(one["standby"] != "warm" for one in listed[:RANKS]):
            time.sleep(0.005)
            continue
        time.sleep(chance.uniform(0, 0.04))
        with contextlib.suppress(ProcessLookupError):
            os.kill(listed[len(killed) % len(listed)]["server_pid"], signal.SIGKILL)
            killed.append(time.monotonic())
        steps = max(kills.step(file) for file in files)


def shares(bench: Bench) -> bool:
    """Are the ranks on one GPU?"""
    return bench.kind == "cuda" and gpus() < RANKS


def differing(native: list[dict[str, Any]], xmig: list[dict[str, Any]]) -> list[str]:
    """Names of results that are not the same on some rank."""
    found: list[str] = []
    for ours, theirs in zip(xmig, native, strict=True):
        found += [name for name, digest in theirs["digests"].items() if ours["digests"].get(name) != digest]
        found += [f"loss {i}" for i, loss in enumerate(theirs["losses"]) if ours["losses"][i] != loss]
    return found


def run(
    bench: Bench,
    node: Node | None,
    words: list[str],
    name: str = "ranks.py",
    disturb: Callable[[Program], None] | None = None,
) -> list[dict[str, Any]]:
    """What each rank says. Raises Failed."""
    command = [
        bench.python, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--standalone",
        str(PROGRAMS / name), *words,
    ]  # fmt: skip
    how = "natively" if node is None else "xmig" if disturb is None else "killed"
    out = bench.logs / f"{Path(name).stem}-{how}.out"
    end = min(bench.end, time.monotonic() + PATIENCE)
    with out.open("w") as to:
        if node is None:
            process: subprocess.Popen[Any] = subprocess.Popen(
                command, env=bench.natively(RANKS), stdout=to, stderr=subprocess.STDOUT, start_new_session=True
            )
        else:
            options: dict[str, Any] = {"stdout": to, "stderr": subprocess.STDOUT, "start_new_session": True}
            device = None if shares(bench) else f"{bench.kind}:{','.join(map(str, range(RANKS)))}"
            program = node.program(command, name="ranks", device=device, environment=bench.environment, **options)
            process = program.process
            if disturb is not None:
                threading.Thread(target=disturb, args=(program,), daemon=True).start()
        try:
            code = process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise Failed(f"ranks take longer than {PATIENCE:.0f} s; see {out}") from None
    lines = [json.loads(line) for line in out.read_text().splitlines() if line.startswith('{"rank"')]
    if code != 0 or len(lines) != RANKS:
        raise Failed(f"ranks ended with {code}, and {len(lines)} of {RANKS} have results; see {out}")
    return sorted(lines, key=lambda line: int(line["rank"]))
