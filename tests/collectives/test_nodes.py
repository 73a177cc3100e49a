"""Ranks on several nodes take snapshots and recover together, whatever becomes of a daemon or the network between."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests import harness
from tests.collectives.conftest import enough
from tests.collectives.nodes import RankNode, Ranks, cluster, kill
from tests.namespaces import needs_networks
from xmigd.errors import XmigError

pytestmark = needs_networks


def begun(ranks: Ranks, folder: Path) -> None:
    harness.wait_until(
        lambda: all((folder / f"began.{rank}").exists() for rank in range(ranks.count)), "all have begun", 60
    )


def done(ranks: Ranks) -> list[str]:
    return [f"{rank}: done" for rank in range(ranks.count)]


def take_snapshots(ranks: Ranks, more: int = 3) -> None:
    wanted = ranks.snapshots() + more
    harness.wait_until(lambda: ranks.snapshots() >= wanted, "snapshots of all ranks", 180)


def test_undisturbed(two: list[RankNode], tmp_path: Path) -> None:
    """Snapshots are taken in the same rounds, and the node that leads shows all ranks."""
    ranks = Ranks(two, 2, tmp_path, "steps", 0)
    begun(ranks, tmp_path)
    take_snapshots(ranks)
    shown = two[0].client.get(f"/v1/jobs/{ranks.programs[0].job}/ranks")
    assert [one["rank"] for one in shown["ranks"]] == [0, 1, 2, 3]
    assert any(one["outcome"] == "taken" and one["ranks"] == 4 for one in shown["snapshots"])
    enough(tmp_path)
    assert ranks.lines() == done(ranks)
    assert ranks.recoveries() == 0


@pytest.mark.parametrize("seed", range(2))
def test_servers_are_killed(two: list[RankNode], tmp_path: Path, seed: int) -> None:
    """One or several, on either node, also while the ranks are being recovered."""
    chance = random.Random(seed)
    ranks = Ranks(two, 2, tmp_path, "steps", 0)
    begun(ranks, tmp_path)
    take_snapshots(ranks)
    for _ in range(6):
        time.sleep(chance.uniform(0.05, 0.5))
        if chance.random() < 0.7:
            ranks.until_all_run()
        servers = [row["server_pid"] for _, row in ranks.processes()]
        kill(*chance.sample(servers, min(len(servers), chance.choice([1, 1, 2, 4]))))
    ranks.until_all_run()
    enough(tmp_path)
    assert ranks.lines() == done(ranks)


@pytest.mark.parametrize("which", [0, 1], ids=["leads", "follows"])
@pytest.mark.parametrize("also", ["nobody", "its servers", "others' servers"])
def test_a_daemon_is_killed(two: list[RankNode], tmp_path: Path, which: int, also: str) -> None:
    ranks = Ranks(two, 2, tmp_path, "steps", 0)
    begun(ranks, tmp_path)
    take_snapshots(ranks)
    servers = {one.name: [row["server_pid"] for where, row in ranks.processes() if where is one] for one in two}
    two[which].kill()
    if also != "nobody":
        kill(*servers[two[which if also == "its servers" else 1 - which].name][:1])
    two[which].start()
    ranks.until_all_run()
    take_snapshots(ranks)
    kill(ranks.processes()[-1][1]["server_pid"])
    harness.wait_until(lambda: ranks.recoveries() >= 1, "all are recovered", 60)
    ranks.until_all_run()
    enough(tmp_path)
    assert ranks.lines() == done(ranks)


def test_a_daemon_is_away_while_a_server_of_its_node_is_lost(two: list[RankNode], tmp_path: Path) -> None:
    """The other ranks' collectives fail, and who leads is not sent why: nobody is given up for that."""
    # Without splits: whoever makes a communicator waits for the others' addresses, or a minute for their connections.
    ranks = Ranks(two, 2, tmp_path, "steps", 0, SPLIT_EVERY=str(1 << 30))
    begun(ranks, tmp_path)
    take_snapshots(ranks)
    seen = two[0].log.read_text().count("a collective failed")
    server = next(row["server_pid"] for where, row in ranks.processes() if where is two[1])
    two[1].kill()
    kill(server)
    # Reported each second, and twice more after both times at which the one who leads looks for a reason.
    harness.wait_until(lambda: two[0].log.read_text().count("a collective failed") >= seen + 4, "collectives fail", 60)
    two[1].start()
    harness.wait_until(lambda: ranks.recoveries() >= 1, "all are recovered", 60)
    ranks.until_all_run()
    enough(tmp_path)
    assert ranks.lines() == done(ranks)


def test_the_daemon_that_leads_ends_as_ranks_meet(two: list[RankNode], tmp_path: Path) -> None:
    """It has answered the ranks of its own node, and those of the other one hear it from the next daemon."""
    ranks = Ranks(two, 2, tmp_path, "steps", 0, JOINS_LAST="1")

    def activities(waits_for: str | None) -> dict[int, str]:
        found = two[0].client.get(f"/v1/jobs/{ranks.programs[0].job}/ranks")["ranks"]
        return {one["rank"]: one["activity"] for one in found if one["waits_for"] == waits_for}

    others = dict.fromkeys((0, 2, 3), "joining")
    harness.wait_until(lambda: activities("rank 1 of a communicator") == others, "only one is missing", 60)
    with two[1].network.unplugged():
        (tmp_path / "may_join").touch()
        running = dict.fromkeys(range(4), "running")
        harness.wait_until(lambda: activities(None) == running, "all are answered, by this one")
        two[0].kill()
    two[0].start()
    began = time.monotonic()
    begun(ranks, tmp_path)
    assert time.monotonic() - began < 50, "nobody has given up, and tried again"
    enough(tmp_path)
    assert ranks.lines() == done(ranks)
    assert ranks.recoveries() == 0


def test_a_network_outage(two: list[RankNode], tmp_path: Path) -> None:
    """For as long as connections of collectives last: they end, nobody is lost, and all ranks go back and on."""
    # Without splits: whoever makes a communicator has no connection yet, and waits for a minute.
    ranks = Ranks(two, 2, tmp_path, "steps", 0, SPLIT_EVERY=str(1 << 30))
    begun(ranks, tmp_path)
    take_snapshots(ranks)
    seen = two[0].log.read_text().count("a collective failed")
    with two[1].network.unplugged():
        harness.wait_until(lambda: two[0].log.read_text().count("a collective failed") > seen, "connections end", 60)
    harness.wait_until(lambda: ranks.recoveries() >= 1, "all are recovered", 60)
    ranks.until_all_run()
    take_snapshots(ranks)
    enough(tmp_path)
    assert ranks.lines() == done(ranks)


def test_a_node_is_not_in_reach(two: list[RankNode], tmp_path: Path) -> None:
    """A server is lost meanwhile: the recovery waits for the other node."""
    ranks = Ranks(two, 2, tmp_path, "steps", 0)
    begun(ranks, tmp_path)
    take_snapshots(ranks)
    for which in (0, 1):
        with two[1].network.unplugged():
            two[0].until("b", "unreachable")
            kill(next(row["server_pid"] for where, row in ranks.processes() if where is two[which]))
        harness.wait_until(lambda n=which: ranks.recoveries() > n, "all are recovered", 60)  # type: ignore[misc]
        ranks.until_all_run()
        take_snapshots(ranks)
    enough(tmp_path)
    assert ranks.lines() == done(ranks)


def test_eight_ranks_over_four_nodes(native_dir: Path, tmp_path: Path) -> None:
    chance = random.Random(8)
    with cluster(native_dir, 4) as four:
        ranks = Ranks(four, 2, tmp_path, "steps", 0)
        begun(ranks, tmp_path)
        take_snapshots(ranks)
        for _ in range(4):
            ranks.until_all_run()
            servers = [row["server_pid"] for _, row in ranks.processes()]
            kill(*chance.sample(servers, chance.choice([1, 2, 8])))
            time.sleep(chance.uniform(0.05, 0.5))
        ranks.until_all_run()
        enough(tmp_path)
        assert ranks.lines() == done(ranks)


def test_bad_lists_of_nodes(two: list[RankNode]) -> None:
    a = two[0]
    for names, why in (
        (["b"], "this node, a, is none of b"), (["a", "x"], "no peer 'x' is known"), (["a", "b", "a"], "named twice"),
    ):  # fmt: skip
        with pytest.raises(XmigError, match=why):
            a.client.post("/v1/jobs", {"command": "true", "nodes": names})
