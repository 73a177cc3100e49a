"""Processes that are networks of jobs (carrier.py): how one is started and found again, and what is requested of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xmigd.errors import Conflict, Unavailable
from xmigd.networks import carrier
from xmigd.servers.scopes import SLICE
from xmigd.text import harmless

WITHIN = 60.0  # seconds for an answer
GOES_WITHIN = 5.0  # seconds in which one whose program has ended is gone
LOOK_EVERY = 0.05  # seconds
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}


class Line:
    """A connection to a carrier. What it holds, it holds as long as this is open."""

    def __init__(self, path: Path) -> None:
        """Raises OSError: nobody is there."""
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._sock.settimeout(WITHIN)
            self._sock.connect(str(path))
        except BaseException:
            self._sock.close()
            raise
        self._turn = asyncio.Lock()

    async def request(self, do: str, **fields: Any) -> dict[str, Any]:
        """The answer. Raises Unavailable."""
        async with self._turn:
            try:
                answer = await asyncio.to_thread(self._answered, json.dumps({"do": do, **fields}).encode())
            except OSError as error:
                raise _lost(error.strerror or str(error)) from None
        if "error" in answer:
            raise _lost(answer["error"])
        return answer

    def _answered(self, content: bytes) -> dict[str, Any]:
        self._sock.send(content)
        answer = self._sock.recv(carrier.MESSAGE)
        return dict(json.loads(answer)) if answer else {"error": "its process has ended"}

    def post(self, do: str, *sockets: socket.socket, **fields: Any) -> bool:
        """What has no answer: was it taken? Does not wait."""
        content = json.dumps({"do": do, **fields}).encode()
        with contextlib.suppress(OSError):
            socket.send_fds(self._sock, [content], [one.fileno() for one in sockets], socket.MSG_DONTWAIT)
            return True
        return False

    @property
    def ended(self) -> bool:
        poll = select.poll()
        poll.register(self._sock, 0)
        return bool(poll.poll(0))

    def close(self) -> None:
        self._sock.close()


class Carrier:
    """As the daemon knows it. `line`: as long as nothing is watched, this ends with it."""

    def __init__(self, path: Path, line: Line, shown: Mapping[str, Any]) -> None:
        made = shown["made"]
        self.key: str = made["key"]
        self.nodes: tuple[str, ...] = tuple(made["nodes"])
        self.own: int = made["own"]
        self.range: str = made["range"]
        self.loopback: tuple[str, ...] = tuple(made["loopback"])
        self.inode: int = shown["inode"]
        self.namespace = Path(f"/proc/{shown['pid']}/fd/{shown['descriptor']}")
        self.path = path
        self.line = line


async def start(path: Path, *, confined: bool, **made: Any) -> Carrier:
    """`confined`: this daemon is a unit of systemd, which may not do that itself. Raises Unavailable, Conflict: there
    is one."""
    await _until_free(path)
    command = [sys.executable, "-I", "-S", str(Path(carrier.__file__).resolve()), str(path)]
    if confined:
        properties = ("Type=forking", f"Slice={SLICE}", "Description=The network of a job under xMIG")
        # An earlier one of the same key may be ending: the names of units are never the same.
        unit = f"--unit=xmig-network-{path.name[:12]}-{secrets.token_hex(3)}"
        options = ["--quiet", "--collect", unit, *(f"--property={each}" for each in properties)]
        command = ["systemd-run", *options, "--", *command]
    line = await asyncio.to_thread(_started, command, path)
    try:
        return Carrier(path, line, await line.request("make", **made))
    except BaseException:
        line.close()
        raise


async def found(path: Path) -> Carrier | None:
    """One that an earlier daemon has started; None: it has ended. Raises Unavailable."""
    try:
        line = Line(path)
    except OSError:
        path.unlink(missing_ok=True)
        return None
    try:
        return Carrier(path, line, await line.request("show"))
    except BaseException:
        line.close()
        raise


async def _until_free(path: Path) -> None:
    """The program may have ended a moment ago. Raises Conflict."""
    end = asyncio.get_running_loop().time() + GOES_WITHIN
    while True:
        try:
            line = Line(path)
        except OSError:
            path.unlink(missing_ok=True)
            return
        with contextlib.closing(line), contextlib.suppress(Unavailable):
            await line.request("leave")
        if asyncio.get_running_loop().time() > end:
            raise Conflict(
                "a job with this name, on these nodes and of this user, has its network here already",
                code="job_network_in_use", hint="give this one another name (--name), the same on each node",
            )  # fmt: skip
        await asyncio.sleep(LOOK_EVERY)


def _started(command: Sequence[str], path: Path) -> Line:
    try:
        done = subprocess.run(
            command, cwd="/", env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, errors="replace", check=False, timeout=WITHIN, umask=0o077,
        )  # fmt: skip
        if done.returncode == 0:
            return Line(path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _lost(str(error)) from None
    last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
    raise _lost(last[0])


def _lost(why: str) -> Unavailable:
    return Unavailable(
        f"the network of the job is not there: {harmless(why, 200)}", code="job_network_failed",
        hint="root and /dev/net/tun are needed (modprobe tun)",
    )  # fmt: skip
