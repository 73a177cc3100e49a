"""A node whose first device is shared through MPS: a stand-in for NVIDIA's control daemon, real servers of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.recovery.conftest import PROGRAMS, kernels, outputs
from xmigd.demo.node import Node, Program

__all__ = ["STANDIN", "Starter", "clients_of", "kernels", "mps_of", "outputs", "sharing", "standing_in"]

STANDIN = Path(__file__).parent / "bin"
Starter = Callable[..., Program]
SETTINGS: dict[str, Any] = {"mps_devices": "cpu:0", "port": -1}


@pytest.fixture(scope="session", autouse=True)
def standing_in() -> Iterator[None]:
    """Daemons find the stand-in first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{STANDIN}:{os.environ['PATH']}")
        yield


@pytest.fixture
def node(native_dir: Path) -> Iterator[Node]:
    with harness.own_node(native_dir, **SETTINGS) as node:
        yield node
        started = [int(next(iter(json.loads(each.read_text())))) for each in (node.folder / "mps").glob("*.json")]
    for pid in started:  # a daemon leaves what has clients to the next one, and here there is none
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


@pytest.fixture
def start(node: Node, kernels: Path) -> Starter:
    def starter(name: str, *arguments: object, **options: Any) -> Program:
        options = {"device": "cpu:0"} | options
        return harness.start(node, PROGRAMS / f"{name}.py", *arguments, kernels=kernels, **options)

    return starter


def sharing(program: Program) -> dict[str, Any]:
    """What the daemon says of how its only process shares its device."""
    (process,) = program.node.client.get(f"/v1/jobs/{program.job}/sharing")["processes"]
    return dict(process)


def environment(pid: int) -> dict[str, str]:
    variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(variable.split("=", 1) for variable in variables if variable)


def mps_of(program: Program) -> int | None:
    """The number of the MPS that its server is a client of."""
    pid = program.until("running")["server_pid"]
    pipe = environment(pid).get("CUDA_MPS_PIPE_DIRECTORY")
    return None if pipe is None else int(Path(pipe).parent.name.rpartition(".")[2])


def clients_of(node: Node) -> dict[int, Path]:
    """The folders of what there is, by number."""
    return {int(each.stem.rpartition(".")[2]): each.with_suffix("") for each in (node.folder / "mps").glob("*.json")}
