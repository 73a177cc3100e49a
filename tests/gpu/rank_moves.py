"""A rank of a training moves while the others run: onto another rank's GPU and back, or to a GPU of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

from tests.gpu.bench import Bench, Failed, gpus
from tests.gpu.collectives import RANKS, TINY, WARMUP, different, pieces, run
from tests.gpu.moves import TIMEOUT
from xmigd.demo.node import Program
from xmigd.measurements import Row

STEPS = 300
SETTLED = 1.5  # seconds between two moves


def measure(bench: Bench) -> Iterator[Row]:
    """Three devices: the last rank moves to the third and back. Two: onto the first, and back."""
    if bench.kind == "cuda" and gpus() < RANKS:
        raise Failed(f"it needs {RANKS} GPUs")
    spare = bench.kind == "cuda" and gpus() > RANKS
    devices = [f"{bench.kind}:{number}" for number in range(RANKS + spare)]
    warmup = 0 if bench.rehearsal else WARMUP
    words = ["--deterministic", "--own", "--steps", str(1 if bench.rehearsal else STEPS), "--warmup", str(warmup)]
    words += TINY if bench.rehearsal else []
    native = None if bench.rehearsal else run(bench, None, words, "ddp.py")
    target = devices[-1] if spare else devices[0]
    moves: list[dict[str, Any]] = []
    with bench.node(devices=",".join(devices)) as node:
        moved = run(bench, node, words, "ddp.py", partial(back_and_forth, devices[RANKS - 1], target, moves))
    done = [one for one in moves if one["state"] == "done"]
    where = f"{RANKS} ranks, GPT-2 with DDP; rank {RANKS - 1} moves " + (
        "to a GPU of its own, and back" if spare else "onto the GPU of rank 0, and back"
    )
    step = median(moved[0]["times_s"][warmup:])
    stalls = sorted(max(each) - step for each in pieces(moved[0]["times_s"][warmup:], step))
    wrong = [] if native is None else different(native, moved, "with moves")
    failed = sorted({str(one["error"]) for one in moves if one["state"] != "done"})
    about = f"{where}; {len(done)} of {len(moves)} moves; {', '.join(failed[:2]) or 'none failed'}"
    name = "rank moves: standstill" if spare else "packed onto one GPU: standstill"
    if done:
        times = sorted(one["downtime_ms"] for one in done)
        yield Row(name=f"{name}, median", value=median(times), unit="ms", target=500, better="lower", conditions=about)
        yield Row(name=f"{name}, worst", value=times[-1], unit="ms", target=500, better="lower", conditions=about)
    if stalls:
        yield Row(
            name=f"{name}, longest step", value=round(stalls[-1], 3), unit="s beyond the median step", target=1.0,
            better="lower", conditions=f"{about}; steps of {1e3 * step:.4g} ms",
        )  # fmt: skip
    yield Row(
        name="rank moves: differences", value=len(wrong) + (not bench.rehearsal and not done), unit="in all", target=0,
        better="lower", conditions=f"{about}; different: {', '.join(wrong[:4]) or 'none'}",
    )  # fmt: skip


def back_and_forth(home: str, away: str, moves: list[dict[str, Any]], program: Program) -> None:
    client = program.node.client
    time.sleep(2 * SETTLED)
    mover = ""
    while program.process.poll() is None:
        listed = client.get("/v1/processes", job=program.job)
        running = [one for one in listed if one["state"] == "running" and (one["snapshots"] or 0) > 2]
        mover = mover or next((one["id"] for one in running if one["device"] == home), "")
        moving = next((one for one in running if one["id"] == mover), None)
        if moving is None or len(running) < RANKS:
            time.sleep(0.05)
            continue
        target = away if moving["device"] == home else home
        operation = client.post("/v1/migrations", {"process": mover, "target": target})
        end = time.monotonic() + TIMEOUT
        while operation["state"] not in ("succeeded", "failed", "cancelled") and time.monotonic() < end:
            operation = client.get(f"/v1/operations/{operation['id']}/wait", timeout=5)
        moves.append(client.get("/v1/migrations", limit=1)[0])
        time.sleep(SETTLED)
