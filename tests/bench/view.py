"""A daemon that shows and plans over 1,000 nodes with 8,000 GPUs: real links to stand-ins for the nodes
(tests/fleet/standins.py), over TLS, all of them in one process of this machine."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.bench.native import Failed
from tests.fleet.nodes import FleetNode
from tests.fleet.standins import GPUS, StandIns, reading
from xmigd.measurements import Row
from xmigd.native import find_native_dir

NODES = 1000
PAGE, LISTED = 25, 200  # nodes on a page of the dashboard, and with one request of xmigctl
RENEWED = 5.0  # seconds after which the dashboard's page renews itself
WATCHED = 12  # pages
IDLE = 30.0  # seconds
BAD = 100  # nodes that hang, and as many that are gone
VIEW_S, SHARE = 2.0, 5.0  # targets
TICKS = os.sysconf("SC_CLK_TCK")


def measure(folder: Path) -> Iterator[Row]:
    """Raises Failed."""
    place = folder / "view"
    place.mkdir()
    native_dir = find_native_dir(None)
    with reading(place, native_dir, 1) as (reader, _):
        alone = _memory(reader)
        used = _processor(reader)
        time.sleep(IDLE)
        idle_alone = (_processor(reader) - used) / IDLE
    place = folder / "view of many"
    place.mkdir()
    began = time.monotonic()
    with reading(place, native_dir, NODES) as (reader, standins):
        about = f"{NODES} nodes, {NODES * GPUS} GPUs, {NODES * 7} jobs, stand-ins in one process of the same machine"
        yield _row("view: start until all are connected", time.monotonic() - began, "s",
                   f"{about}; with the making of their keys")  # fmt: skip
        time.sleep(RENEWED)  # what was begun is over
        used = _processor(reader)
        time.sleep(IDLE)
        idle = (_processor(reader) - used) / IDLE
        yield _row("view: processor of the reader, nobody looks", 100 * idle, "%",
                   f"{about}; share of one processor in {IDLE:.0f} s; with one peer {100 * idle_alone:.1f} %",
                   SHARE)  # fmt: skip
        yield _row("view: memory for each peer", (_memory(reader) - alone) / (NODES - 1), "KiB",
                   f"{about}; {len(os.listdir(f'/proc/{_pid(reader)}/fd'))} descriptors in all")  # fmt: skip
        yield from _looked_at(reader, about)
        yield from _with_bad(reader, standins, about)


def _looked_at(reader: FleetNode, about: str) -> Iterator[Row]:
    # Until every node has been read once: whoever looks first shares the time with all of them.
    ends = time.monotonic() + 60
    while _page(reader, limit=LISTED)["totals"]["states"].get("answered") != NODES + 1:
        if time.monotonic() > ends:
            raise Failed("not all nodes answer")
    began, used = time.monotonic(), _processor(reader)
    took: list[float] = []
    delays: list[float] = []
    before: dict[str, float] = {}
    for number in range(WATCHED):
        time.sleep(max(0.0, began + number * RENEWED - time.monotonic()))
        since = time.monotonic()
        page, arrived = _page(reader, limit=PAGE), time.time()
        took.append(time.monotonic() - since)
        delays += [arrived - before[name] for name in before]
        before = {node["name"]: node["shown"]["at"] for node in page["nodes"] if not node["here"]}
    time.sleep(max(0.0, began + WATCHED * RENEWED - time.monotonic()))
    share = (_processor(reader) - used) / (time.monotonic() - began)
    watched = f"{about}; {WATCHED} pages of {PAGE} nodes, one each {RENEWED:.0f} s"
    yield _row("view: a page takes", max(took), "s", f"{watched}; the longest; median {statistics.median(took):.2f} s",
               VIEW_S)  # fmt: skip
    yield _row("view: delay of a change on a page, worst", max(delays), "s",
               f"{watched}; from a node's answer until the next page is there")  # fmt: skip
    yield _row("view: processor of the reader, one page is looked at", 100 * share, "%",
               f"{watched}; share of one processor; the totals' answers are renewed each 15 s", SHARE)  # fmt: skip
    since, nodes, after = time.monotonic(), 0, ""
    while after is not None:
        page = _page(reader, limit=LISTED, after=after)
        nodes, after = nodes + len(page["nodes"]), page["after"]
    yield _row(f"view: all {nodes - 1} nodes, in pages of {LISTED}", time.monotonic() - since, "s",
               f"{about}; as xmigctl fleet devices reads them")  # fmt: skip
    since = time.monotonic()
    plan = reader.client.post("/v1/fleet/plans", {})
    took_s = time.monotonic() - since
    if len(plan["nodes"]) != NODES + 1:
        raise Failed(f"{len(plan['left_out'])} nodes take no part in the plan")
    yield _row("view: a plan over all nodes takes", took_s, "s",
               f"{about}; with reading all nodes; the packing itself takes {plan['ms'] / 1e3:.2f} s", 5.0)  # fmt: skip


def _with_bad(reader: FleetNode, standins: StandIns, about: str) -> Iterator[Row]:
    names = [peer["name"] for peer in standins.peers]
    standins.answer(names[:BAD], "hang")
    standins.answer(names[BAD : 2 * BAD], "gone")
    time.sleep(3 * RENEWED)  # the answers of all other pages are older then than the totals have them
    took = []
    for _ in range(WATCHED):
        since = time.monotonic()
        page = _page(reader, limit=PAGE, state="answered")
        took.append(time.monotonic() - since)
        if len(page["nodes"]) != PAGE:
            raise Failed("nodes that are well are not shown")
    yield _row("view: a page takes, with nodes that hang or are gone", max(took), "s",
               f"{about}; {BAD} hang, {BAD} are gone; {WATCHED} pages of {PAGE}, the longest", VIEW_S)  # fmt: skip


def _page(reader: FleetNode, **query: Any) -> dict[str, Any]:
    return dict(reader.client.get("/v1/fleet", **query))


def _row(name: str, value: float, unit: str, conditions: str, target: float | None = None) -> Row:
    return Row(
        name=name, value=round(value, 2), unit=unit, target=target, better="lower", conditions=conditions
    )  # fmt: skip


def _pid(reader: FleetNode) -> int:
    assert reader.process is not None
    return reader.process.pid


def _processor(reader: FleetNode) -> float:
    """Seconds that it has used."""
    fields = Path(f"/proc/{_pid(reader)}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _memory(reader: FleetNode) -> float:
    """KiB that are resident."""
    lines = Path(f"/proc/{_pid(reader)}/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith("VmRSS")).split()[1])
