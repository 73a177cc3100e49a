"""Journeys in front of a stand-in for the driver: straight ones, and with a failure at each step."""

from __future__ import annotations

import asyncio
import os

import pytest

from xmigd.driver_checkpoint import node
from xmigd.driver_checkpoint.link import Helper
from xmigd.errors import Unavailable

from .conftest import FIRST, GIB, SECOND, Driver, travel

REFUSED, NOT_READY, OUT_OF_MEMORY, NOT_SUPPORTED = 999, 600, 2, 801


def test_there_and_back(driver: Driver, program: int) -> None:
    machine, journey = travel(program)
    assert (machine.outcome, machine.location) == ("done", "target")
    assert driver.where(program) == ("running", SECOND)
    assert driver.calls == ["init", "lock 10000", "checkpoint", f"restore {SECOND}", "unlock"]
    assert [name for name, _ in journey.phases] == ["locking", "saving", "restoring", "unlocking", "over"]
    assert journey.locked_at is not None
    assert journey.unlocked_at is not None
    machine, _ = travel(program, source=SECOND, target=FIRST)
    assert driver.where(program) == ("running", FIRST)


@pytest.mark.parametrize(
    ("call", "error", "state", "why"),
    [
        ("lock", NOT_READY, "-", "did not end within 10 s (CUDA_ERROR_NOT_READY)"),
        ("lock", REFUSED, "-", "lock: CUDA_ERROR_UNKNOWN"),
        ("lock", REFUSED, "1", "lock: CUDA_ERROR_UNKNOWN"),
        ("checkpoint", NOT_SUPPORTED, "-", "it uses what the driver cannot save"),
        ("checkpoint", REFUSED, "2", "checkpoint: CUDA_ERROR_UNKNOWN"),
        ("restore", REFUSED, "-", "restore: CUDA_ERROR_UNKNOWN"),
    ],
)
def test_a_call_fails_and_it_runs_where_it_was(
    driver: Driver, program: int, call: str, error: int, state: str, why: str
) -> None:
    driver.fail(call, error, state)
    machine, _ = travel(program)
    assert (machine.outcome, machine.location) == ("failed", "source")
    assert why in str(machine.why)
    assert driver.where(program) == ("running", FIRST)


def test_an_unlock_that_fails_is_repeated(driver: Driver, program: int) -> None:
    driver.fail("unlock", REFUSED)
    driver.fail("unlock", REFUSED)
    machine, _ = travel(program)
    assert (machine.outcome, driver.where(program)) == ("done", ("running", SECOND))


def test_an_unlock_that_fails_for_ever(driver: Driver, program: int) -> None:
    for _ in range(9):
        driver.fail("unlock", REFUSED)
    machine, _ = travel(program)
    assert (machine.outcome, machine.location, machine.why) == ("failed", "target", "the process stays locked")
    assert driver.where(program) == ("locked", SECOND)


def test_a_restore_that_breaks_the_process(driver: Driver, program: int) -> None:
    driver.fail("restore", OUT_OF_MEMORY, "3")
    machine, _ = travel(program)
    assert (machine.outcome, machine.location) == ("failed", "lost")
    assert "the memory ran out" in str(machine.why)


def test_the_room_on_the_target_is_gone_meanwhile(driver: Driver, program: int) -> None:
    driver.gpu(f"{FIRST} {80 * GIB} 0 0 0 NVIDIA H200", f"{SECOND} {80 * GIB} {76 * GIB} 0 0 NVIDIA H200")
    machine, _ = travel(program)
    assert (machine.outcome, machine.location, machine.code) == ("failed", "source", "no_room")
    assert driver.where(program) == ("running", FIRST)
    assert f"restore {SECOND}" not in driver.calls


def test_no_room_anywhere_leaves_it_in_the_hosts_memory(driver: Driver, program: int) -> None:
    driver.fail("checkpoint", REFUSED, "2")  # it is saved, and goes back
    driver.gpu(f"{FIRST} {80 * GIB} {79 * GIB} 0 0 NVIDIA H200", f"{SECOND} {80 * GIB} {79 * GIB} 0 0 NVIDIA H200")
    machine, _ = travel(program)
    assert (machine.outcome, machine.location) == ("failed", "host")
    assert driver.where(program) == ("checkpointed", FIRST)
    driver.gpu(f"{FIRST} {80 * GIB} 0 0 0 NVIDIA H200", f"{SECOND} {80 * GIB} 0 0 0 NVIDIA H200")
    machine, _ = travel(program, kind="resume")
    assert (machine.outcome, driver.where(program)) == ("done", ("running", SECOND))


def test_no_room_in_the_host(driver: Driver, program: int) -> None:
    machine, _ = travel(program, host=GIB)
    assert (machine.outcome, machine.code) == ("failed", "no_host_memory")
    assert driver.where(program) == ("running", FIRST)
    assert "checkpoint" not in driver.calls


@pytest.mark.parametrize("call", ["lock", "checkpoint", "restore", "unlock"])
def test_the_helper_dies_at_each_call(driver: Driver, program: int, call: str) -> None:
    machine, _ = travel(program, dies_at=call)
    if call == "unlock":
        assert (machine.outcome, driver.where(program)) == ("done", ("running", SECOND))
    else:
        assert (machine.outcome, machine.location) == ("failed", "source")
        assert driver.where(program) == ("running", FIRST)
    assert driver.calls.count("init") == 2


@pytest.mark.parametrize("phase", ["locking", "saving"])
def test_cancelled(driver: Driver, program: int, phase: str) -> None:
    machine, _ = travel(program, cancel_in=phase)
    assert (machine.outcome, driver.where(program)) == ("cancelled", ("running", FIRST))


def test_suspended_and_resumed(driver: Driver, program: int) -> None:
    machine, _ = travel(program, kind="suspend")
    assert (machine.outcome, machine.location, driver.where(program)[0]) == ("done", "host", "checkpointed")
    assert node.look().all[0].free_bytes == 80 * GIB
    machine, _ = travel(program, kind="resume", target=FIRST)
    assert (machine.outcome, driver.where(program)) == ("done", ("running", FIRST))


@pytest.mark.parametrize("state", [0, 1, 2])
def test_what_an_earlier_daemon_left(driver: Driver, program: int, state: int) -> None:
    driver.program(program, state=state)
    machine, _ = travel(program, abandoned=True)
    assert (machine.outcome, machine.code, driver.where(program)) == ("failed", "interrupted", ("running", FIRST))


def test_a_program_that_ends_meanwhile(driver: Driver, program: int) -> None:
    machine, _ = travel(program, ends_in="saving")
    assert (machine.outcome, machine.location, machine.code) == ("failed", "lost", "process_ended")


def test_the_driver_cannot_be_initialised(driver: Driver) -> None:
    driver.fail("init", 100)
    with pytest.raises(Unavailable, match="CUDA_ERROR_NO_DEVICE"):
        asyncio.run(Helper(os.geteuid(), driver.folder / "lock").start())
