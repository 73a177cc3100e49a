"""`connections.py PID COMMAND...`: CRIU dumps this process and its descendants; their TCP connections work afterwards.

To read a connection CRIU puts it into repair mode, in which the kernel refuses to send and receive. It ends that
only where programs are left running, and not where they are left stopped. So it is done here, with CRIU's rights,
before anybody lets them go on, also if the daemon has ended meanwhile. The end of the mode resets SO_REUSEADDR, which
is set again to what it was.

A script of its own that imports little, and nothing of xMIG: programs stand still while it is started.
"""

import contextlib
import ctypes
import os
import socket
import sys
from collections.abc import Iterator

PIDFD_GETFD = 438  # on every architecture
TCP_REPAIR, OFF = 19, 0
GONE = (FileNotFoundError, ProcessLookupError)


def main() -> int:
    root, command = int(sys.argv[1]), sys.argv[2:]
    reused = {inode: _reused(sock) for inode, sock in _connections(root)}
    _, status = os.waitpid(os.posix_spawnp(command[0], command, os.environ), 0)
    for inode, sock in _connections(root):
        if sock.getsockopt(socket.IPPROTO_TCP, TCP_REPAIR):
            sock.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, OFF)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reused.get(inode, 0))
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code  # by a signal


def _connections(root: int) -> Iterator[tuple[str, socket.socket]]:
    """Every TCP socket that they have, once, by its inode. Raises OSError."""
    seen = set()
    libc = ctypes.CDLL(None, use_errno=True)
    for pid in _tree(root):
        with contextlib.suppress(*GONE), contextlib.ExitStack() as stack:
            pidfd = os.pidfd_open(pid)
            stack.callback(os.close, pidfd)
            for name in os.listdir(f"/proc/{pid}/fd"):
                inode = ""
                with contextlib.suppress(*GONE):
                    inode = os.readlink(f"/proc/{pid}/fd/{name}")
                if not inode.startswith("socket:") or inode in seen:
                    continue
                seen.add(inode)
                number = libc.syscall(PIDFD_GETFD, pidfd, int(name), 0)
                if number < 0:  # it was closed meanwhile, or may not be had: then CRIU could not read it either
                    continue
                with socket.socket(fileno=number) as sock:
                    if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.proto == socket.IPPROTO_TCP:
                        yield inode, sock


def _reused(sock: socket.socket) -> int:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)


def _tree(root: int) -> list[int]:
    """It and all that descend from it."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        with contextlib.suppress(*GONE, ValueError), open(f"/proc/{int(name)}/stat", "rb") as file:
            stat = file.read()
            children.setdefault(int(stat[stat.rindex(b")") + 2 :].split()[1]), []).append(int(name))
    found = [root]
    for each in found:  # which grows meanwhile
        found += children.get(each, ())
    return found


if __name__ == "__main__":
    sys.exit(main())
