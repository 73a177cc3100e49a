"""`connections.py PID COMMAND...`: CRIU dumps this process and its descendants; their TCP connections work afterwards.

To read a connection CRIU puts it into repair mode, in which the kernel refuses to send and receive. It ends that
only where programs are left running, and not where they are left stopped. So it is done here, with CRIU's rights,
before anybody lets them go on, also if the daemon has ended meanwhile. The end of the mode resets SO_REUSEADDR, which
is set again to what it was.

With --link-remap CRIU gives another name to a file in /dev/shm that has lost the one by which it was opened, and takes
it back where programs are left running only. That is done here, too: the next dump would want the same name.

A script of its own that imports little, and nothing of xMIG: programs stand still while it is started. Importing
contextlib and socket would take longer than all else that it does, and ctypes is for programs with sockets only.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # that of typing takes long to import
if TYPE_CHECKING:
    from _socket import socket
    from collections.abc import Iterator

PIDFD_GETFD = 438  # on every architecture
TCP_REPAIR, OFF = 19, 0
GONE = (FileNotFoundError, ProcessLookupError)


def main() -> int:
    root, command = int(sys.argv[1]), sys.argv[2:]
    reused = {inode: _reused(sock) for inode, sock in _connections(root)}
    _, status = os.waitpid(os.posix_spawnp(command[0], command, os.environ), 0)
    for inode, sock in _connections(root):
        _end_repair(sock, reused.get(inode, 0))
    if "--link-remap" in command:
        _take_names_back(root)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code  # by a signal


def _take_names_back(root: int) -> None:
    folder = f"/proc/{root}/root/dev/shm"  # in the program's mount namespace
    try:
        for name in os.listdir(folder):
            if name.startswith("link_remap."):
                os.unlink(f"{folder}/{name}")
    except GONE:
        pass


def _connections(root: int) -> Iterator[tuple[str, socket]]:
    """Every TCP socket that they have, once, by its inode. Raises OSError."""
    seen: set[str] = set()
    for pid in _tree(root):
        try:
            pidfd = os.pidfd_open(pid)
        except GONE:
            continue
        try:
            for name in _names(pid):
                inode = _link(f"/proc/{pid}/fd/{name}")
                if inode.startswith("socket:") and inode not in seen:
                    seen.add(inode)
                    yield from ((inode, sock) for sock in _if_tcp(pidfd, int(name)))
        finally:
            os.close(pidfd)


def _names(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/fd")
    except GONE:
        return []


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except GONE:
        return ""


def _if_tcp(pidfd: int, number: int) -> Iterator[socket]:
    import ctypes
    from _socket import AF_INET, AF_INET6, IPPROTO_TCP, socket

    own = ctypes.CDLL(None).syscall(PIDFD_GETFD, pidfd, number, 0)
    if own < 0:  # it was closed meanwhile, or may not be had: then CRIU could not read it either
        return
    sock = socket(fileno=own)
    try:
        if sock.family in (AF_INET, AF_INET6) and sock.proto == IPPROTO_TCP:
            yield sock
    finally:
        sock.close()


def _reused(sock: socket) -> int:
    from _socket import SO_REUSEADDR, SOL_SOCKET

    return sock.getsockopt(SOL_SOCKET, SO_REUSEADDR)


def _end_repair(sock: socket, reused: int) -> None:
    from _socket import IPPROTO_TCP, SO_REUSEADDR, SOL_SOCKET

    if sock.getsockopt(IPPROTO_TCP, TCP_REPAIR):
        sock.setsockopt(IPPROTO_TCP, TCP_REPAIR, OFF)
        sock.setsockopt(SOL_SOCKET, SO_REUSEADDR, reused)


def _tree(root: int) -> list[int]:
    """It and all that descend from it."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    stat = file.read()
            except GONE:
                continue
            children.setdefault(int(stat[stat.rindex(b")") + 2 :].split()[1]), []).append(int(name))
    found = [root]
    for each in found:  # which grows meanwhile
        found += children.get(each, ())
    return found


if __name__ == "__main__":
    sys.exit(main())
