"""doctor on nodes that are made up, each with one thing wrong; and on this one."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.cli.conftest import ctl
from tests.daemon.conftest import make_node, node, peer_native
from tests.daemon.node import Node as PeerNode
from xmigd.demo.node import Node
from xmigd.doctor import Finding, System, checks, examine, gpu, installation, machine, tools
from xmigd.settings import Settings

__all__ = ["make_node", "node", "peer_native"]

GIB = 1 << 30


@dataclass
class MadeUp(System):
    """A node on which all is well until a test changes it."""

    release: str = "6.6.0-openeuler"
    limits: dict[str, int | None] = field(default_factory=lambda: {"NOFILE": 1 << 20, "MEMLOCK": None})
    refused: str | None = None
    free: dict[str, int] = field(default_factory=dict)
    reported: dict[str, tuple[int, str]] = field(
        default_factory=lambda: {"criu": (0, "Version: 4.1.1\nGitID: x"), "cc": (0, "gcc 12")}
    )
    modules: tuple[str, ...] = ("pycriu",)
    library: Any = None

    def kernel(self) -> str:
        return self.release

    def limit(self, name: Literal["NOFILE", "MEMLOCK"]) -> int | None:
        return self.limits[name]

    def try_memfd(self) -> str | None:
        return self.refused

    def free_bytes(self, path: Path) -> int | None:
        return self.free.get(path.name, 100 * GIB)

    def command(self, words: Sequence[str], timeout: float = 10) -> tuple[int, str] | None:
        return self.reported.get(words[0])

    def has_module(self, name: str) -> bool:
        return name in self.modules

    def nvml(self) -> Any:
        if self.library is None:
            raise OSError("NVML Shared Library Not Found")
        return self.library

    def python_header(self) -> Path:
        return self.root / "Python.h"

    def put(self, path: str, text: str) -> None:
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


@pytest.fixture
def system(tmp_path: Path) -> MadeUp:
    made = MadeUp(root=tmp_path, environment={})
    made.put("/proc/meminfo", "MemTotal: 268435456 kB\nMemAvailable: 134217728 kB\nHugePages_Free: 0\n"
             "Hugepagesize: 2048 kB\n")  # fmt: skip
    made.put("/sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size advise [never] deny force")
    made.put("/proc/sys/kernel/yama/ptrace_scope", "1")
    for folder in ("/run/systemd/system", "/dev/shm"):
        (tmp_path / folder[1:]).mkdir(parents=True)
    made.put("/Python.h", "")
    return made


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(runtime_dir=tmp_path / "xmig", database=tmp_path / "state" / "xmig.db")


GPU = Settings(devices="cuda:0,cuda:1")


class NVMLError(Exception):
    pass


def library(cuda: int = 13000, version: str = "580.65", mode: int = 0, mig: int | None = 0, count: int = 2) -> Any:
    """As much of pynvml as is queried."""

    def mig_mode(_: Any) -> list[int]:
        if mig is None:
            raise NVMLError("Not Supported")
        return [mig, mig]

    return types.SimpleNamespace(
        nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlSystemGetDriverVersion=lambda: version,
        nvmlSystemGetCudaDriverVersion=lambda: cuda, nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=lambda index: index, nvmlDeviceGetName=lambda _: b"NVIDIA H200",
        nvmlDeviceGetComputeMode=lambda _: mode, nvmlDeviceGetMigMode=mig_mode, NVMLError=NVMLError,
        nvmlDeviceGetMemoryInfo=lambda _: types.SimpleNamespace(free=100 * GIB, total=141 * GIB),
        NVML_COMPUTEMODE_PROHIBITED=2, NVML_COMPUTEMODE_EXCLUSIVE_PROCESS=3, NVML_DEVICE_MIG_ENABLE=1,
    )  # fmt: skip


def only(findings: Any, check: str) -> Finding:
    found: list[Finding] = [finding for finding in findings if finding.check == check]
    assert len(found) == 1, found
    return found[0]


def states(check: checks.Check, system: System, settings: Settings) -> list[str]:
    findings = list(check(system, settings))
    # Whatever is not well comes with what to do.
    assert all(finding.hint for finding in findings if finding.state in ("warning", "failing"))
    return [finding.state for finding in findings]


def test_a_node_on_which_all_is_well(system: MadeUp) -> None:
    system.library = library()
    for check in (*checks.CHECKS[:9], tools.criu, tools.compiler):
        assert set(states(check, system, GPU)) == {"ok"}, check.__name__


@pytest.mark.parametrize(
    ("release", "state"), [("5.10.0", "failing"), ("5.14.0", "ok"), ("6.6", "ok"), ("x", "failing")]
)
def test_kernels(system: MadeUp, release: str, state: str) -> None:
    system.release = release
    assert states(machine.kernel, system, GPU) == [state]


def test_memfds_that_are_forbidden(system: MadeUp) -> None:
    system.refused = "Operation not permitted"
    assert states(machine.kernel, system, GPU) == ["failing"]


@pytest.mark.parametrize(
    ("limit", "on_gpus", "on_cpu"),
    [(1024, "failing", "failing"), (20_000, "warning", "ok"), (1 << 20, "ok", "ok"), (None, "ok", "ok")],
)
def test_open_files(system: MadeUp, limit: int | None, on_gpus: str, on_cpu: str) -> None:
    system.limits["NOFILE"] = limit
    assert states(machine.descriptors, system, GPU) == [on_gpus]
    assert states(machine.descriptors, system, Settings()) == [on_cpu]


def test_locked_memory(system: MadeUp) -> None:
    system.limits["MEMLOCK"] = 8 << 20
    assert states(machine.locked_memory, system, GPU) == ["warning"]
    assert states(machine.locked_memory, system, Settings()) == ["ok"]


def test_memory(system: MadeUp) -> None:
    system.put("/proc/meminfo", "MemAvailable: 1048576 kB\n")
    system.free["shm"] = 64 << 20
    assert states(machine.shared_memory, system, GPU) == ["warning", "warning"]
    system.put("/proc/meminfo", "MemAvailable: 65536 kB\n")
    (system.root / "dev/shm").rmdir()
    assert states(machine.shared_memory, system, GPU) == ["failing", "warning"]
    (system.root / "proc/meminfo").unlink()
    assert states(machine.shared_memory, system, GPU) == ["warning", "warning"]


def test_huge_pages_that_nobody_uses(system: MadeUp) -> None:
    system.put("/proc/meminfo", "MemTotal: 8388608 kB\nHugePages_Free: 2048\nHugepagesize: 2048 kB\n")
    assert states(machine.huge_pages, system, GPU) == ["warning"]


def test_ptrace_and_systemd(system: MadeUp) -> None:
    system.put("/proc/sys/kernel/yama/ptrace_scope", "3")
    (system.root / "run/systemd/system").rmdir()
    assert states(machine.ptrace, system, GPU) == ["warning"]
    assert states(machine.service_manager, system, GPU) == ["note"]


def test_no_driver(system: MadeUp) -> None:
    assert states(gpu.driver, system, GPU) == ["failing"]
    assert states(gpu.driver, system, Settings()) == ["ok"]
    assert states(gpu.devices, system, GPU) == []


@pytest.mark.parametrize(
    ("cuda", "version", "expected"),
    [(12020, "535.1", ["failing"]), (12040, "550.54", ["ok", "note"]), (12080, "570.1", ["ok", "note"]),
     (13000, "580.1", ["ok", "ok"])],
)  # fmt: skip
def test_drivers(system: MadeUp, cuda: int, version: str, expected: list[str]) -> None:
    system.library = library(cuda, version)
    assert states(gpu.driver, system, GPU) == expected


@pytest.mark.parametrize(
    ("of", "state"),
    [
        (library(mode=3), "failing"),
        (library(mode=2), "failing"),
        (library(mig=1), "warning"),
        (library(mig=None), "ok"),
    ],
)
def test_gpus_that_cannot_be_shared(system: MadeUp, of: Any, state: str) -> None:
    system.library = of
    assert states(gpu.devices, system, GPU) == [state, state]


def test_a_gpu_that_is_not_there(system: MadeUp) -> None:
    system.library = library(count=1)
    assert states(gpu.devices, system, GPU) == ["ok", "failing"]


@pytest.mark.parametrize(
    ("reported", "modules", "state"),
    [(None, (), "note"), ("Version: 3.17.1", ("pycriu",), "warning"), ("Version: 4.0", (), "warning"),
     ("Version: 4.0", ("pycriu",), "ok")],
)  # fmt: skip
def test_criu(system: MadeUp, reported: str | None, modules: tuple[str, ...], state: str) -> None:
    system.reported = {} if reported is None else {"criu": (0, reported)}
    system.modules = modules
    assert states(tools.criu, system, GPU) == [state]


def test_no_compiler(system: MadeUp) -> None:
    system.reported = {}
    (system.root / "Python.h").unlink()
    assert states(tools.compiler, system, GPU) == ["note"]


def test_no_native_part(system: MadeUp, settings: Settings) -> None:
    settings.native_dir = system.root
    assert states(installation.native, system, settings) == ["failing"]


def test_sockets_that_others_could_replace(system: MadeUp, settings: Settings) -> None:
    assert states(installation.runtime_directory, system, settings) == ["note"]
    settings.runtime_dir.mkdir(mode=0o755)
    assert states(installation.runtime_directory, system, settings) == ["ok"]
    settings.runtime_dir.chmod(0o777)
    assert states(installation.runtime_directory, system, settings) == ["failing"]


def test_databases(system: MadeUp, settings: Settings) -> None:
    path = settings.database
    assert states(installation.database, system, settings) == ["note"]
    path.parent.mkdir(mode=0o755)
    for revision, state in (("0001", "note"), ("9999", "failing")):
        path.unlink(missing_ok=True)
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
            connection.execute("INSERT INTO alembic_version VALUES (?)", (revision,))
        connection.close()
        path.chmod(0o600)
        assert states(installation.database, system, settings) == [state]
    path.chmod(0o644)
    assert states(installation.database, system, settings) == ["warning", "failing"]
    path.parent.chmod(0o700)
    path.write_bytes(b"not a database, but long enough to be looked at" * 100)
    assert states(installation.database, system, settings) == ["failing"]


@pytest.mark.parametrize(("free", "state"), [(1 << 20, "failing"), (500 << 20, "warning"), (2 * GIB, "ok")])
def test_disks(system: MadeUp, settings: Settings, free: int, state: str) -> None:
    system.free["state"] = free
    assert states(installation.disk, system, settings) == [state]


def test_a_check_that_fails_is_a_finding(system: MadeUp, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("surprise")

    monkeypatch.setattr(checks, "CHECKS", (broken, machine.kernel))
    findings = examine(system, settings)
    assert [finding.state for finding in findings] == ["warning", "ok"]
    assert "surprise" in findings[0].text


def test_here_without_a_daemon(system: MadeUp, settings: Settings) -> None:
    assert states(installation.daemon, system, settings) == ["warning"]
    settings.runtime_dir.mkdir()
    settings.api_socket.touch()
    assert states(installation.daemon, system, settings) == ["failing"]


def test_this_node(daemon: Node) -> None:
    """A real daemon, and a program that computes under it."""
    done = subprocess.run([sys.executable, "-m", "xmigd.cli", "doctor", "--try", "-o", "json"], env=daemon.environment,
                          capture_output=True, text=True, timeout=120, check=False)  # fmt: skip
    findings = [Finding(**entry) for entry in json.loads(done.stdout)]
    for check in ("native part", "sockets", "database", "daemon", "a program"):
        assert only(findings, check).state == "ok", only(findings, check)
    assert done.returncode == any(finding.state == "failing" for finding in findings)


def test_a_gpu_that_is_missing(node: PeerNode) -> None:
    done = ctl(node, "doctor", XMIG_DEVICES="cuda:0")
    assert done.returncode == 1
    assert "failing" in done.stdout
    assert "→ install the driver" in done.stdout
    done = ctl(node, "doctor")
    assert "xmigd 0.1.0, pid" in done.stdout


@pytest.mark.parametrize(
    ("release", "command"),
    [
        ("ID=debian\n", "apt-get install"), ("ID=linuxmint\nID_LIKE=\"ubuntu debian\"\n", "apt-get install"),
        ("ID=\"openEuler\"\n", "dnf install"), ("ID=\"rocky\"\nID_LIKE=\"rhel centos fedora\"\n", "dnf install"),
        ("ID=\"opensuse-leap\"\nID_LIKE=\"suse opensuse\"\n", "zypper install"), ("ID=arch\n", "pacman -S"),
        ("ID=plan9\n", "this distribution's package manager"), (None, "this distribution's package manager"),
    ],
)  # fmt: skip
def test_what_installs_something_here(system: MadeUp, release: str | None, command: str) -> None:
    """No hint names the package manager of another distribution."""
    if release is not None:
        system.put("/etc/os-release", release)
    system.reported, system.modules = {}, ()
    system.put("/Python.h", "")
    hints = [finding.hint for check in (tools.criu, tools.compiler) for finding in check(system, GPU)]
    system.reported = {"criu": (0, "Version: 4.0")}
    hints += [finding.hint for finding in tools.criu(system, GPU)]
    assert len(hints) == 3
    for hint in hints:
        assert command in hint
        assert [
            other for other in ("apt-get", "dnf", "zypper", "pacman") if other in hint and other not in command
        ] == []
