"""Ports of a job that has a network of its own, on this machine: `forward.py PID FD:PORT...`.

Each descriptor is a socket that listens in the machine's network. A connection to it is passed on to the port, at the
loopback address in the network of process PID. This process is no part of the job: it is not dumped, and it ends with
PID. It detaches itself when it is ready, so whoever has started it waits for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys

NEWNET = 0x4000_0000
NOBODY = 65534
PIECE = 1 << 16  # bytes
LOOPBACK = ("127.0.0.1", "::1")


def main() -> None:
    process = int(sys.argv[1])
    pidfd = os.pidfd_open(process)
    listening = []
    for argument in sys.argv[2:]:
        descriptor, _, port = argument.partition(":")
        listening.append((socket.socket(fileno=int(descriptor)), int(port)))
    network = os.open(f"/proc/{process}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    # From here on sockets are made in the job's network; those that listen stay where they are.
    if ctypes.CDLL(None, use_errno=True).setns(network, NEWNET) != 0:
        sys.exit(os.strerror(ctypes.get_errno()))
    os.close(network)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    if os.fork() > 0:
        os._exit(0)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_serve(pidfd, listening))


async def _serve(pidfd: int, listening: list[tuple[socket.socket, int]]) -> None:
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(pidfd, over.set)
    servers = [await asyncio.start_server(_passing_to(port), sock=sock) for sock, port in listening]
    await over.wait()
    for server in servers:
        server.close()


def _passing_to(port: int):  # type: ignore[no-untyped-def]
    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            its_reader, its_writer = await _connected(port)
        except OSError:
            writer.transport.abort()
            return
        await asyncio.gather(_copy(reader, its_writer), _copy(its_reader, writer))

    return accepted


async def _connected(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        return await asyncio.open_connection(LOOPBACK[0], port)
    except OSError:
        return await asyncio.open_connection(LOOPBACK[1], port)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until one end closes."""
    with contextlib.suppress(OSError):
        while data := await reader.read(PIECE):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
            return
    writer.transport.abort()


if __name__ == "__main__":
    main()
