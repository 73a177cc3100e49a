"""Ranks of one program on several nodes: networks of their own, a daemon in each, all of which know each other."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests import harness
from tests.namespaces import NetworkNode, nodes
from tests.peers.nodes import PeerNode, acquainted
from xmigd.demo.node import Program

PORT = 7460
PROGRAMS = Path(__file__).parent / "programs"


class RankNode(PeerNode):
    """A daemon and the network that it is in."""

    executed = None

    def __init__(self, folder: Path, name: str, native_dir: Path, network: NetworkNode, **settings: object) -> None:
        self.network = network
        super().__init__(
            folder, name, native_dir, network=network, port=PORT,
            **({"devices": "cpu:0,cpu:1", "device_memory": 1 << 30} | settings),
        )  # fmt: skip


@contextlib.contextmanager
def cluster(
    native_dir: Path, count: int, *, of_each: Mapping[str, Mapping[str, object]] = MappingProxyType({}),
    **settings: object,
) -> Iterator[list[RankNode]]:  # fmt: skip
    """`of_each`: settings by node, beside those that all have."""
    with nodes(count) as networks, contextlib.ExitStack() as stack:
        made = []
        for network, name in zip(networks, "abcdefgh", strict=False):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="xmig-")))
            its = settings | dict(of_each.get(name, {}))
            made.append(stack.enter_context(RankNode(folder, name, native_dir, network, **its)))
        acquainted(*made)
        yield made


def all_started(nodes: list[RankNode]) -> list[RankNode]:
    """Also those that a test which failed has killed."""
    for one in nodes:
        if one.process is None:
            one.start()
    return nodes


class Ranks:
    """Of one program, the same number on each node."""

    def __init__(
        self, on: list[RankNode], each: int, folder: Path, name: str, *arguments: object, **environment: str
    ) -> None:
        self.nodes = on
        self.count = each * len(on)
        names = [one.name for one in on]
        command = [sys.executable, PROGRAMS / "launch.py", self.count, folder, PROGRAMS / f"{name}.py", *arguments]
        self.programs: list[Program] = []
        for number, one in enumerate(on):
            part = {"OF_NODE": f"{each * number}-{each * (number + 1) - 1}"} | environment
            words = [*one.network.command, *map(str, command)]
            self.programs.append(one.program(words, name=name, nodes=names, environment=part))

    def processes(self) -> list[tuple[RankNode, dict[str, Any]]]:
        """With the node that each is on."""
        found = []
        for one, program in zip(self.nodes, self.programs, strict=True):
            with contextlib.suppress(Exception):  # its daemon may not be there
                found += [(one, row) for row in one.client.get("/v1/processes", job=program.job)]
        return found

    def all_run(self) -> bool:
        assert all(one.process.poll() is None for one in self.programs), self.output()
        found = self.processes()
        return len(found) >= self.count and all(row["state"] == "running" for _, row in found)

    def until_all_run(self, what: str = "all ranks run", timeout: float = 60) -> None:
        harness.wait_until(self.all_run, f"{what}: {[row['state'] for _, row in self.processes()]}", timeout)

    def snapshots(self) -> int:
        """That every rank has at least."""
        return min((row["snapshots"] or 0 for _, row in self.processes()), default=0)

    def recoveries(self) -> int:
        return min((row["recoveries"] for _, row in self.processes()), default=0)

    def output(self) -> str:
        ended = [one for one in self.programs if one.process.poll() is not None]
        return "\n".join(f"{one.process.stdout.read() if one.process.stdout else ''} {one.lines()}" for one in ended)

    def lines(self, timeout: float = 120) -> list[str]:
        """What all ranks printed. Fails with it if one did not end well."""
        lines: list[str] = []
        for one in self.programs:
            try:
                out, _ = one.process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                found = "\n".join(f"{where.name}: {row}" for where, row in self.processes())
                raise AssertionError(f"they have not ended: {found}") from None
            assert one.process.returncode == 0, out[-6000:] + "\n".join(map(str, one.lines()))
            lines += [line for line in out.splitlines() if " ended with " not in line]
        return lines


def killed_and_found_again(two: list[RankNode], which: int) -> None:
    """The daemon of this one of two nodes, with its processes and its peer."""
    two[which].kill()
    two[which].start()
    harness.found_again(two[which])
    two[1 - which].until(two[which].name, "connected")
    time.sleep(1)  # until it is known who belongs together


def kill(*servers: int | None) -> None:
    for server in servers:
        if server:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server, signal.SIGKILL)
