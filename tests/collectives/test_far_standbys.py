"""Standbys of ranks on several nodes make their communicators ahead, and a recovery uses what all have made."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import harness
from tests.collectives.conftest import PROGRAMS, enough
from tests.collectives.nodes import RankNode, Ranks, cluster, kill
from tests.collectives.test_full_devices import GIVEN_UP
from tests.collectives.test_nodes import begun, done, take_snapshots
from tests.collectives.test_steps import USED
from tests.namespaces import needs_networks
from xmigd.native import SERVER

pytestmark = needs_networks

OF_EACH = 2  # communicators of a rank of `steps`: all four, and those with its color
UNMADE = "a communicator cannot be made ahead"
SOON = 12  # seconds, and less than a standby waits for others
CONNECTING = 60  # seconds that a standby waits for a connection of one that is gone


@pytest.fixture(scope="module")
def pair(native_dir: Path) -> Iterator[list[RankNode]]:
    with cluster(native_dir, 2, standby_communicators_mib=1024) as made:
        yield made


def start(two: list[RankNode], folder: Path) -> Ranks:
    # Without splits: whoever makes a communicator waits a minute for connections with a node that is not in reach.
    ranks = Ranks(two, 2, folder, "steps", 0, SPLIT_EVERY=str(1 << 30))
    begun(ranks, folder)
    return ranks


def made(ranks: Ranks) -> list[int]:
    return [row["standby_communicators"] for _, row in ranks.processes()]


def until_all_made(ranks: Ranks, timeout: float = 60) -> None:
    harness.wait_until(
        lambda: made(ranks) == [OF_EACH] * ranks.count, f"standbys have made them: {made(ranks)}", timeout
    )


def all_warm(ranks: Ranks) -> bool:
    return all(row["standby"] == "warm" for _, row in ranks.processes())


def standbys(node: RankNode, ranks: Ranks) -> list[int]:
    """Pids: its daemon's children that have no process."""
    assert node.process is not None
    active = {row["server_pid"] for _, row in ranks.processes()}
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
            if name == SERVER[:15] and int(rest.split()[1]) == node.process.pid:
                found.append(int(stat.parent.name))
    return [pid for pid in found if pid not in active]


def used(node: RankNode) -> int:
    return node.log.read_text().count(USED)


def recover_with_them(ranks: Ranks, victim: int) -> None:
    """Its server is killed."""
    before, recovered = [used(one) for one in ranks.nodes], ranks.recoveries()
    kill(ranks.processes()[victim][1]["server_pid"])
    harness.wait_until(lambda: ranks.recoveries() > recovered, "all are recovered")
    ranks.until_all_run()
    assert [used(one) - number for one, number in zip(ranks.nodes, before, strict=True)] == [2, 2], "by each rank"


@pytest.mark.parametrize("victim", [0, 3], ids=["leads", "follows"])
def test_a_recovery_makes_none(two: list[RankNode], tmp_path: Path, victim: int) -> None:
    """All ranks use what their standbys have made, and the next standbys make them again."""
    ranks = start(two, tmp_path)
    for _ in range(2):
        until_all_made(ranks)
        recover_with_them(ranks, victim)
    enough(tmp_path)
    assert ranks.lines() == done(ranks)


def test_a_node_whose_setting_is_nothing(native_dir: Path, tmp_path: Path) -> None:
    """Each node's memory is its own: none is made with ranks there, and all are recovered as without."""
    of_each = {"a": {"standby_communicators_mib": 1024}, "b": {"standby_communicators_mib": 0}}
    with cluster(native_dir, 2, of_each=of_each) as nodes:
        ranks = start(nodes, tmp_path)
        take_snapshots(ranks)
        kill(ranks.processes()[3][1]["server_pid"])
        harness.wait_until(lambda: ranks.recoveries() >= 1, "all are recovered")
        take_snapshots(ranks)
        enough(tmp_path)
        assert ranks.lines() == done(ranks)
        assert not any("is made ahead" in one.log.read_text() or used(one) for one in nodes)


@pytest.fixture
def joining(two: list[RankNode], tmp_path: Path) -> Iterator[tuple[Ranks, int]]:
    """All standbys but one join, and it lets them wait: it is stopped. Its pid."""
    ranks = start(two, tmp_path)
    until_all_made(ranks)
    waited_for = standbys(two[1], ranks)[0]
    os.kill(waited_for, signal.SIGSTOP)
    kill(standbys(two[0], ranks)[0])
    harness.wait_until(lambda: max(made(ranks)) < OF_EACH and all_warm(ranks), "they are to be made anew", 60)
    take_snapshots(ranks, 2)  # with these the next standby joins, and those that do not need the one need not wait
    yield ranks, waited_for
    with contextlib.suppress(ProcessLookupError):
        os.kill(waited_for, signal.SIGCONT)


@pytest.mark.parametrize("connecting", [False, True], ids=["meeting", "connecting"])
def test_a_recovery_does_not_wait_for_who_joins(
    joining: tuple[Ranks, int], tmp_path: Path, connecting: bool
) -> None:  # fmt: skip
    """Their standbys get the processes in the middle of it: while they meet, or wait for a connection of one that is
    gone."""
    ranks, waited_for = joining
    if connecting:
        kill(standbys(ranks.nodes[0], ranks)[0])
        os.kill(waited_for, signal.SIGCONT)
    else:
        kill(waited_for)
    began = time.monotonic()
    kill(ranks.processes()[0][1]["server_pid"])
    harness.wait_until(lambda: ranks.recoveries() >= 1, "all are recovered")
    ranks.until_all_run()
    assert time.monotonic() - began < SOON
    until_all_made(ranks)
    recover_with_them(ranks, 3)
    enough(tmp_path)
    assert ranks.lines() == done(ranks)


def test_a_standby_is_lost_while_others_join(joining: tuple[Ranks, int], tmp_path: Path) -> None:
    """They join with the next one."""
    ranks, waited_for = joining
    kill(waited_for)
    until_all_made(ranks)
    recover_with_them(ranks, 0)
    enough(tmp_path)
    assert ranks.lines() == done(ranks)


@pytest.mark.parametrize("which", [0, 1], ids=["leads", "follows"])
def test_a_daemon_is_killed_while_they_join(joining: tuple[Ranks, int], tmp_path: Path, which: int) -> None:
    """Those that it has not had made are made anew with the next one."""
    ranks, waited_for = joining
    ranks.nodes[which].kill()
    ranks.nodes[which].start()
    with contextlib.suppress(ProcessLookupError):  # it ends with its daemon
        os.kill(waited_for, signal.SIGCONT)
    until_all_made(ranks)
    recover_with_them(ranks, 3 * which)
    enough(tmp_path)
    assert ranks.lines() == done(ranks)


def forgotten_and_made_again(ranks: Ranks, before: list[int], victim: int) -> None:
    """All were recovered, without what there was `before`. The next recovery uses what is made then."""
    harness.wait_until(lambda: ranks.recoveries() >= 1, "all are recovered", 60)
    assert [used(one) for one in ranks.nodes] == before
    until_all_made(ranks)
    recover_with_them(ranks, victim)


@pytest.mark.parametrize("which", [0, 1], ids=["leads", "follows"])
def test_a_daemon_is_killed_when_they_have_made_them(two: list[RankNode], tmp_path: Path, which: int) -> None:
    """And a server at once: what one side has is of no use, and is forgotten."""
    ranks = start(two, tmp_path)
    until_all_made(ranks)
    before = [used(one) for one in two]
    two[which].kill()
    kill(ranks.processes()[-1][1]["server_pid"])
    two[which].start()
    forgotten_and_made_again(ranks, before, 0)
    enough(tmp_path)
    assert ranks.lines() == done(ranks)


@pytest.mark.parametrize("joins", [False, True], ids=["made", "joining"])
def test_an_outage_of_the_network(
    two: list[RankNode], tmp_path: Path, joins: bool, request: pytest.FixtureRequest
) -> None:
    """Connections that nobody uses end without notice: nothing that was made before is used after that."""
    if joins:
        ranks, waited_for = request.getfixturevalue("joining")
    else:
        ranks, waited_for = start(two, tmp_path), None
        until_all_made(ranks)
    before = [used(one) for one in two]
    with two[1].network.unplugged():
        two[0].until("b", "unreachable")
        kill(ranks.processes()[0][1]["server_pid"])
    if waited_for is not None:
        os.kill(waited_for, signal.SIGCONT)
    forgotten_and_made_again(ranks, before, 3)
    enough(tmp_path)
    assert ranks.lines() == done(ranks)


@pytest.mark.parametrize("seed", range(2))
def test_servers_and_standbys_are_killed(two: list[RankNode], tmp_path: Path, seed: int) -> None:
    """At any moment, on either node, also while ranks are being recovered; communicators of the program come and go."""
    chance = random.Random(seed)
    ranks = Ranks(two, 2, tmp_path, "steps", 0)
    begun(ranks, tmp_path)
    take_snapshots(ranks)
    for _ in range(8):
        time.sleep(chance.uniform(0.05, 1))
        if chance.random() < 0.7:
            ranks.until_all_run()
        servers = [row["server_pid"] for _, row in ranks.processes()]
        servers += [pid for one in two for pid in standbys(one, ranks)]
        kill(*chance.sample(servers, min(len(servers), chance.choice([1, 1, 2, 3]))))
    ranks.until_all_run()
    until_all_made(ranks, CONNECTING + 60)
    recover_with_them(ranks, chance.randrange(4))
    enough(tmp_path)
    assert ranks.lines() == done(ranks)


def all_are(folder: Path, name: str, ranks: int) -> None:
    harness.wait_until(lambda: all((folder / f"{name}.{rank}").exists() for rank in range(ranks)), name)


def test_a_program_needs_the_memory(joining: tuple[Ranks, int], tmp_path: Path) -> None:
    """One of the node that follows, and no rank. What its standbys are making is given up at once, nobody knows what it
    would take; so do those of the other node, and none is made with that device for a while."""
    ranks, waited_for = joining
    node, beside = ranks.nodes[1], tmp_path / "beside"
    beside.mkdir()
    given_up, other = node.log.read_text().count(GIVEN_UP), ranks.nodes[0].log
    command = [sys.executable, PROGRAMS / "launch.py", "1", beside, PROGRAMS / "filling.py"]
    program = node.program(list(map(str, command)), name="filling")
    all_are(beside, "began", 1)
    unmade = other.read_text().count(UNMADE)
    (beside / "request").touch()
    all_are(beside, "refused", 1)
    assert node.log.read_text().count(GIVEN_UP) > given_up
    harness.wait_until(lambda: other.read_text().count(UNMADE) > unmade, "the other node's do not wait any more", SOON)
    os.kill(waited_for, signal.SIGCONT)
    take_snapshots(ranks, 4)
    assert all_warm(ranks)
    assert max(made(ranks)) < OF_EACH
    for name in ("fill", "end"):
        (beside / name).touch()
    assert program.process.wait(60) == 0
    kill(ranks.processes()[0][1]["server_pid"])
    harness.wait_until(lambda: ranks.recoveries() >= 1, "all are recovered")
    take_snapshots(ranks)
    enough(tmp_path)
    assert ranks.lines() == done(ranks)
