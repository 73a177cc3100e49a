"""Programs of several ranks with NCCL: the same results as natively, and how long operations take. Two GPUs, or two
ranks on one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

from tests.gpu.bench import Bench, Failed, gpus
from tests.gpu.cases import PROGRAMS
from xmigd.demo.node import Node
from xmigd.measurements import Row

RANKS = 2
PATIENCE = 240.0
TARGETS = (
    ("ddp: step", "step_s", 1.0),
    ("large all-reduce", "large_s", 1.02),  # 0.98 of the bandwidth
    ("communicators: init", "init_s", 1.1),
)


def measure(bench: Bench) -> Iterator[Row]:
    """Natively, then under xMIG."""
    shared = bench.kind == "cuda" and gpus() < RANKS
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


def differing(native: list[dict[str, Any]], xmig: list[dict[str, Any]]) -> list[str]:
    """Names of results that are not the same on some rank."""
    found: list[str] = []
    for ours, theirs in zip(xmig, native, strict=True):
        found += [name for name, digest in theirs["digests"].items() if ours["digests"].get(name) != digest]
        found += [f"loss {i}" for i, loss in enumerate(theirs["losses"]) if ours["losses"][i] != loss]
    return found


def run(bench: Bench, node: Node | None, words: list[str]) -> list[dict[str, Any]]:
    """What each rank says. Raises Failed."""
    command = [
        bench.python, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--standalone",
        str(PROGRAMS / "ranks.py"), *words,
    ]  # fmt: skip
    out = bench.logs / f"ranks-{'natively' if node is None else 'xmig'}.out"
    end = min(bench.end, time.monotonic() + PATIENCE)
    with out.open("w") as to:
        if node is None:
            process: subprocess.Popen[Any] = subprocess.Popen(
                command, env=bench.natively(RANKS), stdout=to, stderr=subprocess.STDOUT, start_new_session=True
            )
        else:
            options: dict[str, Any] = {"stdout": to, "stderr": subprocess.STDOUT, "start_new_session": True}
            program = node.program(command, name="ranks", environment=bench.environment, **options)
            process = program.process
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
