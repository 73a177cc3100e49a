"""Ports of a job with a network of its own that are to be reached from outside: who listens, and who passes on."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from xmigd import forward
from xmigd.errors import Conflict, Invalid

PUBLISHED = re.compile(
    r"(?:(?P<address>[0-9.]+|\[[0-9a-fA-F:]+\]):)?(?P<port>\d{1,5}):(?P<inner>\d{1,5})|(?P<both>\d{1,5})"
)
MOST_PORTS = 32  # of a job
PATIENCE = 60.0  # seconds until it is ready
PRIVILEGED = 1024  # ports below are root's


@dataclass(slots=True)
class Published:
    """`inner`: the port in the job's network. `sock` listens."""

    address: str
    port: int
    inner: int
    sock: socket.socket

    @property
    def text(self) -> str:
        return f"{self.address}:{self.port}:{self.inner}"


def check_network(texts: Sequence[str], namespaces: Collection[str]) -> None:
    """Raises Invalid: a program that has these namespaces has no network of its own."""
    if texts and "net" not in namespaces:
        raise Invalid("the program has no network of its own: its ports are the machine's")


def listen(texts: Sequence[str], *, uid: int) -> list[Published]:
    """Each text is PORT, PORT:INNER or ADDRESS:PORT:INNER; without an address only this machine reaches it. Raises
    Invalid, Conflict."""
    made: list[Published] = []
    try:
        for text in texts:
            made.append(_listen(text, uid))
    except BaseException:
        close(made)
        raise
    return made


def parse(text: str) -> tuple[str, int, int]:
    """Address, port, and the port in the job's network. Raises Invalid."""
    found = PUBLISHED.fullmatch(text)
    if found is None:
        raise Invalid(f"{text[:64]!r} names no port", hint="PORT, PORT:INNER or ADDRESS:PORT:INNER")
    address = (found["address"] or "127.0.0.1").strip("[]")
    return address, int(found["port"] or found["both"]), int(found["inner"] or found["both"])


def further(text: str, number: int) -> str:
    """The same, with a port that is by so much greater. Raises Invalid."""
    address, port, inner = parse(text)
    return f"{f'[{address}]' if ':' in address else address}:{port + number}:{inner}"


def _listen(text: str, uid: int) -> Published:
    address, port, inner = parse(text)
    if not (0 < port < 1 << 16 and 0 < inner < 1 << 16):
        raise Invalid(f"{text[:64]!r}: ports are from 1 to 65535")
    if port < PRIVILEGED and uid != 0:
        raise Invalid(f"port {port} is root's", hint=f"take one from {PRIVILEGED} on")
    sock = socket.socket(
        socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC
    )
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
        sock.listen(128)
    except OSError as error:
        sock.close()
        raise Conflict(f"port {port} at {address} cannot be published: {error.strerror}", code="port_in_use",
                       hint="take another one: PORT:INNER") from None  # fmt: skip
    return Published(address, port, inner, sock)


def pass_on(published: Sequence[Published], pid: int) -> None:
    """Until process `pid` ends, whose network it is. Closes our descriptors. Blocks until it is ready. Raises
    Conflict."""
    if not published:
        return
    numbers = [one.sock.fileno() for one in published]
    command = [sys.executable, "-I", str(Path(forward.__file__).resolve()), str(pid)]
    try:
        done = subprocess.run(
            [*command, *(f"{number}:{one.inner}" for number, one in zip(numbers, published, strict=True))],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
            pass_fds=numbers, check=False, timeout=PATIENCE, cwd="/", env={"LC_ALL": "C", **_library_path()},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Conflict(f"the ports are not passed on: {error}", code="port_in_use") from None
    finally:
        close(published)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise Conflict(f"the ports are not passed on: {last[0]}", code="port_in_use")


def _library_path() -> dict[str, str]:
    """Some Pythons need it for their own library."""
    found = os.environ.get("LD_LIBRARY_PATH")
    return {"LD_LIBRARY_PATH": found} if found else {}


def close(published: Sequence[Published]) -> None:
    for one in published:
        one.sock.close()
