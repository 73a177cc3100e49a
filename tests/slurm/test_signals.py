"""Slurm's signals to a task, one before what the last one has begun is over. No Slurm is needed for that."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest

from tests import harness
from tests.migration.moves import info
from tests.recovery.conftest import Starter, kernels, start
from xmigd.cli.slurm_task import Task, walltime
from xmigd.client import Client
from xmigd.demo.node import Node, Program

__all__ = ["kernels", "start"]


class Slow(Client):
    """Its preemptions arrive when they may."""

    def __init__(self, node: Node) -> None:
        super().__init__(node.settings)
        self.comes, self.may = threading.Event(), threading.Event()

    def start(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        if path.endswith(":preempt"):
            self.comes.set()
            assert self.may.wait(60)
        return super().start(path, body)


@pytest.fixture
def program(start: Starter) -> Program:
    program = start("stepwise")
    harness.go(program)
    assert harness.steps(program, 50)
    return program


def steered(client: Client, program: Program) -> Task:
    task = Task(client, "1", {})
    task.job = program.job
    return task


def nobody_steers() -> bool:
    return not any(each.name == "steering" for each in threading.enumerate())


def preemptions(program: Program) -> list[str]:
    return [each["state"] for each in program.node.client.get("/v1/operations", job=program.job, kind="preemption")]


def test_it_goes_on_before_it_is_suspended(daemon: Node, program: Program) -> None:
    """xmigd is slow, and Slurm has suspended the job and let it go on: it must not stay suspended."""
    client = Slow(daemon)
    signals = steered(client, program).reactions()
    signals[signal.SIGTSTP]()
    assert client.comes.wait(60)
    signals[signal.SIGCONT]()
    client.may.set()
    harness.wait_until(nobody_steers, "it is where Slurm wants it", timeout=20)
    assert (info(program)["state"], preemptions(program)) == ("running", ["succeeded"])
    assert harness.steps(program, 50)
    harness.output(program)


def test_it_is_suspended_before_it_goes_on(daemon: Node, program: Program) -> None:
    """Its device is another's, and Slurm suspends it again: once there is room it must not come back."""
    client = Slow(daemon)
    client.may.set()
    signals = steered(client, program).reactions()
    signals[signal.SIGTSTP]()
    harness.wait_until(lambda: info(program)["state"] == "suspended", "it is suspended")
    device = f"/v1/devices/{info(program)['device']}"
    daemon.client.patch(device, {"cordoned": True, "reason": "another's"}, "*")
    signals[signal.SIGCONT]()
    signals[signal.SIGTSTP]()
    daemon.client.patch(device, {"cordoned": False}, "*")
    harness.wait_until(nobody_steers, "it is where Slurm wants it", timeout=20)
    assert info(program)["state"] == "suspended"
    signals[signal.SIGCONT]()
    harness.wait_until(nobody_steers, "it is where Slurm wants it", timeout=20)
    assert info(program)["state"] == "running"
    harness.output(program)


@pytest.mark.parametrize(
    ("end", "left"),
    [("1600", 600.0), ("1000", None), ("900", None), ("", None), ("soon", None), ("9" * 12, None), ("9" * 400, None)],
)
def test_the_time_until_the_limit(end: str, left: float | None) -> None:
    assert walltime({"SLURM_JOB_END_TIME": end}, 1000.0) == left
