"""A node with two GPUs that are a folder: tests/driver/standin.c in the place of NVIDIA's driver."""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness import COMPILER
from xmigd.driver_checkpoint import node as gpus
from xmigd.driver_checkpoint.engine import Engine, Journey
from xmigd.driver_checkpoint.link import Helper
from xmigd.driver_checkpoint.machine import Checkpointing, Kind

GIB = 1 << 30
FIRST, SECOND = (f"GPU-{n}1111111-2222-3333-4444-555555555555" for n in (1, 2))
STATES = ("running", "locked", "checkpointed", "failed")


@dataclass
class Driver:
    folder: Path  # what it knows
    libraries: Path

    def gpu(self, *rows: str) -> None:
        (self.folder / "gpus").write_text("".join(f"{row}\n" for row in rows))

    def program(self, pid: int, gpu: str = FIRST, size: int = 8 * GIB, state: int = 0) -> None:
        with (self.folder / "pids").open("a") as pids:
            pids.write(f"{pid}\n")
        (self.folder / str(pid)).write_text(f"{state} {gpu} {size}\n")

    def fail(self, call: str, error: int, state: str = "-") -> None:
        with (self.folder / "fail").open("a") as failures:
            failures.write(f"{call} {error} {state}\n")

    def where(self, pid: int) -> tuple[str, str]:
        """The program's state and GPU."""
        state, gpu, _ = (self.folder / str(pid)).read_text().split()
        return STATES[int(state)], gpu

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def environment(self) -> dict[str, str]:
        return {"STANDIN": str(self.folder), "LD_LIBRARY_PATH": str(self.libraries)}


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    folder.chmod(0o755)
    for parent in folder.parents[:3]:
        parent.chmod(parent.stat().st_mode | 0o711)
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        command = [
            COMPILER,
            "-std=c11",
            "-O1",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-shared",
            "-fPIC",
            f"-Wl,-soname,{name}",
        ]
        subprocess.run([*command, "-o", folder / name, Path(__file__).parent / "standin.c"], check=True)
    return folder


@pytest.fixture
def driver(libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    folder = tmp_path / "standin"
    folder.mkdir()
    made = Driver(folder, libraries)
    made.gpu(f"{FIRST} {80 * GIB} 0 0 0 NVIDIA H200", f"{SECOND} {80 * GIB} 0 0 0 NVIDIA H200")
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    # This process's NVML: whoever asks for the name gets what has it already.
    ctypes.CDLL(str(libraries / "libnvidia-ml.so.1"), ctypes.RTLD_GLOBAL)
    return made


@pytest.fixture
def program(driver: Driver) -> Iterator[int]:
    """A program that "uses CUDA": 8 GiB of the first GPU."""
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    driver.program(child.pid)
    yield child.pid
    child.kill()
    child.communicate()


class Kept(Helper):
    """A helper, and what a test wants to happen to it."""

    def __init__(self) -> None:
        self.standin = Path(os.environ["STANDIN"])
        super().__init__(os.geteuid(), self.standin / "lock")
        self.dies_at: str | None = None

    async def call(self, name: str, pid: int, **arguments: object) -> dict[str, object]:
        if name != self.dies_at:
            return await super().call(name, pid, **arguments)
        self.dies_at = None
        slow, calls = self.standin / "slow", self.standin / "calls"
        slow.write_text(name)
        requested = asyncio.ensure_future(super().call(name, pid, **arguments))
        while not calls.exists() or name not in [line.split()[0] for line in calls.read_text().splitlines()]:
            await asyncio.sleep(0.001)
        assert self.pid is not None
        helper = os.pidfd_open(self.pid)
        os.kill(self.pid, 9)
        select.select([helper], [], [])
        os.close(helper)
        slow.unlink()
        return await requested


def travel(
    pid: int, *, kind: Kind = "move", dies_at: str | None = None, cancel_in: str | None = None,
    ends_in: str | None = None, abandoned: bool = False,
    host: int = 64 * GIB, source: str = FIRST, target: str = SECOND,
) -> tuple[Checkpointing, Journey]:  # fmt: skip
    """From the first GPU to the second, with a helper that is started for it."""
    found = gpus.program(pid)
    assert found is not None
    journey = Journey(kind, found, source, target, 8 * GIB)

    def changed(seen: Journey) -> None:
        if seen.machine.phase == cancel_in:
            seen.machine.cancel("somebody")
        if seen.machine.phase == ends_in:
            os.kill(pid, 9)
            os.waitpid(pid, 0)

    async def main() -> None:
        helper = Kept()
        helper.dies_at = dies_at
        try:
            await Engine(helper, host_memory=lambda: host, wait=0.01).travel(journey, changed, abandoned=abandoned)
        finally:
            helper.kill()

    asyncio.run(main())
    return journey.machine, journey
