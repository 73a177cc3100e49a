"""Ranks of jobs of several nodes move to another device of their node while all others run: nothing of it is seen in
what they compute, whatever becomes of a server, a daemon or the network in the middle."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.collectives.conftest import enough
from tests.collectives.nodes import RankNode, Ranks, kill, killed_and_found_again
from tests.collectives.test_nodes import begun, done, take_snapshots
from tests.migration.moves import ended, reaches, succeeded
from tests.namespaces import needs_networks
from xmigd.client import Refused

pytestmark = needs_networks

OTHER = {"cpu:0": "cpu:1", "cpu:1": "cpu:0"}


def of(ranks: Ranks, which: int, number: int = 0) -> dict[str, Any]:
    """A process of that node."""
    found = [row for node, row in ranks.processes() if node is ranks.nodes[which]]
    return sorted(found, key=lambda row: row["id"])[number]


def begin(ranks: Ranks, which: int, number: int = 0) -> dict[str, Any]:
    """Of a rank of that node, to the other device."""
    row = of(ranks, which, number)
    body = {"process": row["id"], "target": OTHER[row["device"]]}
    operation: dict[str, Any] = ranks.nodes[which].client.post("/v1/migrations", body)
    return operation


def test_each_rank_moves(two: list[RankNode], tmp_path: Path) -> None:
    """Packed onto one device of each node, and to the other."""
    ranks = Ranks(two, 2, tmp_path, "steps", 0)
    begun(ranks, tmp_path)
    for _ in range(2):
        for which in (1, 0):
            for number in range(2):
                operation = succeeded(two[which], begin(ranks, which, number))
                assert operation["result"]["downtime_ms"] is not None
    take_snapshots(ranks)
    enough(tmp_path)
    assert ranks.lines() == done(ranks)
    assert ranks.recoveries() == 0


PHASES = ["preparing", "copying", "handing_over", "taking"]


def settled(ranks: Ranks) -> None:
    """All run, nothing is under way, and each rank has one server that has it."""

    def is_settled() -> bool:
        assert all(one.process.poll() is None for one in ranks.programs), ranks.output()
        found = ranks.processes()
        running = len(found) == ranks.count and all(row["state"] == "running" for _, row in found)
        return running and not any(one.client.get("/v1/operations", state="running") for one in ranks.nodes)

    harness.wait_until(is_settled, f"all ranks run: {[row for _, row in ranks.processes()]}", 240)


def finished(ranks: Ranks, folder: Path) -> None:
    """All goes on, and all that it has computed is right. The next move is done, and the next snapshot."""
    settled(ranks)
    for which, one in enumerate(ranks.nodes):
        operation = ended(one, begin_when_it_can(ranks, which))
        assert operation["state"] == "succeeded", f"{operation}"
    take_snapshots(ranks)
    enough(folder)
    assert ranks.lines() == done(ranks)


def begin_when_it_can(ranks: Ranks, which: int, number: int = 0) -> dict[str, Any]:
    """The daemon may not have seen yet that a server was killed."""
    begun: list[dict[str, Any]] = []

    def it_begins() -> bool:
        with contextlib.suppress(Refused):
            begun.append(begin(ranks, which, number))
        return bool(begun)

    harness.wait_until(it_begins, "its move begins", 60)
    return begun[0]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("moves", [0, 1], ids=["leads", "follows"])
def test_servers_are_killed_meanwhile(two: list[RankNode], tmp_path: Path, moves: int, phase: str) -> None:
    """Of the rank that moves, its target, another of its node, and one of the other node."""
    chance = random.Random(f"{moves}{phase}")
    ranks = Ranks(two, 2, tmp_path, "steps", 0)
    begun(ranks, tmp_path)
    for victim in ("source", "target", "near", "far"):
        settled(ranks)
        servers = {
            "source": of(ranks, moves, 0)["server_pid"], "near": of(ranks, moves, 1)["server_pid"],
            "far": of(ranks, 1 - moves, 0)["server_pid"],
        }  # fmt: skip
        before = set(harness.server_pids(two[moves]))
        operation = reaches(two[moves], begin_when_it_can(ranks, moves), phase)
        time.sleep(chance.uniform(0, 0.02))
        new = sorted(set(harness.server_pids(two[moves])) - before)
        kill(servers.get(victim, new[0] if new else None))
        assert ended(two[moves], operation)["state"] in ("succeeded", "failed")
    finished(ranks, tmp_path)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("moves", [0, 1], ids=["leads", "follows"])
@pytest.mark.parametrize("killed", [0, 1], ids=["its leader", "its follower"])
def test_a_daemon_is_killed_meanwhile(
    two: list[RankNode], tmp_path: Path, killed: int, moves: int, phase: str
) -> None:  # fmt: skip
    chance = random.Random(f"{moves}{killed}{phase}")
    ranks = Ranks(two, 2, tmp_path, "steps", 0)
    begun(ranks, tmp_path)
    reaches(two[moves], begin_when_it_can(ranks, moves), phase)
    time.sleep(chance.uniform(0, 0.02))
    killed_and_found_again(two, killed)
    finished(ranks, tmp_path)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("moves", "phase", "seconds"),
    [(moves, phase, 8 * ((moves + number) % 2)) for moves in range(2) for number, phase in enumerate(PHASES)],
)
def test_the_network_is_interrupted_meanwhile(
    two: list[RankNode], tmp_path: Path, moves: int, phase: str, seconds: int
) -> None:  # fmt: skip
    """For a moment (0), or for longer than the daemons need to notice it."""
    chance = random.Random(f"{moves}{phase}")
    # Without splits: whoever makes a communicator has no connection yet, and waits for a minute.
    ranks = Ranks(two, 2, tmp_path, "steps", 0, SPLIT_EVERY=str(1 << 30))
    begun(ranks, tmp_path)
    operation = reaches(two[moves], begin_when_it_can(ranks, moves), phase)
    time.sleep(chance.uniform(0, 0.02))
    with two[1].network.unplugged():
        time.sleep(seconds or chance.uniform(0.1, 2))
    assert ended(two[moves], operation, 90)["state"] in ("succeeded", "failed")
    finished(ranks, tmp_path)


def test_on_both_nodes_at_once(two: list[RankNode], tmp_path: Path) -> None:
    """All ranks of both, begun at the same moment: each waits for those before it."""
    ranks = Ranks(two, 2, tmp_path, "steps", 0)
    begun(ranks, tmp_path)
    for _ in range(2):
        started = [(one, begin(ranks, which, number)) for which, one in enumerate(two) for number in range(2)]
        for one, operation in started:
            succeeded(one, operation)
    finished(ranks, tmp_path)
    assert ranks.recoveries() == 0


@pytest.mark.parametrize("moves", [0, 1], ids=["leads", "follows"])
def test_it_is_cancelled(two: list[RankNode], tmp_path: Path, moves: int) -> None:
    ranks = Ranks(two, 2, tmp_path, "steps", 0)
    begun(ranks, tmp_path)
    for phase in ("preparing", "copying", "handing_over", "taking"):
        operation = reaches(two[moves], begin_when_it_can(ranks, moves), phase)
        with contextlib.suppress(Refused):  # it is over already
            two[moves].client.delete(f"/v1/operations/{operation['id']}")
        assert ended(two[moves], operation)["state"] in ("cancelled", "succeeded")
        settled(ranks)
    finished(ranks, tmp_path)


@pytest.mark.parametrize("moves", [0, 1], ids=["leads", "follows"])
def test_it_is_contradicted(two: list[RankNode], tmp_path: Path, moves: int) -> None:
    """By a suspension of all, requested on either node."""
    ranks = Ranks(two, 2, tmp_path, "steps", 0)
    begun(ranks, tmp_path)
    for which in (0, 1):
        operation = reaches(two[moves], begin_when_it_can(ranks, moves), "copying", "handing_over")
        suspends = None
        with contextlib.suppress(Refused):  # of its own node: a move of it is under way
            job = ranks.programs[which].job
            suspends = two[which].client.post(f"/v1/jobs/{job}:suspend", {})
        assert ended(two[moves], operation)["state"] in ("succeeded", "failed")
        if suspends is not None:
            suspended = ended(two[which], suspends)["state"] == "succeeded"
            if suspended:
                all_suspended(ranks)
                succeeded(two[which], two[which].client.post(f"/v1/jobs/{job}:resume", {}))
        settled(ranks)
    finished(ranks, tmp_path)


def all_suspended(ranks: Ranks) -> None:
    harness.wait_until(lambda: {row["state"] for _, row in ranks.processes()} == {"suspended"}, "all are suspended")


@pytest.mark.parametrize("victim", [0, 1], ids=["it", "another"])
def test_a_program_ends_meanwhile(two: list[RankNode], tmp_path: Path, victim: int) -> None:
    """Of the rank that moves, or of the other node: the others get its error, and nobody waits."""
    ranks = Ranks(two, 2, tmp_path, "steps", 0)
    begun(ranks, tmp_path)
    operation = reaches(two[1], begin(ranks, 1), "copying", "handing_over")
    os.kill(of(ranks, 1 - victim)["pid"], signal.SIGKILL)
    assert ended(two[1], operation)["state"] in ("succeeded", "failed")
    for one in ranks.programs:
        one.process.communicate(timeout=60)
    over = {"ended", "lost"}
    harness.wait_until(lambda: {row["state"] for _, row in ranks.processes()} <= over, "nobody waits")


@pytest.mark.parametrize("which", [0, 1], ids=["leads", "follows"])
def test_a_device_is_drained(two: list[RankNode], tmp_path: Path, which: int) -> None:
    """Its ranks go to the other device of their node, one after the other."""
    ranks = Ranks(two, 2, tmp_path, "steps", 0)
    begun(ranks, tmp_path)
    device = of(ranks, which)["device"]
    succeeded(two[which], two[which].client.post(f"/v1/devices/{device}:drain", {}))
    assert {of(ranks, which, number)["device"] for number in range(2)} == {OTHER[device]}
    tag = two[which].client.get_tagged(f"/v1/devices/{device}")[1]
    two[which].client.patch(f"/v1/devices/{device}", {"cordoned": False}, tag)
    finished(ranks, tmp_path)
    assert ranks.recoveries() == 0


@pytest.mark.parametrize("which", [0, 1], ids=["leads", "follows"])
def test_a_node_is_packed(two: list[RankNode], tmp_path: Path, which: int) -> None:
    """By a consolidation, which is undone."""
    ranks = Ranks(two, 2, tmp_path, "steps", 0)
    begun(ranks, tmp_path)

    def devices() -> list[str]:
        return [of(ranks, which, number)["device"] for number in range(2)]

    before = devices()
    client = two[which].client
    plan = client.post("/v1/consolidation-plans", {"assumed_busy_share": 0.0})
    assert (len(plan["moves"]), plan["refusals"]) == (1, [])
    succeeded(two[which], client.post(f"/v1/consolidation-plans/{plan['id']}/apply", {"guard_seconds": 0}))
    assert len(set(devices())) == 1
    succeeded(two[which], client.post(f"/v1/consolidation-plans/{plan['id']}/undo", {}))
    assert devices() == before
    finished(ranks, tmp_path)
    assert ranks.recoveries() == 0
