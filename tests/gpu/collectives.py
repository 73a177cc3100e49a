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
        f"different: {named or 'none'}",
    )  # fmt: skip
    for name, key, unit, factor in (
        ("ddp: step", "step_s", "ms", 1e3), (f"all-reduce {large >> 20} MiB", "large_s", "ms", 1e3),
        ("all-reduce 8 B", "small_s", "us", 1e6), ("communicators: init", "init_s", "ms", 1e3),
    ):  # fmt: skip
        value = max(rank[key] for rank in xmig) * factor
        beside = "" if native is None else f"; natively {max(rank[key] for rank in native) * factor:.4g} {unit}"
        yield Row(name=name, value=round(value, 3), unit=unit, better="lower", conditions=f"{where}{beside}")


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
