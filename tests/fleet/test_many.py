"""Many nodes in one view: eight daemons, and a hundred stand-ins of which some hang, lie and are gone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.nodes import FleetNode
from tests.fleet.standins import GPUS, JOBS, StandIns, reading
from tests.harness import wait_until
from tests.peers.fake import FakeNetwork
from tests.web.front import end_calm, start_calm
from xmigd.fleet import reading as readings
from xmigd.fleet.reading import KEPT_OF_PEER, Answered, Readings

COUNT = 100
Fleet = tuple[FleetNode, StandIns]


@pytest.fixture(scope="module")
def fleet(native_dir: Path) -> Iterator[Fleet]:
    with tempfile.TemporaryDirectory(prefix="xmig-") as folder, reading(Path(folder), native_dir, COUNT) as made:
        yield made


def view(reader: FleetNode, **query: Any) -> dict[str, Any]:
    return dict(reader.client.get("/v1/fleet", **query))


def states(reader: FleetNode, **wanted: int) -> dict[str, Any]:
    """A view of all nodes, once so many are in these states: a slow machine may need several attempts."""
    found: dict[str, Any] = {}

    def holds() -> bool:
        found.update(view(reader, limit=1000))
        return bool(found["totals"]["states"] == wanted)

    wait_until(holds, f"{wanted}")
    return found


def names(standins: StandIns, first: int, count: int) -> list[str]:
    return [peer["name"] for peer in standins.peers[first : first + count]]


class TestPages:
    def test_each_node_is_on_one_page(self, fleet: Fleet) -> None:
        reader, standins = fleet
        totals = states(reader, answered=COUNT + 1)["totals"]
        assert (totals["nodes"], totals["devices"]) == (COUNT + 1, COUNT * GPUS + 2)
        assert (totals["free_devices"], totals["jobs"]) == (COUNT + 2, COUNT * JOBS)
        listed, after, pages = [], "", 0
        while after is not None:
            page = view(reader, limit=30, after=after)
            listed += [node["name"] for node in page["nodes"]]
            after, pages = page["after"], pages + 1
            assert page["totals"]["nodes"] == COUNT + 1
        assert listed == ["a-reader", *names(standins, 0, COUNT)]
        assert pages == 4
        assert [node["name"] for node in view(reader, name="e-002", limit=3)["nodes"]] == names(standins, 20, 3)
        assert view(reader, state="silent")["nodes"] == []
        assert "node-0099" in reader.ctl("fleet", "list", "--name", "009")

    def test_a_plan_over_all(self, fleet: Fleet) -> None:
        reader, _ = fleet
        states(reader, answered=COUNT + 1)
        plan = reader.client.post("/v1/fleet/plans", {"objective": "free_nodes"})
        assert (len(plan["nodes"]), plan["left_out"]) == (COUNT + 1, [])
        assert plan["freed_nodes"]


HUGE = {"shown": {"version": "1", "at": 1.0, "devices": [{}] * 250_000, "jobs": []}}


def bad(standins: StandIns) -> dict[str, tuple[str, Any]]:
    """Nodes that are not well: the state that each is to have, and what it answers."""
    device = {"id": "cuda:0", "state": "ready"}
    process = {"id": "00000009" + "0" * 8, "device": "cuda:0", "state": "running", "memory_bytes": 1}
    job = {
        "id": "00000009" + "0" * 24, "name": "training-9-0", "uid": 0, "user": "root", "state": "running",
        "created_at": 1.0, "processes": [process],
    }  # fmt: skip
    # Names another node, and a job of it as its own: that is a row of its own, and nobody else's.
    borrowed = {"version": "1", "at": 1.0, "devices": [device], "jobs": [job], "ways": {"node-0009": {"transfers": 3}}}
    return {
        "node-0000": ("silent", "hang"), "node-0001": ("silent", "hang"), "node-0002": ("invalid", HUGE),
        "node-0003": ("invalid", {"shown": [[]] * 1000}), "node-0004": ("invalid", {"shown": {"at": "x" * 100_000}}),
        "node-0005": ("silent", {"problem": ["\x1b[2J"] * 1000}), "node-0006": ("answered", {"shown": borrowed}),
        "node-0007": ("not_allowed", {"problem": "no", "allowed": False}), "node-0008": ("unreachable", "gone"),
    }  # fmt: skip


def test_nodes_that_are_not_well_cost_their_own_rows_only(fleet: Fleet) -> None:
    """Each says since when; those that are well are shown as of now."""
    reader, standins = fleet
    before = {node["name"]: node for node in states(reader, answered=COUNT + 1)["nodes"]}
    unwell = bad(standins)
    began = time.time()
    for name, (_, answer) in unwell.items():
        standins.answer([name], answer)
    found = states(reader, answered=COUNT + 1 - 8, silent=3, invalid=3, not_allowed=1, unreachable=1)
    nodes = {node["name"]: node for node in found["nodes"]}
    for name, (state, _) in unwell.items():
        node = nodes[name]
        assert node["state"] == state
        if state in ("silent", "invalid", "unreachable"):
            assert node["since"] > began
            assert len(node["why"]) < 400
            assert node["shown"]["jobs"] == before[name]["shown"]["jobs"]
            assert node["answered_at"] >= before[name]["answered_at"]
    assert nodes["node-0007"]["shown"] is None
    assert nodes["node-0009"]["shown"]["jobs"] == before["node-0009"]["shown"]["jobs"]
    wait_until(
        lambda: all(node["shown"]["at"] > began for node in view(reader, name="e-005")["nodes"]), "they are of now"
    )
    assert [node["name"] for node in view(reader, state="silent")["nodes"]] == ["node-0000", "node-0001", "node-0005"]
    # Who was silent before is not waited for: pages take their usual time again.
    began = time.monotonic()
    for _ in range(10):
        view(reader, limit=10)
    assert time.monotonic() - began < 10 * 1.5
    plan = reader.client.post("/v1/fleet/plans", {"exclude_nodes": ["node-0000", "node-0001"]})
    assert {each["node"] for each in plan["left_out"]} == unwell.keys() - {"node-0006"}
    standins.answer([name for name in unwell if name != "node-0008"], "honest")
    states(reader, answered=COUNT, unreachable=1)


def test_many_links_have_rarer_heartbeats(fleet: Fleet) -> None:
    """And are found lost all the same: their process stands still."""
    reader, standins = fleet
    os.kill(standins.pid, signal.SIGSTOP)
    try:
        reader.until("node-0050", "unreachable", f"it was silent for {5 * COUNT / 64:g} s")
    finally:
        os.kill(standins.pid, signal.SIGCONT)
    reader.until("node-0050", "connected")


def test_eight_daemons(native_dir: Path) -> None:
    """One reads seven; one that stands still is a row, and nothing else."""
    with ExitStack() as stack:
        made = []
        for number in range(8):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="xmig-")))
            made.append(FleetNode(folder, f"n{number}", native_dir, fleet_readers="n0", device_memory=1 << 28))
        with ThreadPoolExecutor(len(made)) as pool:
            for begun in [pool.submit(stack.enter_context, each) for each in made]:
                begun.result()
        reader, *others = made
        for each in others:
            reader.knows(each)
            each.knows(reader)
        program = start_calm(others[3], "training", device="cpu:1")
        totals = states(reader, answered=8)["totals"]
        assert (totals["devices"], totals["jobs"]) == (16, 1)
        assert others[6].process is not None
        os.kill(others[6].process.pid, signal.SIGSTOP)
        try:
            wait_until(lambda: view(reader)["totals"]["states"].get("answered") == 7, "it does not answer")
            found = {node["name"]: node for node in view(reader)["nodes"]}
            assert found["n7"]["state"] in ("silent", "unreachable")
            assert [job["name"] for job in found["n4"]["shown"]["jobs"]] == ["training"]
        finally:
            os.kill(others[6].process.pid, signal.SIGCONT)
        states(reader, answered=8)
        end_calm(program)


class TestWhatIsKept:
    """Of answers."""

    def made(self) -> Readings:
        return Readings(FakeNetwork("here", "a", "b")["here"], None, list)  # type: ignore[arg-type]

    def test_of_one_peer(self) -> None:
        """It pushes out nobody's answers but its own."""

        async def run() -> None:
            kept = self.made()
            kept._note(("b", None), Answered("answered", content=b"{}"))
            for uid in range(100):
                kept._note(("a", uid), Answered("answered", content=bytes(1 << 20)))
                assert kept._held["a"] <= KEPT_OF_PEER
            assert kept._last(("a", 99)) is not None
            assert kept._last(("a", 0)) is None
            assert kept._last(("b", None)) is not None
            assert kept._total == kept._held["a"] + kept._held["b"]

        asyncio.run(run())

    def test_of_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The peer with most loses first."""
        monkeypatch.setattr(readings, "KEPT", 3 << 20)

        async def run() -> None:
            kept = self.made()
            kept._note(("b", None), Answered("answered", content=bytes(1 << 19)))
            for uid in range(10):
                kept._note(("a", uid), Answered("answered", content=bytes(1 << 20)))
            assert kept._total <= 3 << 20
            assert kept._last(("b", None)) is not None
            assert json.dumps(sorted(map(str, kept._seen["a"]))) == '["8", "9"]'

        asyncio.run(run())
