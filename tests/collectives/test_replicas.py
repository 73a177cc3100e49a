"""A rank's device is lost with its memory: what it had comes from the other ranks.

Nothing of it is seen in what they compute."""

from __future__ import annotations

import random
import re
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.collectives.conftest import PROGRAMS, Launch, enough, lines_of
from tests.collectives.test_lost_ranks import logs
from tests.collectives.test_steps import kill
from xmigd.demo.node import Node, Program

RANKS = 3
DEVICES = [f"cpu:{number}" for number in range(RANKS + 1)]
DONE = [f"{rank}: done" for rank in range(RANKS)]
SHADOWS = 0x4000_0000_0000 + 0x1B7_5C00_0000 + (1 << 38)  # journal::kShadowBase
COPIED = "that were lost with a device were copied"
BROUGHT = "what a copy from page-locked memory has brought"
NOBODY = "are in the memory of no other rank"
IN_A_SNAPSHOT = "while a snapshot was being taken"


@pytest.fixture(scope="module")
def node(native_dir: Path) -> Iterator[Node]:
    """A device for each rank, and one more."""
    with harness.own_node(native_dir, devices=",".join(DEVICES), port=-1) as node:
        yield node


@pytest.fixture(autouse=True)
def every_device(node: Node) -> Iterator[None]:
    """Is used again after each test."""
    yield
    for device in DEVICES:
        use_again(node, device)


def use_again(node: Node, device: str) -> None:
    _, tag = node.client.get_tagged(f"/v1/devices/{device}")
    node.client.patch(f"/v1/devices/{device}", {"cordoned": False}, tag)


NO_SNAPSHOTS = 0.5  # seconds without one: they stand still


def lose(node: Node, *devices: str) -> None:
    """All at once, right behind a snapshot of their processes, if they take any: from the decision for one until it is
    whole, its state is on that device alone, and is lost with it (decision 0048)."""

    def snapshots() -> dict[str, int]:
        listed = node.client.get("/v1/processes")
        return {one["id"]: one["snapshots"] or 0 for one in listed if set(devices) & set(one["device"].split(","))}

    def have_one_more() -> bool:
        now = snapshots()  # a server that has just got its process counts from the snapshot before
        return all(now.get(name, 0) > number for name, number in before.items())

    before, end = snapshots(), time.monotonic() + NO_SNAPSHOTS
    while not have_one_more() and time.monotonic() < end:
        time.sleep(0.001)
    for device in devices:
        node.client.post(f"/v1/devices/{device}:lose", {"reason": "it is a test"})


def ranks_of(node: Node, program: Program, folder: Path) -> list[dict[str, Any]]:
    """By their ranks; those that the daemon knows."""
    pids = [int((folder / f"pid.{rank}").read_text()) for rank in range(RANKS)]
    found = {one["pid"]: one for one in node.client.get("/v1/processes", job=program.job)}
    return [found[pid] for pid in pids if pid in found]


def are_there(folder: Path, name: str) -> None:
    harness.wait_until(lambda: all((folder / f"{name}.{rank}").exists() for rank in range(RANKS)), f"all ranks: {name}")


def began(node: Node, program: Program, folder: Path) -> None:
    """And have the second snapshot since."""
    are_there(folder, "began")
    harness.wait_until(partial(all_run, node, program, folder), "all run")
    before = max(one["snapshots"] or 0 for one in ranks_of(node, program, folder))

    def two_more() -> bool:
        return all_run(node, program, folder) and all(
            one["snapshots"] >= before + 2 for one in ranks_of(node, program, folder)
        )

    harness.wait_until(two_more, "snapshots")


def all_run(node: Node, program: Program, folder: Path, recoveries: int = 0) -> bool:
    """And each has been recovered so often."""
    assert program.process.poll() is None, "they have ended: " + "\n".join(map(str, program.lines()))
    ranks = ranks_of(node, program, folder)
    return len(ranks) == RANKS and all(one["state"] == "running" and one["recoveries"] >= recoveries for one in ranks)


def run_or_failed(node: Node, program: Program, folder: Path, recoveries: int = 0) -> bool:
    """For a test in which they may end in an error: it decides when they end well."""
    return program.process.poll() is not None or all_run(node, program, folder, recoveries)


def stand_still(node: Node, program: Program, folder: Path) -> None:
    """With a snapshot of all that they have."""
    are_there(folder, "holds")
    harness.wait_until(
        lambda: all((one["live_bytes"] or 0) >= 8 << 20 for one in ranks_of(node, program, folder)), "a snapshot"
    )
    number, since = -1, 0.0

    def rests() -> bool:
        nonlocal number, since
        now = sum(one["snapshots"] or 0 for one in ranks_of(node, program, folder))
        if now != number:
            number, since = now, time.monotonic()
        return time.monotonic() - since > 0.6

    harness.wait_until(rests, "no more snapshots")


def overwrite(server: int) -> None:
    """Everything in its shadow."""
    with Path(f"/proc/{server}/mem").open("r+b", buffering=0) as memory:
        for line in Path(f"/proc/{server}/maps").read_text().splitlines():
            first, last = (int(part, 16) for part in re.split("[- ]", line)[:2])
            if first >= SHADOWS and "xmig-device-memory" in line:
                memory.seek(first)
                memory.write(b"\x55" * (last - first))


def ended_in_an_error(program: Program) -> None:
    """Each rank, clearly, and none with what is wrong."""
    out, _ = program.process.communicate(timeout=60)
    assert program.process.returncode != 0
    assert "not as expected: the state" not in out, out
    assert "done" not in out


def test_a_device_is_lost(node: Node, launch: Launch, tmp_path: Path) -> None:
    """Its rank goes on elsewhere, with what the others have; again and again."""
    program = launch("replicas", RANKS, 0)
    began(node, program, tmp_path)
    for count in range(1, 4):
        victim = ranks_of(node, program, tmp_path)[count % RANKS]
        lose(node, victim["device"])
        harness.wait_until(partial(all_run, node, program, tmp_path, count), "all go on")
        assert ranks_of(node, program, tmp_path)[count % RANKS]["device"] != victim["device"]
        use_again(node, victim["device"])
    enough(tmp_path)
    assert lines_of(program, timeout=60) == DONE
    assert node.log.read_text().count(COPIED) >= 3


def test_others_can_be_lost_at_once(node: Node, launch: Launch, tmp_path: Path) -> None:
    """Before the next snapshot: the rank that has got its memory back has all of the last one."""
    program = launch("replicas", RANKS, 100, 0, 60)
    stand_still(node, program, tmp_path)
    victim = ranks_of(node, program, tmp_path)[1]
    assert victim["shadow_bytes"] >= 8 << 20
    lose(node, victim["device"])
    harness.wait_until(partial(all_run, node, program, tmp_path, 1), "all go on")
    ranks = ranks_of(node, program, tmp_path)
    assert ranks[1]["shadow_bytes"] >= 8 << 20
    use_again(node, victim["device"])
    for number in (0, 2):
        lose(node, ranks[number]["device"])
    (tmp_path / "go").touch()
    assert lines_of(program, timeout=60) == DONE
    assert "MiB of the shadow were made again" in node.log.read_text()


def test_two_devices_are_lost(node: Node, launch: Launch, tmp_path: Path) -> None:
    """What both ranks had, the third one has."""
    program = launch("replicas", RANKS, 0)
    began(node, program, tmp_path)
    lose(node, *(one["device"] for one in ranks_of(node, program, tmp_path)[1:]))
    harness.wait_until(partial(all_run, node, program, tmp_path, 1), "all go on")
    enough(tmp_path)
    assert lines_of(program, timeout=60) == DONE


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(4))
def test_lost_in_a_recovery(node: Node, launch: Launch, tmp_path: Path, seed: int) -> None:
    """Servers are killed before and after: the rank's new one, and those of ranks whose shadows are copied from."""
    chance = random.Random(seed)
    program = launch("replicas", RANKS, 0)
    began(node, program, tmp_path)
    for _ in range(3):
        harness.wait_until(partial(run_or_failed, node, program, tmp_path), "all ranks run")
        if program.process.poll() is not None:
            break
        ranks = ranks_of(node, program, tmp_path)
        kill(*[chance.choice(ranks)["server_pid"]][: chance.randrange(2)])
        time.sleep(chance.uniform(0, 0.08))
        victim = chance.choice(ranks)
        lose(node, victim["device"])
        for _ in range(chance.randrange(3)):
            time.sleep(chance.uniform(0, 0.08))
            kill(chance.choice([one["server_pid"] for one in ranks_of(node, program, tmp_path)]))
        use_again(node, victim["device"])
    enough(tmp_path)
    ends_well_or_in(program, IN_A_SNAPSHOT)


def ends_well_or_in(program: Program, *errors: str) -> None:
    """A device that is lost in the moment between the decision of a snapshot and its end takes the state with it."""
    out, _ = program.process.communicate(timeout=60)
    assert "not as expected: the state" not in out, out
    if program.process.returncode == 0:
        assert [line for line in out.splitlines() if " ended with " not in line] == DONE
    else:
        lines = "\n".join(map(str, program.lines()))
        assert any(error in lines for error in errors), out + lines


@pytest.mark.parametrize("decided", [False, True])
def test_lost_in_a_round(node: Node, launch: Launch, tmp_path: Path, decided: bool) -> None:
    program = launch("replicas", RANKS, 0)
    began(node, program, tmp_path)
    victim = ranks_of(node, program, tmp_path)[1]
    if decided:
        fault = {"kind": "kill", "point": "snapshot", "sequence": 1, "process": victim["id"]}
        node.client.post(f"/v1/jobs/{program.job}/faults:inject", fault)
        harness.wait_until(lambda: not Path(f"/proc/{victim['server_pid']}").exists(), "it has been killed")
    else:
        harness.stop(victim["server_pid"])
        time.sleep(0.4)  # the others stop for a round
    lose(node, victim["device"])
    harness.wait_until(partial(run_or_failed, node, program, tmp_path, 1), "all go on")
    enough(tmp_path)
    ends_well_or_in(program, IN_A_SNAPSHOT)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(4))
def test_the_daemon_is_killed_meanwhile(node: Node, launch: Launch, tmp_path: Path, seed: int) -> None:
    program = launch("replicas", RANKS, 0)
    began(node, program, tmp_path)
    before = ranks_of(node, program, tmp_path)
    lose(node, before[seed % RANKS]["device"])
    time.sleep(0.03 * seed)
    node.kill()
    node.start()
    harness.found_again(node)

    def have_other_servers() -> bool:
        """The daemon may have been killed before it had written that it recovers them."""
        now = {one["server_pid"] for one in ranks_of(node, program, tmp_path)}
        return len(now) == RANKS and now.isdisjoint(one["server_pid"] for one in before)

    harness.wait_until(
        lambda: run_or_failed(node, program, tmp_path) and (program.process.poll() is not None or have_other_servers()),
        "all go on",
    )
    enough(tmp_path)
    ends_well_or_in(program, IN_A_SNAPSHOT)


@pytest.mark.parametrize("wrong", [1, 2])
def test_what_others_have_is_wrong(node: Node, launch: Launch, tmp_path: Path, wrong: int) -> None:
    """It is not used: another rank's is, and if there is none, the ranks end."""
    program = launch("replicas", RANKS, 100, 0, 0)  # a replay only writes again what they begin with
    stand_still(node, program, tmp_path)
    ranks = ranks_of(node, program, tmp_path)
    for one in sorted(ranks[:2], key=lambda one: str(one["id"]))[:wrong]:  # in the order in which they are looked at
        overwrite(one["server_pid"])
    before = node.log.read_text().count("they are not used")
    lose(node, ranks[2]["device"])
    # Until then nobody goes on: who does takes a snapshot of its own soon, and its shadow is right again.
    harness.wait_until(lambda: node.log.read_text().count("they are not used") > before, "what is wrong is found")
    (tmp_path / "go").touch()
    if wrong == 1:
        assert lines_of(program, timeout=60) == DONE
    else:
        ended_in_an_error(program)
        logs(program, NOBODY)


def test_what_nobody_else_has(node: Node, launch: Launch, tmp_path: Path) -> None:
    program = launch("replicas", RANKS, 0, 4)
    began(node, program, tmp_path)
    lose(node, ranks_of(node, program, tmp_path)[0]["device"])
    ended_in_an_error(program)
    logs(program, NOBODY)


def snapshots_of(node: Node, program: Program) -> list[dict[str, Any]]:
    """That were taken, newest first."""
    found = node.client.get(f"/v1/jobs/{program.job}/ranks", together=100)["snapshots"]
    return [one for one in found if one["outcome"] == "taken"]


def test_ranks_stop_behind_the_same_collective(node: Node, launch: Launch, tmp_path: Path) -> None:
    """As a rule, however busy the machine is. Where each stops at once they are in four rounds of ten: nine of twelve
    rounds are then found in one of a hundred runs. A machine that stands for some seconds can cost three rounds, after
    which ranks stop at once in the next thirteen; so it may be in the second or third dozen."""
    program = launch("replicas", RANKS, 0, BEHIND="1")
    began(node, program, tmp_path)
    for dozen in (1, 2, 3):
        wanted = 12 * dozen
        harness.wait_until(lambda: len(snapshots_of(node, program)) >= wanted, "snapshots", timeout=120)  # noqa: B023
        same = [one["same_place"] for one in snapshots_of(node, program)]
        if sum(same[:12]) >= 9:  # the newest come first
            break
    enough(tmp_path)
    assert lines_of(program, timeout=60) == DONE
    assert None not in same
    assert sum(same[:12]) >= 9, same


def test_what_is_changed_behind_a_collective(node: Node, launch: Launch, tmp_path: Path) -> None:
    """Is equal in all ranks, too, where they stop: the loss of a device needs no copies."""
    for _ in range(4):
        program = launch("replicas", RANKS, 0, BEHIND="1")
        began(node, program, tmp_path)
        harness.wait_until(lambda: snapshots_of(node, program)[0]["same_place"], "all stood at the same place")  # noqa: B023
        victim = ranks_of(node, program, tmp_path)[1]
        lose(node, victim["device"])
        harness.wait_until(partial(run_or_failed, node, program, tmp_path, 1), "all go on")
        use_again(node, victim["device"])
        survived = program.process.poll() is None
        enough(tmp_path)
        ends_well_or_in(program, IN_A_SNAPSHOT, NOBODY)  # the round that followed may have been at different places
        if survived:
            return
        for file in tmp_path.iterdir():
            file.unlink()
    raise AssertionError("of four ranks that lost their devices none went on")


@pytest.fixture(scope="module")
def copying(native_dir: Path) -> Iterator[Node]:
    """What only one device has is copied to host memory."""
    with harness.own_node(native_dir, devices=",".join(DEVICES), port=-1, replica_copies_mib=1024) as node:
        yield node


def ranks_with_own(node: Node, folder: Path, *arguments: object, **environment: str) -> Program:
    begin: list[str | Path] = [sys.executable, PROGRAMS / "launch.py", str(RANKS), folder, PROGRAMS / "replicas.py"]
    return node.program([*begin, *map(str, arguments)], name="replicas", environment=environment)


def survive(node: Node, program: Program, folder: Path) -> bool:
    ranks = ranks_of(node, program, folder)
    return len(ranks) == RANKS and all(one["survives_device_loss"] for one in ranks)


def survive_or_failed(node: Node, program: Program, folder: Path) -> bool:
    return program.process.poll() is not None or survive(node, program, folder)


def test_what_nobody_else_has_was_copied(copying: Node, tmp_path: Path) -> None:
    """The rank goes on with it."""
    program = ranks_with_own(copying, tmp_path, 0, 6, 60)
    stand_still(copying, program, tmp_path)
    harness.wait_until(partial(survive, copying, program, tmp_path), "all could lose their devices")
    victim = ranks_of(copying, program, tmp_path)[1]
    assert 6 << 20 <= victim["replica_copy_bytes"] < 12 << 20
    lose(copying, victim["device"])
    (tmp_path / "go").touch()
    harness.wait_until(lambda: ranks_of(copying, program, tmp_path)[1]["recoveries"] == 1, "it goes on")
    use_again(copying, victim["device"])
    enough(tmp_path)
    assert lines_of(program, timeout=60) == DONE
    assert "were copied from host memory" in copying.log.read_text()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(3))
def test_what_nobody_else_has_is_copied_meanwhile(copying: Node, tmp_path: Path, seed: int) -> None:
    """A device is lost when its rank would survive, or at any time; and then never with wrong data."""
    chance = random.Random(seed)
    program = ranks_with_own(copying, tmp_path, 0, 6)
    began(copying, program, tmp_path)
    for _ in range(2):
        harness.wait_until(partial(survive_or_failed, copying, program, tmp_path), "all would survive")
        if program.process.poll() is not None:
            break
        time.sleep(chance.choice([0, 0, 0.1]))
        ranks = ranks_of(copying, program, tmp_path)
        victim = chance.choice(ranks)
        lose(copying, victim["device"])
        if chance.random() < 0.5:
            time.sleep(chance.uniform(0, 0.1))
            kill(*[one["server_pid"] for one in ranks_of(copying, program, tmp_path)[:1]])
        use_again(copying, victim["device"])
    enough(tmp_path)
    ends_well_or_in(program, IN_A_SNAPSHOT, NOBODY)


def test_copies_do_not_take_more_than_they_may(native_dir: Path, tmp_path: Path) -> None:
    with harness.own_node(native_dir, devices=",".join(DEVICES), port=-1, replica_copies_mib=6) as node:
        program = ranks_with_own(node, tmp_path, 60, 6, 40)
        stand_still(node, program, tmp_path)
        harness.wait_until(
            lambda: all(one["survives_device_loss"] is False for one in ranks_of(node, program, tmp_path)), "none would"
        )
        assert all(one["replica_copy_bytes"] == 0 for one in ranks_of(node, program, tmp_path))
        (tmp_path / "go").touch()
        assert lines_of(program, timeout=60) == DONE


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(4))
def test_what_page_locked_memory_brought(copying: Node, tmp_path: Path, seed: int) -> None:
    """Since the last snapshot: the program has written over it long ago."""
    program = ranks_with_own(copying, tmp_path, 0, LOADER="1")
    began(copying, program, tmp_path)
    for count in range(1, 4):
        harness.wait_until(partial(survive_or_failed, copying, program, tmp_path), "all could lose their devices")
        if program.process.poll() is not None:
            break
        victim = ranks_of(copying, program, tmp_path)[(seed + count) % RANKS]
        lose(copying, victim["device"])
        harness.wait_until(partial(run_or_failed, copying, program, tmp_path, count), "all go on")
        use_again(copying, victim["device"])
    enough(tmp_path)
    # Each rank has something of its own, whose copy may not be complete when the device is lost.
    ends_well_or_in(program, IN_A_SNAPSHOT, NOBODY)
    assert BROUGHT not in "\n".join(map(str, program.lines()))
