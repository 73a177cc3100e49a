"""Many programs, by several processes: made and interpreted in processes of their own, run where they are to run, and
disturbed there if that is wanted."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tests.differential.generator import FEATURES, generate
from tests.differential.interpreter import interpret
from tests.differential.program import Program
from tests.differential.runs import Difference, Place, Runs
from xmigd.client import Refused
from xmigd.demo.node import Program as Job

CHUNK = 20  # programs that are made at a time
OVER = ("succeeded", "failed", "cancelled")
DISTURBANCES = ("kill", "move", "suspend", "snapshot")
Made = list[tuple[str, list[int]]]


def make(first: int, count: int, devices: int, features: frozenset[str]) -> Made:
    """Programs as lines, with what they mean."""
    programs = (generate(seed, devices, features) for seed in range(first, first + count))
    return [(program.line(), interpret(program)) for program in programs]


@dataclass
class Outcome:
    """``disturbed``: how often each thing was done to the processes; ``inexact``: recoveries that were not exact;
    ``slowest``: the seconds that one disturbance took, and which."""

    programs: int = 0
    seconds: float = 0.0
    differences: list[Difference] = field(default_factory=list)
    disturbed: dict[str, int] = field(default_factory=dict)
    inexact: int = 0
    slowest: tuple[float, str] = (0.0, "")


class Disturber:
    """Disturbs a process at random moments, until it is stopped.

    kill: SIGKILL of its server. snapshot: SIGKILL in the middle of its next snapshot. move: to the other of two
    ``places``. suspend: to host memory, and back."""

    def __init__(self, job: Job, kinds: tuple[str, ...], places: tuple[str, ...], seed: int) -> None:
        self.job = job
        self._kinds = kinds
        self._places = places
        self._chance = random.Random(seed)
        self._stopped = threading.Event()
        self.done: dict[str, int] = dict.fromkeys(kinds, 0)
        self.inexact = 0
        self.slowest = (0.0, "")  # seconds that one of them took
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(90)
        with contextlib.suppress(Exception):
            self.inexact = sum(recovery["exact"] is False for recovery in self.job.recoveries())

    def _work(self) -> None:
        while not self._stopped.wait(self._chance.uniform(0, 0.15)):
            kind = self._chance.choice(self._kinds)
            # What it asks for may come too late, or find the process in the middle of something else.
            begun = time.monotonic()
            with contextlib.suppress(Refused, OSError, TimeoutError, KeyError):
                if getattr(self, f"_{kind}")():
                    self.done[kind] += 1
            self.slowest = max(self.slowest, (round(time.monotonic() - begun, 3), kind))

    def _info(self) -> dict[str, Any] | None:
        info = self.job.info()
        return info if info is not None and info["state"] == "running" else None

    def _kill(self) -> bool:
        info = self._info()
        if info is None or info["server_pid"] is None:
            return False
        os.kill(info["server_pid"], signal.SIGKILL)
        return True

    def _snapshot(self) -> bool:
        if self._info() is None:
            return False
        self.job.inject("kill", point="snapshot")
        return True

    def _move(self) -> bool:
        info = self._info()
        if info is None:
            return False
        target = next((place for place in self._places if place != info["device"]), None)
        if target is None:
            return False
        operation = self.job.node.client.post("/v1/migrations", {"process": info["id"], "target": target})
        return self._ended(operation)

    def _suspend(self) -> bool:
        info = self._info()
        if info is None:
            return False
        client = self.job.node.client
        if not self._ended(client.post(f"/v1/processes/{info['id']}:suspend", {"to": "host"})):
            return False
        time.sleep(self._chance.uniform(0, 0.1))
        while not self._ended(client.post(f"/v1/processes/{info['id']}:resume", {})):
            pass
        return True

    def _ended(self, operation: dict[str, Any]) -> bool:
        while operation["state"] not in OVER:
            operation = self.job.node.client.get(f"/v1/operations/{operation['id']}/wait", timeout=10)
        return bool(operation["state"] == "succeeded")


def run(
    places: list[Place],
    first: int,
    count: int,
    devices: int,
    features: frozenset[str] = FEATURES,
    *,
    kinds: tuple[str, ...] = (),
    moves: tuple[str, ...] = (),
    most: int = 5,
    makers: int | None = None,
    end: float = math.inf,
) -> Iterator[tuple[Place, Outcome]]:
    """Each program at every place. ``kinds`` of disturbances; ``moves``: the two between which processes move. Ends a
    place at ``most`` differences, or at ``end`` of the monotonic clock. The outcomes come when all is done."""
    outcomes = [Outcome() for _ in places]
    context = multiprocessing.get_context("spawn")
    chunks = [(seed, min(CHUNK, first + count - seed)) for seed in range(first, first + count, CHUNK)]
    with ProcessPoolExecutor(makers or max(1, (os.cpu_count() or 2) // 2), mp_context=context) as pool:
        made = [pool.submit(make, seed, number, devices, features) for seed, number in chunks]
        taken = [iter(range(len(chunks))) for _ in places]
        lock = threading.Lock()

        def work(which: int, worker: int) -> None:
            place, outcome = places[which], outcomes[which]
            began = time.monotonic()
            with Runs(place) as runs:
                disturber: Disturber | None = None
                try:
                    while True:
                        with lock:
                            number = next(taken[which], None)
                            late = time.monotonic() > end
                            if number is None or late or len(outcome.differences) >= most:
                                break
                        for line, expected in made[number].result():
                            program = Program.read(line)
                            runs.start()
                            job = None if runs.process is None else runs.process.job
                            if kinds and job is not None and (disturber is None or disturber.job is not job):
                                _take(outcome, disturber, lock)
                                disturber = Disturber(job, kinds, moves, first + worker)
                            found = runs.one(program, expected)
                            with lock:
                                outcome.programs += 1
                                if found is not None:
                                    outcome.differences.append(found)
                finally:
                    _take(outcome, disturber, lock)
            with lock:
                outcome.seconds = max(outcome.seconds, time.monotonic() - began)

        jobs = [(which, worker) for which in range(len(places)) for worker in range(_workers(places))]
        with ThreadPoolExecutor(len(jobs)) as threads:
            for done in [threads.submit(work, *job) for job in jobs]:
                done.result()
        for chunk in made:
            chunk.cancel()
    yield from zip(places, outcomes, strict=True)


def _take(outcome: Outcome, disturber: Disturber | None, lock: threading.Lock) -> None:
    if disturber is None:
        return
    disturber.stop()
    with lock:
        outcome.inexact += disturber.inexact
        outcome.slowest = max(outcome.slowest, disturber.slowest)
        for kind, number in disturber.done.items():
            outcome.disturbed[kind] = outcome.disturbed.get(kind, 0) + number


def _workers(places: list[Place]) -> int:
    return max(1, places[0].processes)


Fails = Callable[[Program], bool]


def fails_again(place: Place, found: Difference, *, tries: int = 1, kinds: tuple[str, ...] = (),
                moves: tuple[str, ...] = ()) -> tuple[Fails, Callable[[], None]]:  # fmt: skip
    """What tells whether a program still fails the same way, and what ends it. ``tries``: of what is disturbed, where
    once is not enough."""
    runs = Runs(place)
    same = found.kind
    state: dict[str, Disturber | None] = {"disturber": None}

    def fails(program: Program) -> bool:
        for _ in range(tries):
            runs.start()
            job = None if runs.process is None else runs.process.job
            disturber = state["disturber"]
            if kinds and job is not None and (disturber is None or disturber.job is not job):
                if disturber is not None:
                    disturber.stop()
                state["disturber"] = Disturber(job, kinds, moves, 1)
            again = runs.one(program)
            if again is not None and again.kind == same:
                return True
        return False

    def end() -> None:
        disturber = state["disturber"]
        if disturber is not None:
            disturber.stop()
        runs.close()

    return fails, end
