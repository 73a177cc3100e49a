"""Ranks on two nodes that each have something of their own. It goes to host memory of their node, or to that of the
other one, and from there to ranks that lose their devices; and never with what is wrong.

The program (programs/replicas.py) compares all that it computes with a model: the same as an undisturbed run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.collectives.conftest import enough
from tests.collectives.nodes import RankNode, Ranks, cluster, kill
from tests.collectives.test_far_replicas import DEVICES, begun, came, end, lose_all, of, recovered, usable
from tests.collectives.test_replicas import IN_A_SNAPSHOT, NOBODY, lose
from tests.namespaces import needs_networks

pytestmark = needs_networks

OWN = 6  # MiB of each rank
HOLD = 60  # the step at which they wait
RATE = 6  # MiB a second, from b to a
CHUNK = 2 << 20
SLOW = 8_000  # kilobits a second: a chunk takes two seconds


@pytest.fixture(scope="module")
def keeping(native_dir: Path) -> Iterator[list[RankNode]]:
    """Nothing stays on the own node. The first one keeps what the second one sends, which has no room itself."""
    of_each = {
        "a": {"neighbour_copies_mib": 1024, "neighbour_copies_rate": 1000},
        "b": {"neighbour_copies_mib": 4, "neighbour_copies_rate": RATE},
    }
    with cluster(native_dir, 2, devices=DEVICES, of_each=of_each) as made:
        yield made


@pytest.fixture
def two(keeping: list[RankNode]) -> Iterator[list[RankNode]]:
    yield from usable(keeping)


def standing(nodes: list[RankNode], folder: Path) -> Ranks:
    ranks = Ranks(nodes, 2, folder, "replicas", 0, OWN, HOLD)
    until_rest(nodes[1], ranks, folder)
    return ranks


def until_rest(node: RankNode, ranks: Ranks, folder: Path) -> None:
    """All wait in the middle. Those of this node have a snapshot of all that they have, and no more are to come."""
    harness.wait_until(lambda: all((folder / f"holds.{rank}").exists() for rank in range(4)), "all stand still", 60)
    number, since = -1, 0.0

    def rests() -> bool:
        nonlocal number, since
        rows = of(node, ranks)
        now = sum(row["snapshots"] or 0 for row in rows)
        if now != number or not have_all(rows):
            number, since = now, time.monotonic()
        # One that was given up is tried again within two seconds, or once more.
        return time.monotonic() - since > 6

    harness.wait_until(rests, "no more snapshots", 60)


def have_all(rows: list[dict[str, Any]]) -> bool:
    """Their snapshots, of what they have."""
    return bool(rows) and all((row["live_bytes"] or 0) >= (8 + OWN) << 20 for row in rows)


def survive(node: RankNode, ranks: Ranks) -> bool:
    """All of the node's ranks, the loss of their devices."""
    rows = of(node, ranks)
    return len(rows) == 2 and all(row["survives_device_loss"] for row in rows)


def until_survive(node: RankNode, ranks: Ranks) -> None:
    try:
        harness.wait_until(lambda: survive(node, ranks), "they would survive", 60)
    except AssertionError as error:
        raise AssertionError(f"{error}: {of(node, ranks)}") from None


def goes_on(ranks: Ranks, folder: Path) -> None:
    (folder / "go").touch()
    recovered(ranks)
    enough(folder)
    end(ranks)
    assert all(one.process.returncode == 0 for one in ranks.programs)


def test_the_own_node_has_a_copy(native_dir: Path, tmp_path: Path) -> None:
    """Its one device is lost: what each rank alone had comes from host memory there, and from the other node what its
    ranks have, too. So that was not copied."""
    with cluster(native_dir, 2, devices="cpu:0", replica_copies_mib=1024) as two:
        ranks = standing(two, tmp_path)
        for one in two:
            until_survive(one, ranks)
            assert all(OWN << 20 <= row["replica_copy_bytes"] < (OWN + 6) << 20 for row in of(one, ranks))
            assert all(row["neighbour"] is None for row in of(one, ranks))
        lose(two[1], "cpu:0")
        goes_on(ranks, tmp_path)
        assert came(two[1]) >= 2 * 8
        assert two[1].log.read_text().count("were copied from host memory") == 2


def test_the_next_node_has_a_copy(two: list[RankNode], tmp_path: Path) -> None:
    """And not more than may be sent was sent at any time."""
    holder, losing = two
    ranks = Ranks(two, 2, tmp_path, "replicas", 0, OWN, HOLD)

    def sent() -> int:
        return sum(row["neighbour_sent_bytes"] or 0 for row in of(losing, ranks))

    began, before = time.monotonic(), sent()
    seen: set[int] = set()

    def all_survive() -> bool:
        now = sent()
        # The rate over the time since, and one request.
        assert now - before <= RATE * (1 << 20) * (time.monotonic() - began) + 3 * CHUNK
        seen.add(now)
        return have_all(of(losing, ranks)) and survive(losing, ranks)

    harness.wait_until(all_survive, "they would survive", 60)
    until_rest(losing, ranks, tmp_path)
    until_survive(losing, ranks)
    assert max(seen) - before >= 2 * OWN << 20
    rows = of(losing, ranks)
    assert all((row["neighbour"], row["neighbour_why"], row["neighbour_behind_bytes"]) == ("a", "", 0) for row in rows)
    assert all(OWN << 20 <= row["neighbour_copy_bytes"] < (OWN + 6) << 20 for row in rows)
    assert all(row["replica_copy_bytes"] == 0 for row in rows)
    before_loss = came(losing)
    lose_all(losing, ranks)
    goes_on(ranks, tmp_path)
    assert came(losing) >= before_loss + 2 * OWN
    # The ranks have ended: nothing of them is kept.
    harness.wait_until(lambda: not retained_by(holder), "nothing is retained")


def test_what_ranks_have_taken_alone(two: list[RankNode], tmp_path: Path) -> None:
    """Snapshots since the last one of all, with no collective in between: the next node gets what is new in them."""
    _, losing = two
    ranks = Ranks(two, 2, tmp_path, "replicas", 0, OWN, HOLD, ALONE="1")
    until_rest(losing, ranks, tmp_path)
    until_survive(losing, ranks)
    before = {row["id"]: row["snapshots"] for row in of(losing, ranks)}
    (tmp_path / "alone").touch()
    harness.wait_until(lambda: all((tmp_path / f"alone.{rank}").exists() for rank in range(4)), "all have done it")
    harness.wait_until(
        lambda: all(row["snapshots"] > before[row["id"]] for row in of(losing, ranks)), "each has a snapshot of it"
    )
    until_rest(losing, ranks, tmp_path)
    until_survive(losing, ranks)
    lose_all(losing, ranks)
    goes_on(ranks, tmp_path)


def retained_by(node: RankNode) -> list[Path]:
    """Memory that the node's daemon keeps of others."""
    assert node.process is not None
    found = []
    for one in Path(f"/proc/{node.process.pid}/fd").iterdir():
        try:
            if "xmig-retained" in str(one.readlink()):
                found.append(one)
        except FileNotFoundError:
            continue
    return found


def test_the_next_node_has_something_wrong(two: list[RankNode], tmp_path: Path) -> None:
    holder, losing = two
    ranks = standing(two, tmp_path)
    until_survive(losing, ranks)
    harness.wait_until(lambda: len(retained_by(holder)) == 2, "nothing of an earlier test's ranks is retained")
    memories = retained_by(holder)
    for one in memories:
        with one.open("r+b", buffering=0) as memory:
            for at in range(0, one.stat().st_size, CHUNK):
                memory.seek(at)
                memory.write(b"\x55" * 100)
    lose_all(losing, ranks)
    (tmp_path / "go").touch()
    end(ranks, NOBODY)
    assert all(one.process.returncode != 0 for one in ranks.programs)
    assert "they are not used" in losing.log.read_text()


def test_the_next_node_has_no_room(two: list[RankNode], tmp_path: Path) -> None:
    losing, _ = two
    ranks = standing(two, tmp_path)

    def are_refused() -> bool:
        return all("room for" in (row["neighbour_why"] or "") for row in of(losing, ranks))

    harness.wait_until(are_refused, f"there is no room: {of(losing, ranks)}", 60)
    rows = of(losing, ranks)
    assert all(row["survives_device_loss"] is False for row in rows)
    assert all(row["neighbour_copy_bytes"] == 0 and row["neighbour_behind_bytes"] >= OWN << 20 for row in rows)
    lose_all(losing, ranks)
    (tmp_path / "go").touch()
    end(ranks, NOBODY)
    assert all(one.process.returncode != 0 for one in ranks.programs)


@pytest.mark.parametrize("what", ["daemon", "connection"])
def test_something_fails_while_it_is_sent(two: list[RankNode], tmp_path: Path, what: str) -> None:
    """What the next node has then is all there."""
    holder, losing = two
    holder.network.slow(SLOW)

    def is_sent() -> bool:
        rows = of(losing, ranks)
        behind, sent = (any(row[f"neighbour_{what}_bytes"] for row in rows) for what in ("behind", "sent"))
        return have_all(rows) and behind and sent

    try:
        ranks = Ranks(two, 2, tmp_path, "replicas", 0, OWN, HOLD)
        harness.wait_until(is_sent, "it is sent", 60)
        if what == "connection":
            with losing.network.unplugged():
                losing.until(holder.name, "unreachable")
        else:
            holder.kill()
            holder.start()
    finally:
        holder.network.fast()
    until_rest(losing, ranks, tmp_path)
    until_survive(losing, ranks)
    lose_all(losing, ranks)
    goes_on(ranks, tmp_path)


def test_the_daemon_that_sent_it_is_another_one(two: list[RankNode], tmp_path: Path) -> None:
    """It does not know what the next node has, and requests it all the same."""
    _, losing = two
    ranks = standing(two, tmp_path)
    until_survive(losing, ranks)
    losing.kill()
    losing.start()
    ranks.until_all_run()
    before = came(losing)
    lose_all(losing, ranks)
    goes_on(ranks, tmp_path)
    assert came(losing) >= before + 2 * OWN


def recovered_or_failed(ranks: Ranks) -> None:
    harness.wait_until(
        lambda: any(one.process.poll() is not None for one in ranks.programs) or ranks.recoveries() >= 1,
        "they are recovered, or have ended", 60,
    )  # fmt: skip


def test_what_changes_meanwhile(two: list[RankNode], tmp_path: Path) -> None:
    """The next node has something of an earlier round, which is never used; and a server that it reads from is lost."""
    ranks, losing = begun(two, tmp_path, 0, OWN), two[1]
    harness.wait_until(lambda: all(row["neighbour_sent_bytes"] for row in of(losing, ranks)), "something is sent", 60)
    kill(of(losing, ranks)[0]["server_pid"])
    lose_all(losing, ranks)
    recovered_or_failed(ranks)
    enough(tmp_path)
    end(ranks, NOBODY, IN_A_SNAPSHOT)
