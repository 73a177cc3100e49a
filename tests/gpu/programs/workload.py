"""What the programs share: their arguments, the clock, and the one line that they print.

Nothing here knows of xMIG. Imported before the framework, so that its import is part of the time to the first step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

# Must be set before cuBLAS makes its first handle; without `--deterministic` it changes no result.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

PHASES = ("start", "forward", "backward", "optimizer", "copy", "replay", "end")


waited = 0.0  # seconds between its imports and its start on the device, when others had their turn
laps: dict[str, float] = {}  # seconds from its start to each place on the way to the first step, less what it waited


def lap(name: str) -> None:
    """The program is there, for the first time."""
    laps.setdefault(name, since_start() - waited)


class Parser(argparse.ArgumentParser):
    """Takes turns from here on: what is imported is imported, and no device is used yet."""

    def parse_args(self, *words: Any, **others: Any) -> Any:
        options = super().parse_args(*words, **others)
        lap("imported")
        if options.turns:
            global waited
            began = time.monotonic()
            take_turn("imported")
            waited = time.monotonic() - began
        return options


def take_turn(word: str) -> None:
    """Say where the program is, and wait for a line."""
    print(word, flush=True)
    sys.stdin.readline()


def arguments(description: str | None, *, steps: int, warmup: int = 10, block: int = 5) -> argparse.ArgumentParser:
    """A parser with what every program understands."""
    parser = Parser(description=(description or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=steps, help="steps whose time counts")
    parser.add_argument("--warmup", type=int, default=warmup, help="steps before them")
    parser.add_argument("--block", type=int, default=block, help="steps between two synchronisations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deterministic", action="store_true", help="the framework's deterministic mode")
    parser.add_argument("--status", type=Path, help="file that always says the step and the phase: two 32-bit numbers")
    parser.add_argument("--until", type=Path, help="file that, once it is there, ends the program at the next block")
    parser.add_argument(
        "--turns", type=int, default=0,
        help='parts of the steps; before each print "turn" and wait, and before the first use of the device "imported"',
    )  # fmt: skip
    parser.add_argument("--hold", action="store_true", help='after the steps print "holding" and wait for a line')
    return parser


def since_start() -> float:
    """Seconds since this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


class Status:
    """Tells others where the program is. They read it; nothing waits for them."""

    def __init__(self, path: Path | None) -> None:
        self._map: mmap.mmap | None = None
        self._step = 0
        if path is not None:
            with path.open("w+b") as file:
                file.truncate(mmap.PAGESIZE)
                self._map = mmap.mmap(file.fileno(), mmap.PAGESIZE)

    def step(self, number: int) -> None:
        self._step = number

    def phase(self, name: str) -> None:
        if self._step == 0:
            lap(name)
        if self._map is not None:
            self._map[:8] = struct.pack("<II", self._step, PHASES.index(name))


class Steps:
    """Yields the steps' numbers, and takes the time of blocks of them: synchronised at both ends, not in between."""

    def __init__(self, options: argparse.Namespace, synchronize: Callable[[], object]) -> None:
        self.status = Status(options.status)
        self.first = math.nan
        self.blocks: list[float] = []
        self.began = math.nan
        self._options = options
        self._synchronize = synchronize

    def __iter__(self) -> Iterator[int]:
        warmup, block = self._options.warmup, self._options.block
        turns, blocks = self._options.turns, self._options.steps // block
        for number in range(warmup + self._options.steps):
            if number >= warmup and (number - warmup) % block == 0:
                now = self._now()
                if number > warmup:
                    self.blocks.append((now - self.began) / block)
                if self._options.until is not None and self._options.until.exists():
                    break
                count = (number - warmup) // block
                if count == 0 or count * turns // blocks > (count - 1) * turns // blocks:
                    now = self._turn(now)
                self.began = now
            self.status.step(number)
            lap("model")
            yield number
            if number == 0:
                self._synchronize()
                self.first = since_start() - waited
        else:
            if self._options.steps and self._options.steps % block == 0:
                self.blocks.append((self._now() - self.began) / block)
        self.status.phase("end")

    def _turn(self, now: float) -> float:
        """Wait for it, if there are turns. When it goes on."""
        if not self._options.turns:
            return now
        take_turn("turn")
        return self._now()

    def _now(self) -> float:
        self._synchronize()
        return time.perf_counter()

    def figures(self) -> dict[str, Any]:
        """Seconds: a step (median, quarters, fastest and slowest of the blocks, and each block), and from the process's
        start to the first, and to the places on the way there."""
        if not self.blocks:
            return {"first_step_s": self.first, "laps_s": laps}
        ordered = sorted(self.blocks)
        return {
            "first_step_s": self.first, "laps_s": laps, "step_s": median(ordered),
            "fastest_s": ordered[0], "slowest_s": ordered[-1],
            "lower_s": ordered[len(ordered) // 4], "upper_s": ordered[3 * len(ordered) // 4], "blocks_s": self.blocks,
        }  # fmt: skip


def digest(arrays: Iterable[Any]) -> str:
    """SHA-256 of NumPy arrays."""
    total = hashlib.sha256()
    for array in arrays:
        total.update(str((array.dtype, array.shape)).encode())
        total.update(array.tobytes())
    return total.hexdigest()


def report(options: argparse.Namespace, **results: Any) -> None:
    """Print the line. With `--hold`, keep everything as it is until there is input."""
    print(json.dumps({"program": Path(sys.argv[0]).stem, **results}), flush=True)
    if options.hold:
        take_turn("holding")
