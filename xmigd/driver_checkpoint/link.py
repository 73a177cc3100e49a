"""The helper, seen from the daemon: one per user, kept, started again when it has died."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pwd
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from xmigd import log
from xmigd.errors import Unavailable

logger = log.get("driver_checkpoint")

START_TIMEOUT = 120.0  # seconds; cuInit on a node with many GPUs takes some
CALL_TIMEOUT = 3600.0  # a checkpoint or restore goes at the bus's speed; nothing is gained by giving up on one


class HelperLost(Exception):
    """It died during a call: what became of the call is not known. Ask for the state."""


class Helper:
    """One process that calls the driver. Calls are made one after the other."""

    def __init__(self, uid: int, lock_file: Path) -> None:
        self._uid = uid
        self._lock_file = lock_file
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = asyncio.Lock()
        self.setup_ms: float | None = None
        self.gpus: list[str] = []

    @property
    def pid(self) -> int | None:
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    async def start(self) -> None:
        """Raises Unavailable with the driver's reason."""
        async with self._lock:
            await self._start()

    async def call(self, name: str, pid: int, **arguments: Any) -> dict[str, Any]:
        """The helper's answer: error, state, ms. Raises HelperLost, Unavailable."""
        async with self._lock:
            await self._start()
            return await self._ask({"call": name, "pid": pid} | arguments)

    def leave(self) -> None:
        """It ends when the call under way is over: the driver would go on with that in any case."""
        process, self._process = self._process, None
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):
                    pipe.close()
            process.poll()

    def kill(self) -> None:
        """Its end, now."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    async def _start(self) -> None:
        if self.pid is not None:
            return
        self.kill()
        started = time.monotonic()
        # Held by the helper while it lives. The next one waits for it, so that no two calls are about one process, also
        # if this daemon ends in the middle of one.
        lock = os.open(self._lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._process = await asyncio.to_thread(self._spawn, lock)
        finally:
            os.close(lock)
        try:
            ready = await asyncio.wait_for(self._read(), START_TIMEOUT)
        except (HelperLost, TimeoutError) as error:
            self.kill()
            raise Unavailable(f"the helper that calls the driver does not start: {error or 'it says nothing'}",
                              hint="see xmigd's log", code="helper_failed") from None  # fmt: skip
        if ready["error"] is not None:
            self.kill()
            raise Unavailable(f"the driver cannot be used: {ready['error']}", hint="xmigctl doctor checks the driver",
                              code="driver_unusable")  # fmt: skip
        self.setup_ms = (time.monotonic() - started) * 1000
        self.gpus = ready["gpus"]
        logger.info("helper is ready", uid=self._uid, pid=self.pid, ms=round(self.setup_ms, 1), gpus=len(self.gpus))

    def _spawn(self, lock: int) -> subprocess.Popen[bytes]:
        # -P: nothing is imported from the folder that it was started in.
        command = [sys.executable, "-P", "-m", "xmigd.driver_checkpoint.helper", "--lock", str(lock)]
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", env=_environment(), pass_fds=(lock,),
            **_as_user(self._uid),
        )  # fmt: skip

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            return await asyncio.wait_for(self._read(), CALL_TIMEOUT)
        except (OSError, TimeoutError) as error:
            self.kill()
            raise HelperLost(str(error) or type(error).__name__) from None
        except (HelperLost, asyncio.CancelledError):
            # Its answer would be taken for that of the next call.
            self.kill()
            raise

    async def _read(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await asyncio.to_thread(self._process.stdout.readline)
        if not line.endswith(b"\n"):
            raise HelperLost(f"it ended with {self._process.poll()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Helpers:
    """The helpers of all users."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._by_user: dict[int, Helper] = {}

    def of(self, uid: int) -> Helper:
        """The helper that may act on this user's processes. Only root can start one as somebody else."""
        acting = uid if os.geteuid() == 0 else os.geteuid()
        if acting not in self._by_user:
            self._by_user[acting] = Helper(acting, self._folder / f"driver-{acting}.lock")
        return self._by_user[acting]

    def leave(self) -> None:
        for helper in self._by_user.values():
            helper.leave()


def _environment() -> dict[str, str]:
    """The daemon's, without the shim: this process needs the genuine driver."""
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD" and not name.startswith("XMIG_")}


def _as_user(uid: int) -> dict[str, Any]:
    if os.geteuid() != 0 or uid == 0:
        return {}
    try:
        group = pwd.getpwuid(uid).pw_gid
    except KeyError:
        group = uid
    return {"user": uid, "group": group, "extra_groups": []}
