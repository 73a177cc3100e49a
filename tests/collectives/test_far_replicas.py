"""Ranks on two nodes; devices of one are lost with their memory, and nobody on that node has the same. What was there
comes from the other node, or all ranks end in a clear error: never with what is wrong.

The program (programs/replicas.py) compares all that it computes with a model: the same as an undisturbed run."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.collectives.conftest import enough
from tests.collectives.nodes import RankNode, Ranks, all_started, cluster, kill
from tests.collectives.test_replicas import NOBODY, lose, overwrite, use_again
from tests.namespaces import needs_networks

pytestmark = needs_networks

DEVICES = "cpu:0,cpu:1,cpu:2"
SLOW = 20_000  # kilobits a second: 8 MiB take three seconds
DONE = [f"{rank}: done" for rank in range(4)]
CAME = re.compile(r"([0-9]+) MiB of [0-9]+ MiB that were lost with a device came from another node")
COPIED = "MiB that were lost with a device were copied from other ranks"


@pytest.fixture(scope="module")
def pair(native_dir: Path) -> Iterator[list[RankNode]]:
    with cluster(native_dir, 2, devices=DEVICES) as made:
        yield made


@pytest.fixture
def two(pair: list[RankNode]) -> Iterator[list[RankNode]]:
    yield from usable(pair)


def usable(nodes: list[RankNode]) -> Iterator[list[RankNode]]:
    """And again afterwards, whatever a test has done to them."""
    yield nodes
    for one in nodes:
        one.network.plug()
    for one in all_started(nodes):
        for device in DEVICES.split(","):
            use_again(one, device)


def begun(two: list[RankNode], folder: Path, *arguments: object) -> Ranks:
    """Two ranks on each node, with the second snapshot since."""
    ranks = Ranks(two, 2, folder, "replicas", *arguments)
    harness.wait_until(lambda: all((folder / f"began.{rank}").exists() for rank in range(4)), "all have begun", 60)
    wanted = ranks.snapshots() + 2
    harness.wait_until(lambda: ranks.snapshots() >= wanted, "snapshots of all ranks", 180)
    return ranks


def of(node: RankNode, ranks: Ranks) -> list[dict[str, Any]]:
    return [row for where, row in ranks.processes() if where is node]


def lose_all(node: RankNode, ranks: Ranks) -> None:
    """Devices that the node's ranks are on, at once, right behind a snapshot."""
    lose(node, *(row["device"] for row in of(node, ranks)))


def recovered(ranks: Ranks, count: int = 1) -> None:
    harness.wait_until(lambda: ranks.recoveries() >= count, f"all are recovered: {ranks.processes()}", 60)
    ranks.until_all_run()


def came(node: RankNode) -> int:
    """MiB from the other node, until now."""
    return sum(int(mib) for mib in CAME.findall(node.log.read_text()))


def end(ranks: Ranks, *errors: str) -> None:
    """Well, or all with one of these errors and never with what is wrong."""
    outputs = [one.process.communicate(timeout=120)[0] for one in ranks.programs]
    out = "".join(outputs)
    assert "not as expected: the state" not in out, out
    if all(one.process.returncode == 0 for one in ranks.programs):
        assert [line for line in out.splitlines() if " ended with " not in line] == DONE
        return
    assert "done" not in out
    lines = [f"{line}" for one in ranks.programs for line in one.lines("program", "server", "xmigd")]
    assert any(error in line for error in errors for line in lines), out + "\n".join(lines)


def test_all_devices_of_a_node_are_lost(two: list[RankNode], tmp_path: Path) -> None:
    """Before that one of them is, whose content is on the other."""
    ranks, node = begun(two, tmp_path, 0), two[1]
    before, copied = came(node), node.log.read_text().count(COPIED)
    lose(node, of(node, ranks)[0]["device"])
    recovered(ranks)
    assert came(node) == before
    assert node.log.read_text().count(COPIED) > copied
    before = came(node)
    lose_all(node, ranks)
    recovered(ranks, 2)
    assert came(node) >= before + 2 * 8  # MiB, of each rank
    enough(tmp_path)
    end(ranks)


@pytest.mark.parametrize("wrong", [1, 2])
def test_a_node_that_gives_what_is_wrong(two: list[RankNode], tmp_path: Path, wrong: int) -> None:
    """It is not used: another rank's is, and if there is none, the ranks end."""
    ranks = Ranks(two, 2, tmp_path, "replicas", 100, 0, 0)  # a replay only writes again what they begin with
    harness.wait_until(lambda: all((tmp_path / f"holds.{rank}").exists() for rank in range(4)), "all stand still", 60)
    harness.wait_until(
        lambda: all((row["live_bytes"] or 0) >= 8 << 20 for _, row in ranks.processes()), "a snapshot of all", 60
    )
    number, since = -1, 0.0

    def rests() -> bool:
        nonlocal number, since
        now = sum(row["snapshots"] or 0 for _, row in ranks.processes())
        if now != number:
            number, since = now, time.monotonic()
        return time.monotonic() - since > 0.6

    harness.wait_until(rests, "no more snapshots", 60)
    for row in sorted(of(two[0], ranks), key=lambda row: str(row["id"]))[:wrong]:
        overwrite(row["server_pid"])
    lose_all(two[1], ranks)
    (tmp_path / "go").touch()
    if wrong == 1:
        end(ranks)
        assert all(one.process.returncode == 0 for one in ranks.programs)
    else:
        end(ranks, NOBODY)
        assert all(one.process.returncode != 0 for one in ranks.programs)
    assert "they are not used" in two[1].log.read_text(), two[1].log.read_text()


@contextlib.contextmanager
def in_the_middle(losing: RankNode, ranks: Ranks) -> Iterator[None]:
    """Its devices are lost, and content comes slowly from the other node."""
    before = losing.log.read_text().count(COPIED)
    losing.network.slow(SLOW)
    try:
        lose_all(losing, ranks)
        harness.wait_until(lambda: losing.log.read_text().count(COPIED) > before, "content is to come", 60)
        yield
    finally:
        losing.network.fast()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what", ["daemon that gives", "daemon that gets", "server", "connection", "device"])
def test_something_else_fails_meanwhile(two: list[RankNode], tmp_path: Path, what: str) -> None:
    """All go on all the same."""
    ranks = begun(two, tmp_path, 0)
    losing, giving = two if what == "connection" else reversed(two)
    before = came(losing)
    with in_the_middle(losing, ranks):
        match what:
            case "daemon that gives" | "daemon that gets":
                daemon = giving if what == "daemon that gives" else losing
                daemon.kill()
                daemon.start()
            case "server":
                kill(of(giving, ranks)[0]["server_pid"])
            case "connection":
                with losing.network.unplugged():
                    losing.until(giving.name, "unreachable")
            case _:
                giving.client.post(f"/v1/devices/{of(giving, ranks)[0]['device']}:lose", {"reason": "it is a test"})
        assert came(losing) == before, "not in the middle"
    recovered(ranks)
    enough(tmp_path)
    end(ranks)
