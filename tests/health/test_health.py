"""What is wrong with a device is found, graded, written down and answered.

NVML is a library that answers as NVML does, from files. The answers are tried on cpu devices, with
programs that run there.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.migration.moves import refusal
from tests.recovery.conftest import PROGRAMS
from xmigd.demo.node import Node, Program
from xmigd.errors import XmigError
from xmigd.health import grades
from xmigd.health.grades import Rung
from xmigd.health.kernel_log import parse

# --- grades -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("xid", "rung"), [(79, Rung.lose), (95, Rung.drain), (94, Rung.cordon), (63, Rung.report), (9998, Rung.report)]
)
def test_xids_have_a_rung(xid: int, rung: Rung) -> None:
    found = grades.of_xid(xid)
    assert found is not None
    assert (found.code, found.rung) == (f"xid_{xid}", rung)


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 154])
def test_what_a_program_does_is_no_finding(xid: int) -> None:
    assert grades.of_xid(xid) is None


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("NVRM: Xid (PCI:0000:65:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
         ("00000000:65:00", 79)),
        ("4,1200,55,-;NVRM: Xid (PCI:0001:C1:00.0): 48, pid=1, An uncorrectable double bit error",
         ("00000001:c1:00", 48)),
        ("NVRM: Xid (PCI:0000:65:00): none", None),
        ("NVRM: loading NVIDIA UNIX x86_64 Kernel Module", None),
        ("NVRM: Xid (PCI:0000:65:00): 79999999999", None),
    ],
)  # fmt: skip
def test_lines_of_the_kernel(line: str, found: tuple[str, int] | None) -> None:
    assert parse(line) == found


# --- sensors ----------------------------------------------------------------------------------------------------------


class Gpus:
    """Two of them, whose health is written by the test."""

    def __init__(self, node: Node, folder: Path, kernel_log: int) -> None:
        self.node = node
        self.folder = folder
        self.kernel_log = kernel_log

    def become(self, gpu: int, *, result: int = 0, action: int = 0, pending: int = 0, failed: int = 0) -> None:
        new = self.folder / "new"
        new.write_text(f"{result} {action} {pending} {failed}")
        new.rename(self.folder / f"gpu{gpu}")

    def xid(self, gpu: int, xid: int) -> None:
        with (self.folder / "events").open("a") as file:
            file.write(f"{gpu} {xid}\n")

    def kernel_says(self, line: str) -> None:
        os.write(self.kernel_log, f"{line}\n".encode())

    def device(self, gpu: int) -> dict[str, Any]:
        return dict(self.node.client.get(f"/v1/devices/cuda:{gpu}"))

    def findings(self, gpu: int) -> list[dict[str, Any]]:
        return list(self.node.client.get(f"/v1/devices/cuda:{gpu}/findings"))

    def answered(self, gpu: int, code: str) -> dict[str, Any]:
        """The finding, when something was done about it."""

        def found() -> list[dict[str, Any]]:
            return [each for each in self.findings(gpu) if each["code"] == code and each["answer"] is not None]

        harness.wait_until(lambda: bool(found()), f"{code} is answered")
        return found()[0]


@pytest.fixture(scope="session")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The library's folder, and that of what it reads."""
    folder = tmp_path_factory.mktemp("nvml")
    control = folder / "control"
    control.mkdir()
    subprocess.run(
        [harness.COMPILER, "-O1", "-shared", "-fPIC", f'-DCONTROL="{control}"', "-Wall", "-Werror",
         Path(__file__).with_name("fake_nvml.c"), "-o", folder / "libnvidia-ml.so.1"],
        check=True,
    )  # fmt: skip
    return folder, control


@pytest.fixture
def gpus(native_dir: Path, nvml: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpus]:
    library, control = nvml
    for left in control.iterdir():
        left.unlink()
    log = tmp_path / "kmsg"
    os.mkfifo(log)
    writes = os.open(log, os.O_RDWR)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    try:
        with harness.own_node(
            native_dir, devices="cuda:0,cuda:1", port=-1, health_interval=0.1, kernel_log=log
        ) as node:
            yield Gpus(node, control, writes)
    finally:
        os.close(writes)


def test_what_nvml_says_comes_and_goes(gpus: Gpus) -> None:
    assert (gpus.device(0)["health"], gpus.device(0)["state"]) == ("fine", "ready")
    gpus.become(0, pending=1)
    found = gpus.answered(0, "remap_pending")
    assert (found["rung"], found["answer"], found["source"]) == ("cordon", "cordon", "nvml")
    assert (gpus.device(0)["state"], gpus.device(0)["health"]) == ("cordoned", "cordon")
    assert gpus.device(0)["findings"] == ["a row of its memory is to be remapped; reset it when idle"]
    assert gpus.device(1)["health"] == "fine"
    gpus.become(0)
    harness.wait_until(lambda: gpus.device(0)["health"] == "fine", "it was reset")
    assert gpus.findings(0)[0]["closed_by"] == "xmigd"
    assert gpus.device(0)["cordoned"]  # whoever has reset it lets it take processes again


def test_nvmls_verdict_is_answered(gpus: Gpus) -> None:
    gpus.become(1, action=4)
    found = gpus.answered(1, "recovery_action")
    assert found["text"] == "NVML says that it has to be drained and reset"
    assert found["answer"].startswith("drain, operation ")
    drains = gpus.node.client.get("/v1/operations", kind="drain")
    assert [(drain["requestor"], drain["subject"]["id"]) for drain in drains] == [("xmigd", "cuda:1")]
    audit = [each for each in gpus.node.client.get("/v1/audit") if each["action"] == "drain cuda:1"]
    assert sorted((each["entry"], each["outcome"]) for each in audit) == [("intent", None), ("outcome", "done")]


def test_a_lost_gpu_is_lost(gpus: Gpus) -> None:
    gpus.become(0, result=15)
    assert gpus.answered(0, "lost")["answer"] == "lose"
    device = gpus.device(0)
    assert (device["cordoned"], device["cordon_reason"]) == (True, "lost: the driver has lost it")


def test_an_xid_is_not_lost_while_the_database_takes_no_writes(gpus: Gpus) -> None:
    """The driver reports it once."""
    gpus.become(0)
    harness.wait_until(lambda: gpus.device(0)["memory_bytes"] is not None, "it is known")
    with contextlib.closing(sqlite3.connect(gpus.node.folder / "xmig.db", isolation_level=None)) as lock:
        lock.execute("BEGIN IMMEDIATE")
        gpus.kernel_says("NVRM: Xid (PCI:0000:65:00): 94, pid=1, name=python3, Contained ECC error")
        refused = "the database cannot be written"
        harness.wait_until(lambda: refused in gpus.node.log.read_text(), "the finding is refused")
        lock.execute("ROLLBACK")
    assert gpus.answered(0, "xid_94")["answer"] == "cordon"


def test_an_xid_is_counted_once(gpus: Gpus) -> None:
    """NVML and the kernel report it, and the kernel's log has lines of others."""
    gpus.become(0)
    harness.wait_until(lambda: gpus.device(0)["memory_bytes"] is not None, "it is known")
    gpus.xid(0, 31)  # of a program
    gpus.xid(0, 94)
    gpus.answered(0, "xid_94")
    gpus.kernel_says("NVRM: Xid (PCI:0000:65:00): 94, pid=1, name=python3, Contained ECC error")
    gpus.kernel_says("usb 1-1: new device")
    gpus.kernel_says("NVRM: Xid (PCI:0000:99:00): 79, a GPU of another machine")
    gpus.kernel_says("NVRM: Xid (PCI:0000:66:00): 63, a row is remapped")
    assert gpus.answered(1, "xid_63")["source"] == "kernel"
    assert [(each["code"], each["count"]) for each in gpus.findings(0)] == [("xid_94", 1)]
    assert gpus.findings(1)[0]["answer"] == "reported"


def test_nvml_that_hangs_is_a_finding(gpus: Gpus) -> None:
    """One device that does not answer keeps the other from nothing."""
    gpus.become(0, result=-1)
    gpus.become(1, failed=1)
    assert gpus.answered(1, "remap_failed")["answer"] == "nothing: it is the only device that takes processes"
    assert gpus.answered(0, "silent")["rung"] == "cordon"
    assert (gpus.device(0)["state"], gpus.device(0)["why"]) == ("unhealthy", "NVML does not answer")


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def node(native_dir: Path) -> Iterator[Node]:
    with harness.own_node(native_dir, devices="cpu:0,cpu:1", port=-1) as node:
        yield node


Start = Callable[[str], Program]


@pytest.fixture
def start(node: Node, kernels: Path) -> Start:
    def begin(device: str) -> Program:
        program = harness.start(node, PROGRAMS / "stepwise.py", kernels=kernels, device=device)
        harness.go(program)
        harness.steps(program, 50)
        return program

    return begin


def report(node: Node, device: str, **body: Any) -> dict[str, Any]:
    return dict(node.client.post(f"/v1/devices/{device}/findings", body))


def test_a_drain_moves_programs_while_they_run(node: Node, start: Start) -> None:
    program, other = start("cpu:0"), start("cpu:1")
    found = report(node, "cpu:0", xid=48)
    assert found["answer"].startswith("drain, operation ")
    harness.wait_until(lambda: (program.info() or {})["device"] == "cpu:1", "it has moved")
    assert harness.steps(program, 50) == harness.steps(other, 50)
    again = report(node, "cpu:0", xid=48)
    assert (again["id"], again["count"]) == (found["id"], 2)
    assert len(node.client.get("/v1/operations", kind="drain")) == 1

    # The last device is left as it is.
    last = report(node, "cpu:1", xid=48)
    assert last["answer"] == "nothing: it is the only device that takes processes"
    assert harness.steps(program, 50) == harness.steps(other, 50)

    # Whoever uncordons it has seen to it.
    node.client.patch("/v1/devices/cpu:0", {"cordoned": False}, "*")
    device = node.client.get("/v1/devices/cpu:0")
    assert (device["state"], device["health"], device["findings"]) == ("ready", "fine", [])
    assert node.client.get("/v1/devices/cpu:0/findings")[0]["closed_at"] is not None
    for each in (program, other):
        harness.output(each)


def test_the_policy_and_the_breaker_bound_the_answer(node: Node, start: Start) -> None:
    program = start("cpu:0")
    node.client.patch("/v1/policies/devices", {"health_rung": 0}, "*")
    assert report(node, "cpu:0", xid=79)["answer"] == "reported: the policy allows no more"
    assert not node.client.get("/v1/devices/cpu:0")["cordoned"]
    node.client.patch("/v1/policies/devices", {"health_rung": 1}, "*")
    assert report(node, "cpu:0", xid=95)["answer"] == "cordon"
    assert (program.info() or {})["device"] == "cpu:0"
    node.client.patch("/v1/policies/devices", {"health_rung": None}, "*")
    node.client.patch("/v1/policies/circuit-breaker", {"max_actions": 1}, "*")
    node.client.patch("/v1/devices/cpu:0", {"cordoned": False}, "*")
    report(node, "cpu:0", xid=94)  # one too many
    assert "circuit breaker" in report(node, "cpu:0", xid=95)["answer"]
    assert (program.info() or {})["device"] == "cpu:0"
    harness.output(program)


def test_findings_outlive_the_daemon(node: Node) -> None:
    own = {"code": "fan", "text": "a fan stands still", "rung": "cordon"}
    found = report(node, "cpu:1", **own)
    assert (found["answer"], found["code"]) == ("cordon", "fan")
    node.kill()
    node.start()
    device = node.client.get("/v1/devices/cpu:1")
    assert (device["health"], device["findings"], device["cordoned"]) == ("cordon", ["a fan stands still"], True)
    assert report(node, "cpu:1", **own)["count"] == 2


def test_what_a_daemon_could_not_answer_any_more_is_answered_by_the_next(node: Node, tmp_path: Path) -> None:
    node.kill()
    place = tmp_path / "failpoint"
    node.environment["XMIG_FAILPOINT"] = str(place)
    node.start()
    place.write_text("write.committed health.findings")
    with pytest.raises(XmigError):
        report(node, "cpu:1", xid=94)
    place.unlink()
    node.start()
    harness.wait_until(
        lambda: [each["answer"] for each in node.client.get("/v1/devices/cpu:1/findings")] == ["cordon"],
        "it is answered",
    )
    assert node.client.get("/v1/devices/cpu:1")["cordoned"]


@pytest.mark.parametrize(
    ("device", "body", "status", "code"),
    [
        ("cpu:9", {"xid": 79}, 404, "not_found"),
        ("cpu:0", {}, 422, "invalid"),
        ("cpu:0", {"xid": 13}, 422, "not_of_the_device"),
        ("cpu:0", {"xid": 79, "rung": "report"}, 422, "invalid"),
        ("cpu:0", {"code": "fan", "text": "\x1b[2J", "rung": "report"}, 422, "invalid"),
        ("cpu:0", {"code": "fan", "text": "stands still"}, 422, "invalid"),
        ("cpu:0", {"code": "fan", "text": "stands still", "rung": "explode"}, 422, "invalid"),
    ],
)
def test_bad_reports(daemon: Node, device: str, body: dict[str, Any], status: int, code: str) -> None:
    refused = refusal(daemon, f"/v1/devices/{device}/findings", body)
    assert (refused["status"], refused["code"]) == (status, code)
