"""A device that faults again and again is drained by xMIG itself, until the circuit breaker opens."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from tests import harness
from xmigd.demo.node import Node, Program

from .conftest import PROGRAMS


def flaky_kernels(folder: Path) -> tuple[Path, Path]:
    """The image, and the file that makes it fail once."""
    image, flag = folder / "flaky.so", folder / "flag"
    subprocess.run(
        [harness.COMPILER, "-O2", "-shared", "-fPIC", f"-I{harness.ROOT / 'shim' / 'include'}", f'-DFLAKY="{flag}"',
         Path(__file__).with_name("flaky.c"), "-o", image],
        check=True,
    )  # fmt: skip
    return image, flag


def set_policy(node: Node, name: str, **values: float) -> None:
    node.client.patch(f"/v1/policies/{name}", values, "*")


def on(program: Program, device: str) -> bool:
    info = program.info()
    return info is not None and (info["device"], info["state"]) == (device, "running")


def fail(program: Program, flag: Path) -> list[str]:
    """The device fails in the next steps. Answers until the program has come past it, to another snapshot."""
    before = len(program.recoveries())
    flag.touch()
    answers = [harness.steps(program, 5)]
    harness.wait_until(
        lambda: [r["outcome"] for r in program.recoveries()] == ["resumed"] * (before + 1), "it is recovered"
    )
    recovered = program.position()

    def past() -> bool:
        answers.append(harness.steps(program, 5))
        return program.position() > recovered

    harness.wait_until(past, "a snapshot after the recovery")
    return answers


def drains(node: Node) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = node.client.get("/v1/operations", kind="drain")
    return found


def test_a_failing_device_is_drained_until_the_breaker_opens(daemon: Node, kernels: Path, tmp_path: Path) -> None:
    image, flag = flaky_kernels(tmp_path)
    program = harness.start(daemon, PROGRAMS / "stepwise.py", kernels=image, device="cpu:0")
    harness.go(program)
    answers = [answer for _ in range(3) for answer in fail(program, flag)]
    assert drains(daemon) == []  # nothing happens by itself unless the policy says so
    set_policy(daemon, "devices", max_faults=4)
    set_policy(daemon, "circuit-breaker", max_actions=1)
    answers += fail(program, flag)
    harness.wait_until(lambda: on(program, "cpu:1"), "it is moved off the device")
    device = daemon.client.get("/v1/devices/cpu:0")
    assert (device["cordoned"], device["cordon_reason"]) == (True, "4 faults of the device within 3600 s")
    assert [drain["requestor"] for drain in drains(daemon)] == ["xmigd"]
    audit = [entry for entry in daemon.client.get("/v1/audit") if entry["action"] == "drain cpu:0"]
    assert sorted((entry["entry"], entry["via"], entry["outcome"]) for entry in audit) == [
        ("intent", "xmigd", None), ("outcome", "xmigd", "done"),
    ]  # fmt: skip
    breaker = daemon.client.get("/v1/circuit-breaker")
    assert (breaker["state"], [action["action"] for action in breaker["actions"]]) == ("open", ["drain"])

    # The other device fails as often: xMIG does not send the program to and fro.
    daemon.client.patch("/v1/devices/cpu:0", {"cordoned": False}, "*")
    set_policy(daemon, "devices", max_faults=1)
    answers += fail(program, flag)
    harness.wait_until(lambda: "left as it is" in daemon.log.read_text(), "it is left as it is")
    assert on(program, "cpu:1")
    assert len(drains(daemon)) == 1
    metrics = daemon.client.get_text("/metrics")
    assert 'xmigd_automatic_actions_total{action="drain"} 1.0' in metrics
    assert "xmigd_automatic_actions_refused_total 1.0" in metrics

    daemon.client.post("/v1/circuit-breaker:reset")
    answers += fail(program, flag)
    harness.wait_until(lambda: on(program, "cpu:0"), "it is moved back")
    undisturbed = harness.start(daemon, PROGRAMS / "stepwise.py", kernels=kernels, device="cpu:0")
    harness.go(undisturbed)
    assert answers == [harness.steps(undisturbed, 5) for _ in answers]
    assert {fault["kind"] for fault in program.faults()} == {"device"}


def test_the_only_device_stays(daemon: Node, tmp_path: Path) -> None:
    image, flag = flaky_kernels(tmp_path)
    daemon.client.patch("/v1/devices/cpu:1", {"cordoned": True}, "*")
    set_policy(daemon, "devices", max_faults=1)
    program = harness.start(daemon, PROGRAMS / "stepwise.py", kernels=image)
    harness.go(program)
    fail(program, flag)
    harness.wait_until(lambda: "it is the only one" in daemon.log.read_text(), "it is left as it is")
    assert daemon.client.get("/v1/devices/cpu:0")["cordoned"] is False
    assert drains(daemon) == []


def test_a_programs_own_fault_does_not_count(daemon: Node, kernels: Path) -> None:
    set_policy(daemon, "devices", max_faults=1)
    program = harness.start(daemon, PROGRAMS / "own_fault.py", "store", kernels=kernels, device="cpu:0")
    harness.go(program)
    harness.output(program)
    program.until("ended")
    assert "program" in {fault["kind"] for fault in program.faults()}
    assert (drains(daemon), daemon.client.get("/v1/devices/cpu:0")["cordoned"]) == ([], False)
