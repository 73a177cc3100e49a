"""Jobs of several ranks that are suspended and resumed as one: nothing of it is seen in what they compute."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.collectives.conftest import PROGRAMS, Launch, enough, lines_of
from tests.collectives.test_steps import has_recovered, kill, ranks_of
from tests.migration.moves import ended, reaches, refusal, succeeded
from xmigd.client import Refused
from xmigd.demo.node import Node, Program


@pytest.fixture
def alone(native_dir: Path) -> Iterator[Node]:
    """A node of its own, with devices to spare."""
    with harness.own_node(native_dir, devices="cpu:0,cpu:1,cpu:2,cpu:3", port=-1) as node:
        yield node


def done(ranks: int) -> list[str]:
    return [f"{rank}: done" for rank in range(ranks)]


def begun(folder: Path, ranks: int) -> None:
    harness.wait_until(lambda: all((folder / f"began.{rank}").exists() for rank in range(ranks)), "all have begun")


def states(node: Node, program: Program) -> set[str]:
    return {one["state"] for one in ranks_of(node, program)}


def begin(node: Node, program: Program, verb: str, **body: Any) -> dict[str, Any]:
    operation: dict[str, Any] = node.client.post(f"/v1/jobs/{program.job}:{verb}", body)
    return operation


def does(node: Node, program: Program, verb: str, **body: Any) -> dict[str, Any]:
    return succeeded(node, begin(node, program, verb, **body))


def settled(node: Node, program: Program) -> str:
    """All run, or all are suspended."""

    def is_settled() -> bool:
        assert program.process.poll() is None, "they have ended"
        return states(node, program) in ({"running"}, {"suspended"})

    harness.wait_until(is_settled, "all ranks do the same")
    return min(states(node, program))


def check_asleep(node: Node, program: Program) -> None:
    """No server of it is left, nothing on a device, and it waits."""
    assert states(node, program) == {"suspended"}
    assert harness.server_pids(node) == []
    assert all(one["location"] in ("host", "file") for one in ranks_of(node, program))


@pytest.mark.parametrize(("ranks", "to"), [(2, "host"), (4, "host"), (4, "file")])
def test_suspended_and_resumed_here_and_elsewhere(
    node: Node, launch: Launch, tmp_path: Path, ranks: int, to: str
) -> None:
    """On their devices, on the other ones, all on one, and apart again."""
    program = launch("steps", ranks, 0)
    begun(tmp_path, ranks)
    for devices in ([], ["cpu:1", "cpu:0"], ["cpu:1"], ["cpu:0", "cpu:1"]):
        result = does(node, program, "suspend", to=to)["result"]
        assert (len(result["ranks"]), result["process_location"]) == (ranks, to)
        check_asleep(node, program)
        does(node, program, "resume", devices=devices)
        assert states(node, program) == {"running"}
        if devices:
            assert {one["device"] for one in ranks_of(node, program)} == set(devices)
        time.sleep(0.1)
    enough(tmp_path)
    assert lines_of(program, timeout=120) == done(ranks)
    assert all(one["recoveries"] == 0 for one in ranks_of(node, program))


def test_a_server_is_killed_after_a_resumption(node: Node, launch: Launch, tmp_path: Path) -> None:
    """They are a group again, with the snapshot that they were suspended at."""
    program = launch("steps", 4, 0)
    begun(tmp_path, 4)
    does(node, program, "suspend")
    does(node, program, "resume", devices=["cpu:1", "cpu:0"])
    kill(ranks_of(node, program)[2]["server_pid"])
    harness.wait_until(lambda: has_recovered(node, program, 1), "all have recovered")
    enough(tmp_path)
    assert lines_of(program, timeout=120) == done(4)
    assert all(one["recoveries"] == 1 for one in ranks_of(node, program))


def test_twenty_times_in_turn(node: Node, launch: Launch, tmp_path: Path) -> None:
    chance = random.Random(1)
    program = launch("steps", 4, 0, SPLIT_EVERY="5")
    begun(tmp_path, 4)
    for _ in range(20):
        time.sleep(chance.uniform(0, 0.15))
        does(node, program, "suspend")
        does(node, program, "resume", devices=chance.choice([[], ["cpu:0"], ["cpu:1"], ["cpu:1", "cpu:0"]]))
    enough(tmp_path)
    assert lines_of(program, timeout=60) == done(4)


def test_while_one_waits_in_a_collective(node: Node, launch: Launch, tmp_path: Path) -> None:
    """For another rank, whose program does something else. Nobody can stop behind a collective that has begun: they are
    suspended as soon as that is complete."""
    program = launch("suspended", 2, "waits")
    begun(tmp_path, 2)
    time.sleep(0.2)
    operation = begin(node, program, "suspend")
    time.sleep(1.5)
    assert node.client.get(f"/v1/operations/{operation['id']}")["phase"] == "preparing"
    assert states(node, program) == {"running"}
    (tmp_path / "come").touch()
    succeeded(node, operation)
    check_asleep(node, program)
    (tmp_path / "end").touch()
    does(node, program, "resume")
    assert lines_of(program, timeout=60) == done(2)


def test_while_a_communicator_is_made(native_dir: Path, tmp_path: Path) -> None:
    """One rank comes late. The error has the reason, all run on, and later it can be done."""
    with harness.own_node(native_dir, devices="cpu:0,cpu:1", port=-1, recovery_timeout=3) as node:
        program = started(node, tmp_path, "suspended", 2, "splits")
        begun(tmp_path, 2)
        time.sleep(0.2)
        operation = ended(node, begin(node, program, "suspend"))
        assert operation["state"] == "failed", f"{operation}"
        assert "a communicator is being made" in operation["error"]["detail"]
        assert settled(node, program) == "running"
        (tmp_path / "come").touch()
        harness.wait_until(lambda: all((tmp_path / f"split.{rank}").exists() for rank in range(2)), "it is made")
        does(node, program, "suspend")
        does(node, program, "resume")
        (tmp_path / "end").touch()
        assert lines_of(program, timeout=60) == done(2)


def test_a_rank_stands_for_its_group(node: Node, launch: Launch, tmp_path: Path) -> None:
    """And a second request is refused while one is under way, or has been done."""
    program = launch("steps", 2, 0)
    begun(tmp_path, 2)
    first, second = (one["id"] for one in ranks_of(node, program))
    operation = node.client.post(f"/v1/processes/{first}:suspend", {})
    for verb in ("suspend", "resume"):
        with contextlib.suppress(AssertionError):  # it is over already
            assert refusal(node, f"/v1/processes/{second}:{verb}", {})["code"] in (
                "already_moving", "suspended", "not_running",
            )  # fmt: skip
            break
    succeeded(node, operation)
    check_asleep(node, program)
    assert refusal(node, f"/v1/jobs/{program.job}:suspend", {})["code"] == "suspended"
    operation = succeeded(node, node.client.post(f"/v1/processes/{second}:resume", {}))
    assert len(operation["result"]["ranks"]) == 2
    enough(tmp_path)
    assert lines_of(program, timeout=60) == done(2)


def test_it_is_cancelled(node: Node, launch: Launch, tmp_path: Path) -> None:
    program = launch("steps", 4, 0)
    begun(tmp_path, 4)
    for phase in ("preparing", "handing_over", "preparing"):
        operation = reaches(node, begin(node, program, "suspend"), phase)
        with contextlib.suppress(Refused):  # too late
            node.client.delete(f"/v1/operations/{operation['id']}")
        operation = ended(node, operation)
        assert operation["state"] in ("cancelled", "succeeded"), f"{operation}"
        assert settled(node, program) == ("running" if operation["state"] == "cancelled" else "suspended")
        if operation["state"] == "succeeded":
            does(node, program, "resume")
    enough(tmp_path)
    assert lines_of(program, timeout=120) == done(4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(4))
def test_servers_are_killed_meanwhile(node: Node, launch: Launch, tmp_path: Path, seed: int) -> None:
    """In any phase of a suspension and of a resumption: all run, or all are suspended."""
    chance = random.Random(seed)
    program = launch("steps", 4, 0)
    begun(tmp_path, 4)
    for _ in range(4):
        if settled(node, program) == "running":
            operation = begin(node, program, "suspend")
            phase = chance.choice(["preparing", "handing_over", "keeping", "releasing"])
        else:
            operation = begin(node, program, "resume", devices=["cpu:1", "cpu:0"])
            phase = chance.choice(["preparing", "committing", "taking"])
        operation = reaches(node, operation, phase)
        time.sleep(chance.uniform(0, 0.03))
        servers = harness.server_pids(node)
        kill(*chance.sample(servers, min(len(servers), chance.choice([1, 1, 3]))))
        operation = ended(node, operation)
        assert operation["state"] in ("succeeded", "failed"), f"{operation}"
        settled(node, program)
    if settled(node, program) == "suspended":
        does(node, program, "resume")
    enough(tmp_path)
    assert lines_of(program, timeout=120) == done(4)


def test_the_daemon_is_killed_while_it_is_suspended(alone: Node, tmp_path: Path) -> None:
    program = started(alone, tmp_path, "steps", 4, 0)
    begun(tmp_path, 4)
    for to in ("host", "file"):
        does(alone, program, "suspend", to=to)
        alone.kill()
        alone.start()
        harness.wait_until(lambda: all(one["held_bytes"] for one in ranks_of(alone, program)), "all are found again")
        check_asleep(alone, program)
        assert len(does(alone, program, "resume", devices=["cpu:2", "cpu:3"])["result"]["ranks"]) == 4
    enough(tmp_path)
    assert lines_of(program, timeout=120) == done(4)
    assert all(one["recoveries"] == 0 for one in ranks_of(alone, program))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("verb", ["suspend", "resume"])
@pytest.mark.parametrize("seed", range(3))
def test_the_daemon_is_killed_meanwhile(alone: Node, tmp_path: Path, verb: str, seed: int) -> None:
    """At any moment: all run in the end, or all are suspended."""
    chance = random.Random(f"{verb}{seed}")
    program = started(alone, tmp_path, "steps", 4, 0)
    begun(tmp_path, 4)
    phases = {"suspend": ["preparing", "handing_over", "keeping", "releasing"], "resume": ["committing", "taking"]}
    for _ in range(2):
        if verb == "resume":
            does(alone, program, "suspend")
        reaches(alone, begin(alone, program, verb), chance.choice(phases[verb]))
        time.sleep(chance.uniform(0, 0.03))
        alone.kill()
        alone.start()
        harness.wait_until(
            lambda: all(one["held_bytes"] for one in ranks_of(alone, program)) and not alone.client.get(
                "/v1/operations", state="running"
            ), "all are found again"
        )  # fmt: skip
        time.sleep(1)  # until it is known who belongs together
        if settled(alone, program) == "suspended":
            does(alone, program, "resume")
    enough(tmp_path)
    assert lines_of(program, timeout=120) == done(4)


def holders(node: Node) -> list[int]:
    mark = str(node.folder).encode()
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdecimal() else []
            if any(word.endswith(b"holder.py") for word in words) and mark in words:
                found.append(int(entry.name))
    return sorted(found)


def test_the_daemon_is_killed_when_one_has_left_its_device(alone: Node, tmp_path: Path) -> None:
    """The other stands suspended, because its holder does not answer. The next daemon finds one suspended and one that
    can run: both are recovered from the round at which they were suspended."""
    program = started(alone, tmp_path, "suspended", 2, "waits")
    begun(tmp_path, 2)
    time.sleep(0.2)
    begin(alone, program, "suspend")
    harness.wait_until(lambda: len(holders(alone)) == 2, "the holders have been started")
    slow = holders(alone)[0]
    harness.stop(slow)
    (tmp_path / "come").touch()
    harness.wait_until(lambda: states(alone, program) == {"running", "suspended"}, "one is suspended")
    alone.kill()
    os.kill(slow, signal.SIGCONT)
    alone.start()
    harness.found_again(alone)
    harness.wait_until(lambda: states(alone, program) == {"running"}, "both run")
    assert "a rank is suspended, and others are not" in alone.log.read_text()
    (tmp_path / "end").touch()
    assert lines_of(program, timeout=60) == done(2)


def test_a_holder_of_an_earlier_suspension(alone: Node, tmp_path: Path) -> None:
    """It has everything, but not in time: its process goes on when the daemon is lost. After the next suspension it is
    not taken for that one's holder, although it announces itself first."""
    program = started(alone, tmp_path, "suspended", 2, "waits")
    begun(tmp_path, 2)
    time.sleep(0.2)
    begin(alone, program, "suspend")
    harness.wait_until(lambda: len([one for one in holders(alone) if waits_for_orders(one)]) == 2, "two holders")
    old = holders(alone)[0]
    harness.stop(old)
    (tmp_path / "come").touch()
    harness.wait_until(lambda: states(alone, program) == {"running", "suspended"}, "one is suspended")
    alone.kill()
    alone.start()
    harness.found_again(alone)
    harness.wait_until(lambda: states(alone, program) == {"running"}, "both run")
    does(alone, program, "suspend")
    new = [one for one in holders(alone) if one != old]
    assert len(new) == 2
    for one in new:
        harness.stop(one)
    alone.kill()
    os.kill(old, signal.SIGCONT)
    alone.start()
    harness.wait_until(lambda: old not in holders(alone), "it has ended")
    for one in new:
        os.kill(one, signal.SIGCONT)
    harness.found_again(alone)
    check_asleep(alone, program)
    (tmp_path / "end").touch()
    does(alone, program, "resume")
    assert lines_of(program, timeout=60) == done(2)


def waits_for_orders(holder: int) -> bool:
    """In `poll`, after it has reported that it is there."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{holder}/syscall").read_text().split()[0] in ("7", "271")
    return False


def test_no_room_for_one(native_dir: Path, tmp_path: Path) -> None:
    """All stay suspended, and the error has the reason. What is known before is refused before."""
    with harness.own_node(native_dir, devices="cpu:0,cpu:1", port=-1, device_memory=128 << 20) as node:
        program = started(node, tmp_path, "suspended", 2, "rests", LARGE_MIB=100)
        begun(tmp_path, 2)
        does(node, program, "suspend")
        problem = refusal(node, f"/v1/jobs/{program.job}:resume", {"device": "cpu:0"})
        assert (problem["code"], problem["process_location"]) == ("no_room", "host")
        restarted(node, 80 << 20)
        check_asleep(node, program)
        operation = ended(node, begin(node, program, "resume"))  # of its own device nobody knows better
        assert (operation["state"], operation["error"]["code"]) == ("failed", "no_room"), f"{operation}"
        assert operation["error"]["process_location"] == "host"
        assert "there is no memory for the" in operation["error"]["detail"]
        harness.wait_until(lambda: not harness.server_pids(node), "the other one's server has gone, too")
        check_asleep(node, program)
        restarted(node, 128 << 20)
        does(node, program, "resume", devices=["cpu:1", "cpu:0"])
        (tmp_path / "come").touch()
        assert lines_of(program, timeout=60) == done(2)


def restarted(node: Node, device_memory: int) -> None:
    node.kill()
    node.environment["XMIG_DEVICE_MEMORY"] = str(device_memory)
    node.start()
    harness.found_again(node)


def test_a_suspended_job_is_stopped(node: Node, launch: Launch, tmp_path: Path) -> None:
    program = launch("steps", 4, 0)
    begun(tmp_path, 4)
    does(node, program, "suspend")
    pids = [one["pid"] for one in ranks_of(node, program)]
    node.client.delete(f"/v1/jobs/{program.job}")
    program.process.communicate(timeout=60)
    harness.wait_until(lambda: states(node, program) == {"ended"}, "all have ended")
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    harness.wait_until(lambda: harness.held(node).memfds == 0, "nothing is left")


@pytest.mark.parametrize("restart", [False, True])
def test_a_rank_is_ended_while_it_is_suspended(alone: Node, tmp_path: Path, restart: bool) -> None:
    """The others go on without it: what they do with it fails, and nothing waits for ever."""
    program = started(alone, tmp_path, "suspended", 2, "loses")
    begun(tmp_path, 2)
    does(alone, program, "suspend")
    victim = int((tmp_path / "pid.1").read_text())
    os.kill(victim, signal.SIGKILL)
    harness.wait_until(lambda: states(alone, program) == {"suspended", "ended"}, "one has ended")
    if restart:
        alone.kill()
        alone.start()
        harness.found_again(alone)
    does(alone, program, "resume")
    (tmp_path / "come").touch()
    out, _ = program.process.communicate(timeout=60)
    assert "0: done" in out, out


def started(
    node: Node, folder: Path, name: str, ranks: int, *arguments: object, device: str | None = None, **environment: Any
) -> Program:
    command: list[str | Path] = [
        sys.executable, PROGRAMS / "launch.py", str(ranks), folder, PROGRAMS / f"{name}.py", *map(str, arguments),
    ]  # fmt: skip
    return node.program(command, name=name, device=device, environment={k: str(v) for k, v in environment.items()})
