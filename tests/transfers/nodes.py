"""Nodes that programs move between, with daemons that die at a given place."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests import forked
from tests.criu.test_client_dump import criu_or_skip
from tests.harness import wait_until
from xmigd.demo import nodes
from xmigd.demo.namespaces import NetworkNode
from xmigd.demo.node import Child, Program
from xmigd.ids import new_id

CLIENT = Path(__file__).with_name("client.py")
STEPS = 60  # if nothing else is wanted


class TransferNode(nodes.NamespacedNode):
    def popen(self, log: IO[bytes]) -> Child:
        return nodes.Inside(forked.begin(self, log, self.folder / "xmig.db", namespaces=self.namespaces))

    def start_program(
        self, native_dir: Path, output: Path, pause: float = 0.02, *, steps: int = STEPS,
        request: dict[str, Any] | None = None,
    ) -> Program:  # fmt: skip
        """client.py, which writes to this file. `request`: what its job is to have."""
        command: list[str | Path] = [sys.executable, CLIENT, output, str(steps), str(pause)]
        kernels = str(native_dir / "xmig_kernels.so")
        return self.begin(command, output.with_suffix(".out"), request=request, KERNELS=kernels)

    def begin_movable(
        self, command: Sequence[str | Path], output: Path, *options: str, name: str = "", **environment: str
    ) -> Program:
        """Under `xmigctl run --movable`, which runs on this node. What both print goes to `output`."""
        name = name or f"{output.stem}-{new_id()[:8]}"
        words = [sys.executable, "-m", "xmigd.cli", "run", "--movable", *options, "--name", name, "--", *command]
        opened: list[str | Path] = ["sh", "-c", 'out=$1; shift; exec "$@" < /dev/null > "$out" 2>&1', "sh", output]
        variables = self.environment | self._imported() | environment
        process = self.entering([*opened, *words], variables, stdin=subprocess.DEVNULL)
        self._programs.append(process)
        wait_until(lambda: bool(self.jobs(name)) or process.poll() is not None, f"job {name} is known")
        assert self.jobs(name), output.read_text()
        return Program(self, self.jobs(name)[0]["id"], process)

    def jobs(self, name: str) -> list[dict[str, Any]]:
        """Those of this name, the newest first."""
        return [one for one in self.client.get("/v1/jobs") if one["name"] == name]

    def ctl(self, *words: str) -> str:
        """What xmigctl prints; it succeeds."""
        done = self._ctl(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def refused(self, *words: str) -> str:
        """Why xmigctl does not do it."""
        done = self._ctl(*words)
        assert done.returncode != 0, done.stdout
        return done.stderr

    def _ctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "xmigd.cli", *words]
        environment = os.environ | {"XMIG_RUNTIME_DIR": str(self.folder), "COLUMNS": "200"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    def dies_at(self, point: str) -> None:
        """At this place (xmigd/failpoints.py)."""
        (self.folder / "point").write_text(point)

    def has_died(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def starts_again(self) -> None:
        (self.folder / "point").unlink(missing_ok=True)
        if self.process is not None:
            self.process.wait(60)
            self.process = None
        self.start()


@contextlib.contextmanager
def pair(
    native_dir: Path, *, of_each: Mapping[str, Mapping[str, object]] | None = None, **settings: object
) -> Iterator[list[TransferNode]]:
    """Two nodes that know each other and run. `of_each`: settings by node, beside those that both have."""
    with several(2, native_dir, of_each=of_each, **settings) as both:
        yield both


@contextlib.contextmanager
def several(
    count: int, native_dir: Path, *, of_each: Mapping[str, Mapping[str, object]] | None = None, **settings: object
) -> Iterator[list[TransferNode]]:
    """The same, of so many."""

    class Node(TransferNode):
        def __init__(
            self, folder: Path, name: str, network: NetworkNode, place: Path, native_dir: Path = native_dir,
        ) -> None:  # fmt: skip
            super().__init__(
                folder, name, network, place, failpoint=place / "point", device_memory=1 << 28, criu=criu_or_skip(),
                native_dir=native_dir, **settings,
            )  # fmt: skip

    with nodes.several(count, Node, of_each=of_each or {}) as made:
        yield list(made)


def let_end(output: Path) -> None:
    output.with_suffix(".go").touch()


def wait_for_lines(output: Path, count: int) -> None:
    end = time.monotonic() + 60
    while not output.exists() or len(output.read_text().splitlines()) < count:
        assert time.monotonic() < end, f"{output} has fewer than {count} lines"
        time.sleep(0.005)
