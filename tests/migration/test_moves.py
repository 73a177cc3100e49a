"""Live migration with real servers on cpu devices: results stay the same to the bit, whatever happens on the way."""

from __future__ import annotations

import contextlib
import fcntl
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.migration.moves import begin, ended, info, kill, moved, reaches, refusal
from tests.recovery.conftest import Starter
from xmigd.client import Refused
from xmigd.demo.node import Node, Program
from xmigd.demo.training import KERNELS, Training, finish
from xmigd.demo.training import start as start_training

CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 1, 217
MOVES = 200
EPOCHS = 12
ROOM = 4096  # bytes: the smallest pipe that there is
STEPS = 3000
ROUNDS = 6  # of one that is disturbed each time
PARTS = (200, 300, 50, 400)


def only_one_server(daemon: Node, program: Program) -> None:
    """One server and its standby; nothing of a move is left."""
    program.until("running")
    harness.wait_until(lambda: len(harness.server_pids(daemon)) == 2, "one server and its standby")


def begin_at_last(program: Program) -> tuple[set[int], int, dict[str, Any]]:
    """Start a move as soon as one can be: the daemon may not have noticed before that the server was killed. With the
    servers before, and the one that has the program."""
    while True:
        before = set(harness.server_pids(program.node))
        source = int(program.until("running")["server_pid"])
        with contextlib.suppress(Refused):
            return before, source, begin(program)


def test_two_hundred_moves_back_and_forth(daemon: Node, start: Starter) -> None:
    """Each in the middle of work; the answers are those of a program that was left in peace."""
    quiet, program = start("stepwise", device="cpu:0"), start("stepwise", device="cpu:0")
    for each in (quiet, program):
        harness.go(each)
    for count in range(MOVES):
        harness.ask(program, 20)
        operation = moved(program, f"cpu:{(count + 1) % 2}")
        assert operation["result"]["downtime_ms"] is not None
        answer = harness.answer(program)
        assert answer == harness.steps(quiet, 20), f"after {count + 1} moves"
    for each in (quiet, program):
        harness.output(each)
    migrations = daemon.client.get("/v1/migrations", limit=1000)
    assert [m["state"] for m in migrations] == ["done"] * MOVES
    assert all(i["loading_ms"] > 0 for m in migrations for i in m["iterations"][:1])  # its kernels, on the target
    assert not program.recoveries()
    harness.wait_until(lambda: harness.held(daemon).memfds == 0, "nothing is left")


def test_devices_that_cannot_reach_each_other(daemon: Node, start: Starter) -> None:
    """The content goes through host memory, and the program notices nothing. The next move goes the direct way."""
    quiet, program = start("stepwise", device="cpu:0"), start("stepwise", device="cpu:0")
    for each in (quiet, program):
        harness.go(each)
        harness.steps(each, 50)
    harness.wait_until(lambda: bool(info(program)["shadow_bytes"]), "it has a shadow to import")
    for target, refused in (("cpu:1", True), ("cpu:0", False)):
        if refused:
            program.inject("fault", point="import", error=CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)
        harness.ask(program, 200)
        path = "host" if refused else "peer"
        assert moved(program, target)["result"]["path"] == path
        assert harness.answer(program) == harness.steps(quiet, 200)
        assert daemon.client.get("/v1/migrations", limit=1)[0]["path"] == path
    harness.kill_server(program)
    assert harness.steps(program, 50) == harness.steps(quiet, 50)
    for each in (quiet, program):
        harness.output(each)


def test_an_import_that_fails_for_another_reason_is_no_question_of_peers(daemon: Node, start: Starter) -> None:
    program = start("stepwise", device="cpu:0")
    harness.go(program)
    harness.steps(program, 50)
    harness.wait_until(lambda: bool(info(program)["shadow_bytes"]), "it has a shadow to import")
    program.inject("fault", point="import", error=CUDA_ERROR_INVALID_VALUE)
    operation = ended(daemon, begin(program, "cpu:1"))
    assert operation["error"]["code"] == "failed"
    assert "CUDA error 1" in operation["error"]["detail"]
    assert (info(program)["device"], operation["error"]["process_location"]) == ("cpu:0", "source")
    moved(program, "cpu:1")
    harness.output(program)


def test_a_training_moves_while_it_runs(daemon: Node, native_dir: Path) -> None:
    """The demo's, with losses and weights compared to the bit."""
    quiet = finish(daemon, start_training(daemon, "quiet", EPOCHS), "quiet")
    command: list[str | Path] = [sys.executable, "-m", "xmigd.demo.train", "--kernels", native_dir / KERNELS]
    program = daemon.program([*command, "--epochs", str(EPOCHS)], environment={"OMP_NUM_THREADS": "1"})
    # Its output has no room until somebody reads it: it cannot be over before it has been moved.
    assert program.process.stdout is not None
    fcntl.fcntl(program.process.stdout, fcntl.F_SETPIPE_SZ, ROOM)
    program.until("running")
    moved(program)
    with ThreadPoolExecutor(1) as reading:
        reported = reading.submit(program.process.stdout.read)
        while program.process.poll() is None:
            try:
                operation = ended(daemon, begin(program))
            except Refused:
                break  # it has exited
            if operation["state"] != "succeeded":
                assert operation["error"]["code"] == "program_exited", operation
                break
    assert program.process.wait(60) == 0
    assert len(reported.result()) > ROOM
    training = Training()
    for line in reported.result().splitlines():
        training.line(line)
    assert training.losses == quiet.losses
    assert training.result["weights"] == quiet.result["weights"]


@pytest.mark.parametrize("victim", ["source", "target", "both"])
def test_a_server_is_killed_at_any_moment_of_a_move(
    daemon: Node, start: Starter, undisturbed: Callable[..., str], victim: str
) -> None:
    expected = undisturbed("training", STEPS, 8)
    chance = random.Random(5)
    program = start("training", STEPS, 8, STEPS - 100)
    harness.go(program)
    for _ in range(ROUNDS):
        before, source, operation = begin_at_last(program)
        phase = chance.choice(["preparing", "copying", "committing", "handing_over", "taking"])
        reaches(daemon, operation, phase)
        time.sleep(chance.uniform(0, 0.01))
        targets = set(harness.server_pids(daemon)) - before
        if victim in ("source", "both"):
            kill(source)
        if victim in ("target", "both"):
            for pid in targets:
                kill(pid)
        operation = ended(daemon, operation)
        if operation["state"] == "failed":
            assert operation["error"]["process_location"] == "source"
    program.until("running")
    assert harness.output(program) == expected
    assert all(r["exact"] for r in program.recoveries() if r["outcome"] == "resumed")


@pytest.mark.parametrize("phase", ["preparing", "copying", "handing_over", "taking"])
def test_cancelled_in_each_phase(daemon: Node, start: Starter, phase: str) -> None:
    quiet, program = start("stepwise"), start("stepwise")
    for each in (quiet, program):
        harness.go(each)
    for part in PARTS:
        harness.ask(program, part)
        operation = reaches(daemon, begin(program), phase)
        with contextlib.suppress(Refused):  # it may be too late
            daemon.client.delete(f"/v1/operations/{operation['id']}")
        operation = ended(daemon, operation)
        assert operation["state"] in ("cancelled", "succeeded"), operation
        assert harness.answer(program) == harness.steps(quiet, part)
    for each in (quiet, program):
        harness.output(each)


@pytest.mark.parametrize("phase", ["copying", "handing_over", "taking"])
def test_the_daemon_is_killed_in_each_phase(daemon: Node, start: Starter, phase: str) -> None:
    quiet, program = start("stepwise"), start("stepwise")
    for each in (quiet, program):
        harness.go(each)
    harness.ask(program, PARTS[0])
    operation = reaches(daemon, begin(program), phase)
    daemon.kill()
    daemon.start()
    operation = ended(daemon, operation)
    assert harness.answer(program) == harness.steps(quiet, PARTS[0])
    harness.found_again(daemon)
    program.until("running")
    moved(program)
    assert harness.steps(program, PARTS[1]) == harness.steps(quiet, PARTS[1])
    only = [p for p in daemon.client.get("/v1/processes", live=True) if p["id"] == info(program)["id"]]
    assert len(only) == 1
    for each in (quiet, program):
        harness.output(each)
    harness.wait_until(lambda: harness.held(daemon).memfds == 0, "nothing is left")


def test_the_program_is_killed_in_the_middle_of_a_move(daemon: Node, start: Starter) -> None:
    for phase in ("preparing", "copying", "handing_over", "taking"):
        program = start("training", 100000)
        harness.go(program)
        operation = reaches(daemon, begin(program), phase)
        program.process.kill()
        program.process.communicate()
        operation = ended(daemon, operation)
        if operation["state"] == "failed":
            assert operation["error"]["code"] == "program_exited", operation
        program.until("ended")
        harness.wait_until(lambda: harness.held(daemon).memfds == 0, "nothing is left")


def test_a_full_target_is_refused(daemon: Node, start: Starter) -> None:
    """A device has 1 GiB here."""
    big, program = start("training", 100000, 600, device="cpu:1"), start("training", 100000, 600, device="cpu:0")
    for each in (big, program):
        harness.go(each)
        harness.wait_until(lambda each=each: (info(each)["held_bytes"] or 0) > 600 << 20, "it has its memory")  # type: ignore[misc]
    problem = refusal(daemon, "/v1/migrations", {"process": info(program)["id"], "target": "cpu:1"})
    assert (problem["code"], problem["process_location"], problem["phase"]) == ("no_room", "source", "planning")
    plan = daemon.client.post("/v1/migration-plans", {"process": info(program)["id"]})
    codes = {target["device"]: [reason["code"] for reason in target["reasons"]] for target in plan["targets"]}
    assert codes == {"cpu:0": ["same_device"], "cpu:1": ["no_room"]}
    assert info(program)["state"] == "running"


def test_drain(daemon: Node, start: Starter) -> None:
    programs = [start("stepwise", device="cpu:0") for _ in range(2)]
    for program in programs:
        harness.go(program)
    operation = ended(daemon, daemon.client.post("/v1/devices/cpu:0:drain", {"reason": "a new fan"}))
    assert (operation["state"], operation["result"]["moved"]) == ("succeeded", 2), operation
    assert {info(program)["device"] for program in programs} == {"cpu:1"}
    (device,) = [d for d in daemon.client.get("/v1/devices") if d["id"] == "cpu:0"]
    assert (device["cordoned"], device["cordon_reason"], device["processes"]) == (True, "a new fan", 0)
    problem = refusal(daemon, "/v1/migrations", {"process": info(programs[0])["id"], "target": "cpu:0"})
    assert problem["code"] == "cordoned"
    operation = ended(daemon, daemon.client.post("/v1/devices/cpu:1:drain", {}))
    assert operation["error"]["code"] == "drain_incomplete"
    assert harness.steps(programs[0], 10) == harness.steps(programs[1], 10)
    for program in programs:
        harness.output(program)
