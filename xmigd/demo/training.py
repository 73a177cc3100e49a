"""A training under the shim, as the demo sees it: started, followed, waited for."""

from __future__ import annotations

import json
import mmap
import select
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xmigd.demo.node import Node, Program
from xmigd.errors import XmigError
from xmigd.native import find_native_dir

KERNELS = "xmig_kernels.so"


class Failed(XmigError):
    """Something did not hold. The message says what."""


@dataclass
class Training:
    """What a training run printed."""

    epochs: int = 0
    losses: list[str] = field(default_factory=list)
    last_loss: float = 0.0
    result: dict[str, Any] = field(default_factory=dict)
    weights: dict[int, str] = field(default_factory=dict)  # their hash, by rank

    def line(self, text: str | bytes) -> None:
        """Take in one line of its output."""
        reported = json.loads(text)
        if "losses" in reported:
            self.epochs += 1
            self.losses += reported["losses"]
            self.last_loss = reported["loss"]
        else:
            self.result = reported
            self.weights[reported["rank"]] = reported["weights"]

    def follow(self, program: Program, patience: float) -> bool:
        """Take in the next line, when there is one within so many seconds. False: there was none, or there will be no
        more."""
        out = program.process.stdout
        assert out is not None
        if out.closed or not select.select([out], [], [], max(0.0, patience))[0]:
            return False
        text = out.readline()
        if not text:
            out.close()
            return False
        self.line(text)
        return True

    @property
    def seconds(self) -> float:
        return float(self.result["seconds"])


def start(node: Node, name: str, epochs: int, *, followed: bool = False, ranks: int = 1) -> Program:
    """The training program under the shim. Its output goes to files: nobody has to read along.

    ``followed``: to a pipe of one page, a few epochs. A training that waits until somebody has read what it printed is
    not over before what is to happen in the middle of it, however late that comes."""
    kernels = find_native_dir(None) / KERNELS
    command: list[str | Path] = [sys.executable, "-m", "xmigd.demo.train", "--kernels", kernels]
    command += ["--epochs", str(epochs)]
    if ranks > 1:
        command += ["--ranks", str(ranks), "--folder", node.folder / name]
    # Nothing is read ahead: what is in the pipe counts.
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "pipesize": mmap.PAGESIZE, "text": False, "bufsize": 0}
    with (node.folder / f"{name}.out").open("w") as out, (node.folder / f"{name}.err").open("w") as err:
        options = {"stdout": out} | (pipe if followed else {})
        # One thread in NumPy: only copies and kernels are of interest here.
        return node.program(command, name=name, stderr=err, environment={"OMP_NUM_THREADS": "1"}, **options)


def finish(node: Node, program: Program, name: str, training: Training | None = None) -> Training:
    """Wait for a training's end and read what it printed; ``training``: the rest of what it prints is added to it."""
    end = time.monotonic() + 300
    try:
        while training is not None and training.follow(program, end - time.monotonic()):
            pass
        code = program.process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        program.process.kill()
        program.process.wait()
        raise Failed(f"{name} did not end within 300 s", hint=f"see {node.log}") from None
    if code != 0:
        reported = (node.folder / f"{name}.err").read_text(errors="replace").strip().splitlines()[-3:]
        raise Failed(f"{name} ended with exit code {code}: {' | '.join(reported)}", hint=f"see {node.log}")
    if training is None:
        training = Training()
        for text in (node.folder / f"{name}.out").read_text().splitlines():
            training.line(text)
    return training


def recovered(program: Program, count: int, training: Training | None = None) -> dict[str, Any] | None:
    """Wait until `count` recoveries are over; the last of them. None: the program has ended before. ``training``: what
    it prints meanwhile is added to it."""
    while True:
        over = [r for r in program.recoveries() if r["outcome"] != "running"]
        if len(over) >= count:
            return over[count - 1]
        if program.process.poll() is not None:
            return None
        if training is None:
            time.sleep(0.01)
        else:
            training.follow(program, 0.01)  # a fault waits for the next kernel


def reach(program: Program, training: Training, moment: float, began: float) -> None:
    """Wait until a training has done so many epochs, of the last one a part, which takes as long as the others took.

    How far it is, and not how late: a machine that others use, too, is now faster and now slower."""
    whole = int(moment)
    while training.epochs < whole and program.process.poll() is None:
        training.follow(program, 0.01)
    if training.epochs == whole and whole:
        time.sleep((moment - whole) * (time.monotonic() - began) / whole)


def milliseconds(value: float | None) -> str:
    return f"{'-':>10}" if value is None else f"{value:>7.1f} ms"
