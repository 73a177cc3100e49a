"""Ranks of one job on two nodes: one moves to the other GPU of its node while all run; all are suspended and resumed as
one, requested on either node. Both GPUs are devices of both nodes. Root only."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tests.gpu import collectives, kills
from tests.gpu.bench import Bench
from tests.gpu.nodes import APART, Ranks, two_nodes
from tests.gpu.rank_suspension import times_of
from xmigd.client import Client
from xmigd.errors import XmigError
from xmigd.measurements import Row

STEPS = 300
TIMEOUT = 60.0
REST = 0.3  # seconds suspended
# Again and again, until the training ends: what is done, and the node on which it is requested.
PLAN = (("move", 1), ("move", 0), ("suspension", 0), ("move", 0), ("move", 1), ("suspension", 1))
WHERE = "two ranks, GPT-2 with DDP; two daemons in network namespaces of one machine, both GPUs devices of both"


@dataclass(slots=True)
class Seen:
    moves: list[dict[str, Any]] = field(default_factory=list)
    suspensions: list[dict[str, Any]] = field(default_factory=list)
    resumptions: list[dict[str, Any]] = field(default_factory=list)
    held: list[int] = field(default_factory=list)  # bytes on devices meanwhile
    errors: list[str] = field(default_factory=list)


def measure(bench: Bench) -> Iterator[Row]:
    devices = ",".join(bench.two())
    steps = 1 if bench.rehearsal else STEPS
    words = ["--deterministic", "--warmup", "0", "--steps", str(steps)]
    words += [*collectives.TINY, "--backend", "gloo"] if bench.rehearsal else ["--batch", "2", "--layers", "4"]
    of_each = {"one": {"devices": devices}, "two": {"devices": devices}}
    seen = Seen()
    with two_nodes(bench, of_each=of_each) as nodes:
        natively = "undisturbed" if bench.rehearsal else "natively"
        native = Ranks(bench, nodes, words, natively).results()
        status = bench.scratch / "nodes-elsewhere.status"
        ran = Ranks(bench, nodes, [*words, "--status", str(status)], "elsewhere")
        thread = threading.Thread(target=in_turn, args=(ran, status, seen), daemon=True)
        thread.start()
        found = ran.results()
        thread.join(TIMEOUT)
        recoveries = ran.recoveries()
    wrong = collectives.different(native, found, "elsewhere")
    stood = sorted(one["result"]["downtime_ms"] for one in seen.moves)
    about = f"{WHERE}; {len(stood)} moves of a rank to the other GPU of its node, on either node in turn"
    for what, value in (("median", stood and median(stood)), ("worst", stood and stood[-1])):
        if value:
            yield Row(
                name=f"two nodes, a rank moves: standstill, {what}", value=round(value, 1), unit="ms", target=500,
                better="lower", conditions=about,
            )  # fmt: skip
    for name, operations in (("suspension", seen.suspensions), ("resumption", seen.resumptions)):
        if operations:
            yield times_of(
                f"two nodes, {name}: time", operations,
                f"{WHERE}; {len(operations)} of them, to host memory, requested on either node in turn; from the "
                "request to its end",
            )  # fmt: skip
    failed = len(wrong) + len(seen.errors) + (not bench.rehearsal and not (seen.moves and seen.resumptions))
    yield Row(
        name="two nodes, elsewhere: differences", value=failed, unit="in all", target=0, better="lower",
        conditions=f"{WHERE}; {steps} steps; {len(seen.moves)} moves, {len(seen.suspensions)} suspensions and "
        f"{len(seen.resumptions)} resumptions, {recoveries} recoveries; on devices meanwhile: "
        f"{max(seen.held, default=0) >> 20} MiB; different: {', '.join(wrong[:4]) or 'none'}; refused or failed: "
        f"{'; '.join(seen.errors[:3])[:500] or 'none'}",
    )  # fmt: skip


def in_turn(ran: Ranks, status: Path, seen: Seen) -> None:
    """One after the other, each when some steps are done."""
    files = [status.with_suffix(f".{rank}") for rank in range(len(ran.nodes))]
    reached = number = 0
    while ran.run() and kills.phase(files[0]) != "end":
        listed = ran.ready() if min(kills.step(file) for file in files) >= reached + APART else []
        if not listed:
            time.sleep(0.01)
            continue
        what, which = PLAN[number % len(PLAN)]
        number += 1
        try:
            moves(ran, which, listed[which], seen) if what == "move" else rests(ran, which, seen)
        except XmigError as error:
            if ran.run() and kills.phase(files[0]) != "end":  # otherwise there is nothing left to move
                seen.errors.append(f"{what} on node {which + 1}: {' '.join(str(error).split())}")
        reached = max(kills.step(file) for file in files)


def moves(ran: Ranks, which: int, row: dict[str, Any], seen: Seen) -> None:
    """To the other device. Raises XmigError."""
    client = ran.nodes[which].client
    other = next(each["id"] for each in client.get("/v1/devices") if each["configured"] and each["id"] != row["device"])
    seen.moves.append(over(client, client.post("/v1/migrations", {"process": row["id"], "target": other})))


def rests(ran: Ranks, which: int, seen: Seen) -> None:
    """All are suspended, and go on. Raises XmigError."""
    client, job = ran.nodes[which].client, f"/v1/jobs/{ran.programs[which].job}"
    seen.suspensions.append(over(client, client.post(f"{job}:suspend", {"to": "host"})))
    time.sleep(REST)
    with contextlib.suppress(XmigError):
        seen.held.append(sum(each["held_bytes"] for each in client.get("/v1/devices")))
    seen.resumptions.append(over(client, client.post(f"{job}:resume", {})))


def over(client: Client, operation: dict[str, Any]) -> dict[str, Any]:
    """Raises XmigError: it did not succeed."""
    end = time.monotonic() + TIMEOUT
    while operation["state"] not in ("succeeded", "failed", "cancelled") and time.monotonic() < end:
        operation = client.get(f"/v1/operations/{operation['id']}/wait", timeout=5)
    if operation["state"] != "succeeded":
        raise XmigError(f"{operation['state']}: {operation['error']}")
    return operation
