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


def bus_id(daemon: Node) -> str:
    """Of the first device, as the kernel writes it."""
    code = "import pynvml; pynvml.nvmlInit(); pci = pynvml.nvmlDeviceGetPciInfo(pynvml.nvmlDeviceGetHandleByIndex(0)); "
    code += "print(f'{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0')"
    return harness.output(start(daemon, "-c", code)).strip()


@harness.needs_root
@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {"vendor": "0x10de", "current_link_speed": "16.0 GT/s PCIe", "current_link_width": "8",
             "max_link_speed": "32.0 GT/s PCIe", "max_link_width": "16"},
            ["570.86.15", "4", "8", "5", "16"],
        ),
        (
            {"vendor": "0x10de", "current_link_speed": "Unknown", "current_link_width": "0", "max_link_width": "255"},
            ["570.86.15", "-", "-", "-", "-"],
        ),
        # A device of another kind that has this address.
        ({"vendor": "0x8086", "current_link_speed": "16.0 GT/s PCIe"}, ["570.86.15", "-", "-", "-", "-"]),
        (None, ["-"] * 5),
    ],
    ids=["a GPU", "not known", "another device", "no driver"],
)  # fmt: skip
def test_what_the_kernel_shows(daemon: Node, tmp_path: Path, files: dict[str, str] | None, expected: list[str]) -> None:
    """JAX prints an error for a device whose link is not known."""
    modules, devices = tmp_path / "modules", tmp_path / "devices"
    device = devices / bus_id(daemon)
    device.mkdir(parents=True)
    modules.mkdir()
    if files is not None:
        (modules / "nvidia").mkdir()
        (modules / "nvidia" / "version").write_text("570.86.15\n")
        for name, text in files.items():
            (device / name).write_text(f"{text}\n")
    mounts = f"mount --bind {modules} /sys/module && mount --bind {devices} /sys/bus/pci/devices"
    script = f'{mounts} && exec "$0" "$@"'
    words = ["unshare", "--mount", "sh", "-c", script, sys.executable, str(PROGRAMS / "links.py"), *expected]
    harness.output(daemon.program(words, device="cpu:0,1", stderr=-1))


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
