"""Jobs with ranks on several nodes are suspended and resumed as one, requested on any of the nodes, whatever becomes of
a daemon or the network in the middle: all ranks are suspended, or all run."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.collectives.conftest import enough
from tests.collectives.nodes import RankNode, Ranks, cluster, kill, killed_and_found_again
from tests.collectives.test_nodes import begun, done, take_snapshots
from tests.migration.moves import ended, reaches, refusal, succeeded
from tests.namespaces import needs_networks
from xmigd.client import Refused

pytestmark = needs_networks

PHASES = {
    "suspend": ["preparing", "handing_over", "keeping", "releasing"], "resume": ["preparing", "committing", "taking"],
}  # fmt: skip


def begin(ranks: Ranks, which: int, verb: str, **body: Any) -> dict[str, Any]:
    """Requested on one of the nodes."""
    found: dict[str, Any] = ranks.nodes[which].client.post(f"/v1/jobs/{ranks.programs[which].job}:{verb}", body)
    return found


def states(ranks: Ranks) -> list[str]:
    return sorted(row["state"] for _, row in ranks.processes())


def does(ranks: Ranks, which: int, verb: str, **body: Any) -> dict[str, Any]:
    """With all others."""
    operation = succeeded(ranks.nodes[which], begin(ranks, which, verb, **body))
    wanted = "suspended" if verb == "suspend" else "running"
    harness.wait_until(lambda: states(ranks) == [wanted] * ranks.count, f"all are {wanted}: {states(ranks)}")
    return operation


def settled(ranks: Ranks) -> str:
    """All run, or all are suspended."""

    def is_settled() -> bool:
        assert all(one.process.poll() is None for one in ranks.programs), ranks.output()
        found = states(ranks)
        return len(found) == ranks.count and set(found) in ({"running"}, {"suspended"}) and not under_way(ranks)

    harness.wait_until(is_settled, f"all ranks do the same: {[row for _, row in ranks.processes()]}", 240)
    return states(ranks)[0]


def under_way(ranks: Ranks) -> list[dict[str, Any]]:
    return [row for one in ranks.nodes for row in one.client.get("/v1/operations", state="running")]


def check_asleep(ranks: Ranks) -> None:
    """No server of it is left, nothing on a device."""
    assert states(ranks) == ["suspended"] * ranks.count
    for one in ranks.nodes:
        harness.wait_until(lambda one=one: harness.server_pids(one) == [], "no server is left")  # type: ignore[misc]
    assert all(row["location"] in ("host", "file") for _, row in ranks.processes())


def resumed_and_done(ranks: Ranks, folder: Path, which: int = 0) -> None:
    """Whatever it does now, and all that it has computed is right."""
    if settled(ranks) == "suspended":
        does(ranks, which, "resume")
    enough(folder)
    assert ranks.lines() == done(ranks)


@pytest.mark.parametrize("to", ["host", "file"])
def test_on_each_node(two: list[RankNode], tmp_path: Path, to: str) -> None:
    """Who leads, and who follows, for both."""
    ranks = Ranks(two, 2, tmp_path, "steps", 0)
    begun(ranks, tmp_path)
    for suspends, resumes in ((0, 0), (1, 1), (0, 1), (1, 0)):
        result = does(ranks, suspends, "suspend", to=to)["result"]
        assert (len(result["ranks"]), result["process_location"]) == (2, to)
        check_asleep(ranks)
        result = does(ranks, resumes, "resume", devices=["cpu:1", "cpu:0"])["result"]
        assert len(result["ranks"]) == 2
        time.sleep(0.1)
    take_snapshots(ranks)
    enough(tmp_path)
    assert ranks.lines() == done(ranks)
    assert ranks.recoveries() == 0


def test_many_times(two: list[RankNode], tmp_path: Path) -> None:
    """Requested on both at once, too: it is one."""
    chance = random.Random(1)
    ranks = Ranks(two, 2, tmp_path, "steps", 0, SPLIT_EVERY="5")
    begun(ranks, tmp_path)
    for _ in range(6):
        time.sleep(chance.uniform(0, 0.15))
        for verb in ("suspend", "resume"):
            operations = []
            for which in chance.choice([(0, 1), (1, 0), (0,), (1,)]):
                with contextlib.suppress(Refused):  # the other one was first, and it is under way, or done
                    operations.append((which, begin(ranks, which, verb)))
            for which, operation in operations:
                succeeded(two[which], operation)
            assert settled(ranks) == ("suspended" if verb == "suspend" else "running")
    enough(tmp_path)
    assert ranks.lines() == done(ranks)
    assert ranks.recoveries() == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(3))
def test_servers_are_killed_meanwhile(two: list[RankNode], tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    ranks = Ranks(two, 2, tmp_path, "steps", 0)
    begun(ranks, tmp_path)
    for _ in range(4):
        verb, which = "suspend" if settled(ranks) == "running" else "resume", chance.randrange(2)
        operation = reaches(two[which], begin(ranks, which, verb), chance.choice(PHASES[verb]))
        time.sleep(chance.uniform(0, 0.03))
        servers = [pid for one in two for pid in harness.server_pids(one)]
        kill(*chance.sample(servers, min(len(servers), chance.choice([1, 1, 3]))))
        assert ended(two[which], operation)["state"] in ("succeeded", "failed")
    resumed_and_done(ranks, tmp_path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("verb", ["suspend", "resume"])
@pytest.mark.parametrize("killed", [0, 1], ids=["leads", "follows"])
@pytest.mark.parametrize("seed", range(2))
def test_a_daemon_is_killed_meanwhile(
    two: list[RankNode], tmp_path: Path, killed: int, verb: str, seed: int
) -> None:  # fmt: skip
    """At any moment, whichever node it was requested on."""
    chance = random.Random(f"{verb}{killed}{seed}")
    ranks = Ranks(two, 2, tmp_path, "steps", 0)
    begun(ranks, tmp_path)
    for _ in range(2):
        if verb == "resume":
            does(ranks, chance.randrange(2), "suspend")
        which = chance.randrange(2)
        reaches(two[which], begin(ranks, which, verb), chance.choice(PHASES[verb]))
        time.sleep(chance.uniform(0, 0.03))
        killed_and_found_again(two, killed)
        if settled(ranks) == "suspended":
            does(ranks, which, "resume")
    resumed_and_done(ranks, tmp_path)


@pytest.mark.parametrize("killed", [(0,), (1,), (0, 1)], ids=["leads", "follows", "both"])
def test_a_daemon_is_killed_while_it_is_suspended(
    two: list[RankNode], tmp_path: Path, killed: tuple[int, ...]
) -> None:  # fmt: skip
    ranks = Ranks(two, 2, tmp_path, "steps", 0)
    begun(ranks, tmp_path)
    does(ranks, 1, "suspend")
    for which in killed:
        two[which].kill()
    for which in killed:
        two[which].start()
        harness.found_again(two[which])
    two[0].until("b", "connected")
    two[1].until("a", "connected")
    check_asleep(ranks)
    does(ranks, killed[0], "resume")
    resumed_and_done(ranks, tmp_path)
    assert ranks.recoveries() == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("verb", ["suspend", "resume"])
@pytest.mark.parametrize("seed", range(2))
def test_the_network_is_interrupted_meanwhile(two: list[RankNode], tmp_path: Path, verb: str, seed: int) -> None:
    """For a moment: what is on its way arrives, and it is done, or is not."""
    chance = random.Random(f"{verb}{seed}")
    # Without splits: whoever makes a communicator has no connection yet, and waits for a minute.
    ranks = Ranks(two, 2, tmp_path, "steps", 0, SPLIT_EVERY=str(1 << 30))
    begun(ranks, tmp_path)
    for _ in range(2):
        if verb == "resume":
            does(ranks, chance.randrange(2), "suspend")
        which = chance.randrange(2)
        operation = reaches(two[which], begin(ranks, which, verb), chance.choice(PHASES[verb]))
        time.sleep(chance.uniform(0, 0.03))
        with two[1].network.unplugged():
            time.sleep(chance.uniform(0.1, 3))
        assert ended(two[which], operation)["state"] in ("succeeded", "failed")
        if settled(ranks) == "suspended":
            does(ranks, which, "resume")
    resumed_and_done(ranks, tmp_path)


@pytest.fixture(scope="module")
def impatient(native_dir: Path) -> Iterator[list[RankNode]]:
    with cluster(native_dir, 2, recovery_timeout=3, device_memory=128 << 20) as made:
        yield made


def waiting(impatient: list[RankNode], folder: Path, how: str, **environment: Any) -> Ranks:
    """One rank on each node, which stand in a certain place (programs/suspended.py)."""
    for one, other in (impatient, impatient[::-1]):
        one.until(other.name, "connected")
    ranks = Ranks(impatient, 1, folder, "suspended", how, **{k: str(v) for k, v in environment.items()})
    begun(ranks, folder)
    time.sleep(0.2)
    return ranks


def of_waiting(ranks: Ranks) -> list[str]:
    return [f"{rank}: done" for rank in range(ranks.count)]


@pytest.mark.parametrize("which", [0, 1], ids=["leads", "follows"])
def test_a_node_is_not_in_reach_while_it_is_suspended(
    impatient: list[RankNode], tmp_path: Path, which: int
) -> None:  # fmt: skip
    """For too long: the error says who is not, and all run on. Before, it is refused."""
    ranks = waiting(impatient, tmp_path, "waits")
    here, other = impatient[which], impatient[1 - which]
    operation = begin(ranks, which, "suspend")
    harness.wait_until(lambda: len(under_way(ranks)) == 2, "both nodes have begun")
    assert {one["requestor"] for one in other.client.get("/v1/operations", state="running")} == {f"node {here.name}"}
    with impatient[1].network.unplugged():
        operation = ended(here, operation)
        assert operation["state"] == "failed"
        assert f"{other.name}" in operation["error"]["detail"]
        assert "has not been in reach for 3 s" in operation["error"]["detail"], f"{operation}"
        here.until(other.name, "unreachable")
        again = ended(here, begin(ranks, which, "suspend"))
        assert again["error"]["code"] == "peer_unreachable", f"{again}"
    assert settled(ranks) == "running"
    for one in impatient:
        one.until(impatient[1 - impatient.index(one)].name, "connected")
    (tmp_path / "come").touch()
    does(ranks, which, "suspend")
    check_asleep(ranks)
    does(ranks, 1 - which, "resume")
    (tmp_path / "end").touch()
    assert ranks.lines() == of_waiting(ranks)


def test_what_is_requested_twice_or_contradicts(impatient: list[RankNode], tmp_path: Path) -> None:
    """While it is under way, and afterwards; on the node where it was requested, and on the other one."""
    ranks = waiting(impatient, tmp_path, "waits")
    a, b = impatient
    operation = begin(ranks, 1, "suspend")
    harness.wait_until(lambda: len(under_way(ranks)) == 2, "both nodes have begun")
    for which, one in enumerate(impatient):
        for verb in ("suspend", "resume"):
            job = ranks.programs[which].job
            assert refusal(one, f"/v1/jobs/{job}:{verb}", {})["code"] in ("already_moving", "not_running")
    (tmp_path / "come").touch()
    succeeded(b, operation)
    assert settled(ranks) == "suspended"
    for which, one in enumerate(impatient):
        assert refusal(one, f"/v1/jobs/{ranks.programs[which].job}:suspend", {})["code"] == "suspended"
    does(ranks, 0, "resume")
    (tmp_path / "end").touch()
    assert ranks.lines() == of_waiting(ranks)
    assert a.client.get("/v1/operations", state="running") == []


def test_it_is_cancelled(impatient: list[RankNode], tmp_path: Path) -> None:
    """On one node: on the others it fails, and says why."""
    ranks = waiting(impatient, tmp_path, "waits")
    for which, one in enumerate(impatient):
        operation = begin(ranks, which, "suspend")
        harness.wait_until(lambda: len(under_way(ranks)) == 2, "both nodes have begun")
        others = impatient[1 - which].client.get("/v1/operations", state="running")[0]
        one.client.delete(f"/v1/operations/{operation['id']}")
        assert ended(one, operation)["state"] == "cancelled"
        failed = ended(impatient[1 - which], others)
        assert failed["state"] == "failed"
        # The second if it had just begun: then it waits for the one that was cancelled, for five seconds.
        whys = ("somebody cancelled it", "not all ranks of its group are to be suspended")
        assert any(why in failed["error"]["detail"] for why in whys), f"{failed}"
        assert settled(ranks) == "running"
    (tmp_path / "come").touch()
    (tmp_path / "end").touch()
    assert ranks.lines() == of_waiting(ranks)


@pytest.mark.parametrize("which", [0, 1], ids=["leads", "follows"])
def test_no_room_on_one_node(impatient: list[RankNode], tmp_path: Path, which: int) -> None:
    """All stay suspended, and the error has the reason, wherever it was requested."""
    ranks = waiting(impatient, tmp_path, "rests", LARGE_MIB=100)
    does(ranks, 0, "suspend")
    full = impatient[1]  # its rank has more
    restarted(full, impatient[0], 80 << 20)
    operation = ended(impatient[which], begin(ranks, which, "resume"))
    assert operation["state"] == "failed"
    assert operation["error"]["process_location"] == "host"
    assert "there is no memory for the" in operation["error"]["detail"], f"{operation}"
    assert settled(ranks) == "suspended"
    check_asleep(ranks)
    restarted(full, impatient[0], 128 << 20)
    does(ranks, which, "resume")
    (tmp_path / "come").touch()
    assert ranks.lines() == of_waiting(ranks)


def restarted(one: RankNode, other: RankNode, device_memory: int) -> None:
    one.kill()
    one.environment["XMIG_DEVICE_MEMORY"] = str(device_memory)
    one.start()
    harness.found_again(one)
    for here, there in ((one, other), (other, one)):
        here.until(there.name, "connected")


@pytest.mark.parametrize("victim", [0, 1], ids=["leads", "follows"])
def test_a_program_is_ended_while_it_is_suspended(two: list[RankNode], tmp_path: Path, victim: int) -> None:
    """The others go on without it, as far as they need it not."""
    ranks = Ranks(two, 2, tmp_path, "steps", 0)
    begun(ranks, tmp_path)
    does(ranks, 0, "suspend")
    os.kill(int((tmp_path / f"pid.{2 * victim}").read_text()), signal.SIGKILL)
    harness.wait_until(lambda: "ended" in states(ranks), "one has ended")
    operation = begin(ranks, 1 - victim, "resume")
    succeeded(two[1 - victim], operation)
    for one in ranks.programs:
        one.process.communicate(timeout=60)
    harness.wait_until(lambda: set(states(ranks)) <= {"ended", "lost"}, f"nobody waits: {states(ranks)}")


def test_preempted_and_continued(two: list[RankNode], tmp_path: Path) -> None:
    """On a node that does not lead."""
    ranks = Ranks(two, 2, tmp_path, "steps", 0)
    begun(ranks, tmp_path)
    result = succeeded(two[1], begin(ranks, 1, "preempt"))["result"]
    assert settled(ranks) == "suspended"
    assert (result["how"], result["process_location"]) == ("suspended", "host")
    check_asleep(ranks)
    does(ranks, 0, "continue")
    resumed_and_done(ranks, tmp_path)


def test_before_ranks_have_met(two: list[RankNode], tmp_path: Path) -> None:
    """Who belongs together is not known yet: suspending some would leave the others waiting for them."""
    ranks = Ranks(two, 2, tmp_path, "steps", 0, JOINS_LAST="1")
    harness.wait_until(lambda: states(ranks) == ["running"] * 4, "all are there")
    problem = refusal(two[0], f"/v1/jobs/{ranks.programs[0].job}:suspend", {})
    assert problem["code"] == "several_nodes", f"{problem}"
    (tmp_path / "may_join").touch()
    begun(ranks, tmp_path)
    does(ranks, 1, "suspend")
    resumed_and_done(ranks, tmp_path)
