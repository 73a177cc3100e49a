"""The process that calls the driver: `python -m xmigd.driver_checkpoint.helper [--lock FD]`.

It is kept, because cuInit costs seconds, and runs as the user of the processes that it is about where the daemon may
choose. A line of JSON in, a line of JSON out; it ends with its standard input. Nothing else is printed there.

    {"call": "lock", "pid": 7, "timeout_ms": 10000}      →  {"error": null, "state": "locked", "ms": 3.1}
    {"call": "restore", "pid": 7, "pairs": [["GPU-…", "GPU-…"]]}
    {"call": "checkpoint" | "unlock" | "state", "pid": 7}

Its first line, as soon as the driver is initialised: {"error": null, "driver": 13000, "gpus": ["GPU-…"], "ms": 900}
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

STATES = {0: "running", 1: "locked", 2: "checkpointed", 3: "failed"}


class Refused(Exception):
    """The driver's answer was an error: its name."""


class Driver:
    """The calls, with the types of cuda.bindings. Raises Refused."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._check(driver.cuInit(0))
        self._uuids: dict[str, Any] = {}  # as the driver made them: they cannot be made from bytes
        for ordinal in range(int(self._check(driver.cuDeviceGetCount()))):
            made = self._check(driver.cuDeviceGetUuid(self._check(driver.cuDeviceGet(ordinal))))
            self._uuids[f"GPU-{uuid.UUID(bytes=bytes(made.bytes)[:16])}"] = made

    def version(self) -> int:
        return int(self._check(self._driver.cuDriverGetVersion()))

    def gpus(self) -> list[str]:
        """Identifiers as NVML writes them, in CUDA's order."""
        return list(self._uuids)

    def state(self, pid: int) -> str:
        state = int(self._check(self._driver.cuCheckpointProcessGetState(pid)))
        return STATES.get(state, "locked")  # newer drivers have states of custom storage, which is not used here

    def lock(self, pid: int, timeout_ms: int) -> None:
        arguments = self._driver.CUcheckpointLockArgs()
        arguments.timeoutMs = timeout_ms
        self._check(self._driver.cuCheckpointProcessLock(pid, arguments))

    def checkpoint(self, pid: int) -> None:
        self._check(self._driver.cuCheckpointProcessCheckpoint(pid, None))

    def restore(self, pid: int, pairs: Sequence[tuple[str, str]]) -> None:
        """`pairs`: every GPU as it was, and what takes its place. None: where it was."""
        arguments = None
        if pairs:
            arguments = self._driver.CUcheckpointRestoreArgs()
            made = []
            for old, new in pairs:
                pair = self._driver.CUcheckpointGpuPair()
                pair.oldUuid, pair.newUuid = self._uuids[old], self._uuids[new]
                made.append(pair)
            arguments.gpuPairs = made
            arguments.gpuPairsCount = len(made)
        self._check(self._driver.cuCheckpointProcessRestore(pid, arguments))

    def unlock(self, pid: int) -> None:
        self._check(self._driver.cuCheckpointProcessUnlock(pid, None))

    def _check(self, answer: tuple[Any, ...]) -> Any:
        error, *values = answer
        if int(error) != 0:
            raise Refused(str(getattr(error, "name", error)))
        return values[0] if values else None


def answer(driver: Driver, request: dict[str, Any]) -> dict[str, Any]:
    """One request. The state is queried after every call: it counts more than the call's own answer."""
    started = time.monotonic()
    call, pid = request["call"], int(request.get("pid", 0))
    calls: dict[str, Callable[[], None]] = {
        "lock": lambda: driver.lock(pid, int(request["timeout_ms"])), "checkpoint": lambda: driver.checkpoint(pid),
        "restore": lambda: driver.restore(pid, [(old, new) for old, new in request["pairs"]]),
        "unlock": lambda: driver.unlock(pid), "state": lambda: None,
    }  # fmt: skip
    if call == "hello":
        return {"error": None, "driver": driver.version(), "gpus": driver.gpus()}
    error: str | None = None
    try:
        calls[call]()
    except (Refused, LookupError, TypeError, ValueError) as refused:
        error = str(refused)
    ms = (time.monotonic() - started) * 1000
    try:
        state: str | None = driver.state(pid)
    except Refused as refused:
        error = error or str(refused)
        state = None if os.path.exists(f"/proc/{pid}") else "gone"
    return {"error": error, "state": state, "ms": ms}


def main() -> int:
    started = time.monotonic()
    # Whatever a library prints must not end up between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if sys.argv[1:2] == ["--lock"]:
        fcntl.flock(int(sys.argv[2]), fcntl.LOCK_EX)
    try:
        driver = Driver()
    except (Refused, ImportError, RuntimeError, OSError) as error:
        print(json.dumps({"error": str(error) or type(error).__name__}), file=answers, flush=True)
        return 1
    ready = answer(driver, {"call": "hello"}) | {"ms": (time.monotonic() - started) * 1000}
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(driver, json.loads(line))), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
