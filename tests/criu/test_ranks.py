"""Checkpoints of jobs with several ranks: one dump of all of them, and what they compute fits afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.collectives.conftest import PROGRAMS, enough
from tests.collectives.test_steps import ranks_of
from tests.criu.test_client_dump import criu_or_skip
from tests.migration.moves import ended, reaches, succeeded
from xmigd.client import Refused
from xmigd.demo.node import Node, Program

pytestmark = pytest.mark.criu

Launch = Callable[..., Program]


@pytest.fixture(scope="module")
def node(native_dir: Path) -> Iterator[Node]:
    with harness.own_node(native_dir, devices="cpu:0,cpu:1", port=-1, criu=criu_or_skip()) as node:
        yield node


@pytest.fixture
def launch(node: Node, tmp_path: Path) -> Iterator[Launch]:
    """Start `steps` with nothing open but files, and wait until its ranks are on their way."""

    def starter(ranks: int, **environment: str) -> Program:
        command: list[str | Path] = [
            sys.executable,
            PROGRAMS / "launch.py",
            str(ranks),
            tmp_path,
            PROGRAMS / "steps.py",
            "0",
        ]
        with (tmp_path / "out").open("w") as out:
            program = node.program(
                command, name="steps", environment=environment, stdout=out, stderr=out, start_new_session=True
            )
        harness.wait_until(lambda: all((tmp_path / f"began.{n}").exists() for n in range(ranks)), "all have begun")
        return program

    yield starter
    enough(tmp_path)


def make(node: Node, program: Program, **fields: Any) -> dict[str, Any]:
    operation: dict[str, Any] = node.client.post("/v1/checkpoints", {"job": program.job, **fields})
    return operation


def stopped(node: Node, program: Program) -> dict[str, Any]:
    """A checkpoint at which it ends."""
    operation = make(node, program, stop=True)
    assert program.process.wait(timeout=120) == -signal.SIGKILL
    result: dict[str, Any] = succeeded(node, operation)["result"]
    return result


def restored(node: Node, made: dict[str, Any], *devices: str) -> dict[str, Any]:
    path = f"/v1/checkpoints/{made['checkpoint']}:restore"
    result: dict[str, Any] = succeeded(node, node.client.post(path, {"devices": list(devices)}))["result"]
    return result


def of_job(node: Node, job: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = node.client.get("/v1/processes", job=job)
    return found


def check_ends_well(folder: Path, ranks: int, gone: Callable[[], bool]) -> None:
    """Each step is compared with a model of all ranks, before and after."""
    enough(folder)
    harness.wait_until(gone, "it has ended")
    lines = [(folder / f"out.{rank}").read_text().splitlines()[-1:] for rank in range(ranks)]
    assert lines == [["done"]] * ranks, (folder / "out").read_text()


@pytest.mark.parametrize(("ranks", "devices"), [(2, []), (4, ["cpu:1", "cpu:0"]), (4, ["cpu:1"])])
def test_a_job_is_restored(node: Node, launch: Launch, tmp_path: Path, ranks: int, devices: list[str]) -> None:
    """Where it was, with its ranks on each other's devices, or all on one; and is recovered like others."""
    program = launch(ranks)
    made = stopped(node, program)
    assert node.client.get(f"/v1/checkpoints/{made['checkpoint']}")["programs"] == ranks
    back = restored(node, made, *devices)
    found = of_job(node, back["job"])
    assert len(found) == len(back["processes"]) == ranks
    if devices:
        assert {one["device"] for one in found} == set(devices)
    os.kill(found[-1]["server_pid"], signal.SIGKILL)
    recovered = lambda: {(p["state"], p["recoveries"] > 0) for p in of_job(node, back["job"])} == {("running", True)}  # noqa: E731
    harness.wait_until(recovered, "all are recovered")
    check_ends_well(tmp_path, ranks, lambda: all(p["state"] == "ended" for p in of_job(node, back["job"])))


def test_a_job_goes_on_beside_its_checkpoint(node: Node, launch: Launch, tmp_path: Path) -> None:
    program = launch(2)
    made = succeeded(node, make(node, program))["result"]
    assert made["standstill_ms"] > 0
    with pytest.raises(Refused) as caught:
        node.client.post(f"/v1/checkpoints/{made['checkpoint']}:restore", {"devices": []})
    assert caught.value.code == "pid_in_use"
    check_ends_well(tmp_path, 2, lambda: program.process.poll() is not None)


def test_its_devices_take_no_new_process(node: Node, launch: Launch, tmp_path: Path) -> None:
    """As while they are drained: the job is theirs already, and goes on there."""
    program = launch(2)
    for cordoned in (True, False):
        for device in ("cpu:0", "cpu:1"):
            node.client.patch(f"/v1/devices/{device}", {"cordoned": cordoned}, "*")
        if cordoned:
            succeeded(node, make(node, program))
            assert {one["state"] for one in of_job(node, program.job)} == {"running"}
    check_ends_well(tmp_path, 2, lambda: program.process.poll() is not None)


def test_the_daemon_is_killed_while_one_is_made(node: Node, launch: Launch, tmp_path: Path) -> None:
    program = launch(2)
    operation = make(node, program)
    phases = ("dumping", "storing")
    harness.wait_until(
        lambda: node.client.get(f"/v1/operations/{operation['id']}")["phase"] in (*phases, "resuming"),
        "it is made", closely=True,
    )  # fmt: skip
    node.kill()
    node.start()
    harness.found_again(node)
    ended(node, operation)
    harness.wait_until(lambda: {one["state"] for one in ranks_of(node, program)} == {"running"}, "all go on")
    check_ends_well(tmp_path, 2, lambda: program.process.poll() is not None)


def test_a_rank_dies_while_one_is_made(node: Node, launch: Launch, tmp_path: Path) -> None:
    """All are recovered, whether there is a checkpoint of it or not; the next one, an increment or not, is right."""
    program = launch(2, IDLE_MIB="16")
    for number, phase in enumerate(("pausing", "dumping", "copying", "storing")):
        operation = make(node, program)
        reaches(node, operation, phase)
        before = {one["id"]: one for one in ranks_of(node, program)}
        os.kill(list(before.values())[number % 2]["server_pid"], signal.SIGKILL)
        harness.wait_until(
            lambda: all(
                one["state"] == "running" and one["recoveries"] > before[one["id"]]["recoveries"]  # noqa: B023
                for one in ranks_of(node, program)
            ),
            "all are recovered",
        )
        over = ended(node, operation)
        assert over["state"] == "succeeded" or over["error"]["code"]
        full = succeeded(node, make(node, program))["result"]
        assert full["copied_bytes"] > 2 * 16 << 20
    made = stopped(node, program)
    assert made["copied_bytes"] < full["copied_bytes"] - (2 * 12 << 20)
    back = restored(node, made)
    check_ends_well(tmp_path, 2, lambda: all(p["state"] == "ended" for p in of_job(node, back["job"])))


def test_ranks_that_nothing_ties_are_refused(node: Node, tmp_path: Path) -> None:
    """Started by hand: what they descend from is no process of the job."""
    job = node.client.post("/v1/jobs", {"name": "by hand"})
    environment = node.environment | job["environment"] | {"LD_LIBRARY_PATH": job["library_path"]}
    environment["LD_PRELOAD"] = job["preload"]
    code = "import ctypes, sys, time; ctypes.CDLL('libcuda.so.1').cuInit(0); time.sleep(60)"
    children = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdin=subprocess.DEVNULL) for _ in range(2)
    ]
    try:
        harness.wait_until(lambda: len(of_job(node, job["id"])) == 2, "both are known")
        with pytest.raises(Refused) as caught:
            node.client.post("/v1/checkpoints", {"job": job["id"]})
        assert caught.value.code == "several_processes"
    finally:
        for child in children:
            child.kill()
            child.wait()
