"""Programs run in processes, natively or under a daemon, and what they read compared with what they mean."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.differential.interpreter import interpret
from tests.differential.program import Program
from xmigd.demo.node import Node
from xmigd.demo.node import Program as Job
from xmigd.errors import XmigError

HERE = Path(__file__).parent
RUNNER = HERE / "runner.py"
INCLUDE = HERE.parent.parent / "shim" / "include"
PATIENCE = 60.0  # seconds for one program, which takes milliseconds


@dataclass(frozen=True)
class Difference:
    """What a program did that it does not mean."""

    program: Program
    why: str

    @property
    def kind(self) -> str:
        """What it has in common with other failures of the same reason: the call that failed and how."""
        return "read" if "read something else" in self.why else self.why.rpartition("call")[2].partition(",")[2][:60]

    def __str__(self) -> str:
        return f"seed {self.program.seed}: {self.why}"


@dataclass(frozen=True)
class Place:
    """Where programs run: natively if there is no node. ``devices``: of a job, as the daemon names them."""

    kernels: Path
    node: Node | None = None
    devices: str = ""
    python: str = sys.executable
    processes: int = 1


class NotStarted(XmigError):
    """A process that was to run programs did not get so far."""


class Process:
    """A process that runs one program after another."""

    def __init__(self, place: Place) -> None:
        command: list[str | Path] = [place.python, RUNNER, place.kernels]
        pipe = subprocess.PIPE
        options: dict[str, Any] = {"stdin": pipe, "stdout": pipe, "stderr": pipe, "text": True}
        self.job: Job | None = None
        if place.node is None:
            self.process: subprocess.Popen[str] = subprocess.Popen(command, **options)
        else:
            self.job = place.node.program(command, name="differential", device=place.devices, **options)
            self.process = self.job.process
        self._rest = b""
        self.lines: list[str] = []
        if self.line(PATIENCE) != "ready":
            raise NotStarted(f"the runner did not start: {self.end()}")

    def send(self, program: Program) -> None:
        """Let it run one. Its answer is the next line."""
        assert self.process.stdin is not None
        self.process.stdin.write(program.line() + "\n")
        self.process.stdin.flush()

    def line(self, timeout: float) -> str | None:
        """What it says next; None if it ends, or says nothing in this time."""
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        end = time.monotonic() + timeout
        while b"\n" not in self._rest:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, end - time.monotonic()))
            part = os.read(descriptor, 1 << 16) if ready else b""
            if not part:
                return None
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def run(self, program: Program) -> str | list[int]:
        """What it read, or what went wrong; after that this process is of no use any more."""
        try:
            self.send(program)
        except OSError:
            return f"the process has ended: {self.end()}"
        line = self.line(PATIENCE)
        if line is None:
            return f"no answer within {PATIENCE:.0f} s, or its end: {self.end()}"
        answer = json.loads(line)
        return list(answer["read"]) if "read" in answer else str(answer["failed"])

    def end(self) -> str:
        """End it; what it reported on standard error, and how it ended. Once it has, that is all there is to say."""
        if self.process.stderr is not None and self.process.stderr.closed:
            return f"exit code {self.process.returncode}"
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stderr is not None
        assert self.process.stdout is not None
        reported = self.process.stderr.read()
        self.process.stderr.close()
        self.process.stdout.close()
        return f"exit code {self.process.returncode}; {reported[-1500:]}"


def differs(program: Program, answer: str | list[int], expected: Sequence[int] | None = None) -> Difference | None:
    """``expected``: what it means, if that is known already."""
    if isinstance(answer, str):
        return Difference(program, answer)
    wanted = interpret(program) if expected is None else list(expected)
    if answer == wanted:
        return None
    unequal = [i for i, (one, other) in enumerate(zip(answer, wanted, strict=True)) if one != other]
    reads = [(i, op) for i, op in enumerate(program.ops) if op["op"] in ("read", "check")]
    at, op = reads[unequal[0]]
    which = f"call {at}, {json.dumps(op)}, read something else"
    found = f"CRC {answer[unequal[0]]:08x}, not {wanted[unequal[0]]:08x}"
    return Difference(program, f"{which}: {found}; {len(unequal)} of {len(reads)} reads differ")


class Runs:
    """Runs programs in a process, and in another one after each that went wrong."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.process: Process | None = None

    def start(self) -> None:
        """Let there be a process."""
        if self.process is None:
            self.process = Process(self.place)

    def one(self, program: Program, expected: Sequence[int] | None = None) -> Difference | None:
        self.start()
        assert self.process is not None
        answer = self.process.run(program)
        found = differs(program, answer, expected)
        if isinstance(answer, str):
            self.close()
        return found

    def close(self) -> None:
        if self.process is not None:
            self.process.end()
            self.process = None

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def compile_kernels(folder: Path, compiler: str = os.environ.get("CC", "cc")) -> Path:
    """The kernels for cpu devices."""
    image = folder / "differential.so"
    subprocess.run(
        [compiler, "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-I{INCLUDE}", HERE / "kernels.c", "-o",
         image],
        check=True,
    )  # fmt: skip
    return image
