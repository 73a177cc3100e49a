"""Programs that ask NVML: the shim's libnvidia-ml.so.1 answers, and opens nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests import harness
from xmigd.demo.node import Node, Program
from xmigd.native import find_shims

PROGRAMS = Path(__file__).parent / "programs"
PROBE = "xmig-nvml-probe"


def start(
    node: Node, *command: str | Path, device: str = "cpu:0,1", environment: Mapping[str, str] | None = None
) -> Program:
    return node.program([sys.executable, *command], device=device, environment=environment, stderr=-1)


def commands(node: Node, program: Program) -> list[str]:
    """The programs of its job that shook hands: the first word of each."""
    rows = node.client.get("/v1/processes", live=False, job=program.job)
    return sorted(Path(row["command"].split(" ", 1)[0]).name for row in rows)


def test_devices_are_the_drivers(daemon: Node, native_dir: Path) -> None:
    nvml = find_shims(native_dir)[1]
    program = start(daemon, PROGRAMS / "devices.py", environment={"NVML_SHIM": str(nvml.resolve())})
    assert harness.output(program) == "devices 2\n"


def test_errors_and_what_is_not_supported(daemon: Node) -> None:
    harness.output(start(daemon, PROGRAMS / "answers.py"))


@pytest.mark.parametrize("when", ["requested", "unasked"])
def test_forked_children(daemon: Node, when: str) -> None:
    harness.output(start(daemon, PROGRAMS / "forks.py", when, device="cpu:0"))


INIT = "import pynvml; pynvml.nvmlInit(); "
COUNT = "assert all(pynvml.nvmlDeviceGetCount() == 2 for _ in range(3)); "


@pytest.mark.parametrize(
    ("code", "servers"),
    [
        (INIT, []),
        (INIT + COUNT, [PROBE]),
        ("import ctypes; assert ctypes.CDLL('libcuda.so.1').cuInit(0) == 0; " + INIT + COUNT, ["program"]),
    ],
    ids=["init", "count", "cuda"],
)
def test_who_takes_a_server(daemon: Node, code: str, servers: list[str]) -> None:
    program = start(daemon, "-c", code)
    harness.output(program)
    own = Path(sys.executable).name
    assert commands(daemon, program) == [own if name == "program" else name for name in servers]


def test_a_program_without_devices_takes_no_server(daemon: Node) -> None:
    """CUDA_VISIBLE_DEVICES hides all of them: NVML has none either, and nobody is queried."""
    code = INIT + "pynvml.nvmlDeviceGetCount()"
    program = start(daemon, "-c", code, environment={"CUDA_VISIBLE_DEVICES": ""})
    _, err = program.process.communicate(timeout=60)
    assert "NVMLError_DriverNotLoaded" in err
    assert commands(daemon, program) == []


def test_without_a_daemon(daemon: Node) -> None:
    code = INIT + "print(pynvml.nvmlSystemGetCudaDriverVersion() > 0); pynvml.nvmlDeviceGetCount()"
    reading, writing = os.pipe()
    status = os.fstat(writing)
    environment = {"XMIG_SOCKET": "/no/such/socket", "XMIG_STDERR": f"{status.st_dev}:{status.st_ino}"}
    program = daemon.program([sys.executable, "-c", code], environment=environment, stderr=writing)
    os.close(writing)
    assert program.process.communicate(timeout=60)[0] == "True\n"
    with open(reading) as reported:
        err = reported.read()
    assert "no xmigd answers at /no/such/socket" in err
    assert "NVMLError_DriverNotLoaded" in err
