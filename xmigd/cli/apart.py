"""`xmigctl run --movable`: the program in namespaces of its own, so that CRIU can restore it beside others.

A pid namespace, because a program has to get the pids back that it knows; a mount namespace, for its own /proc and
/dev/shm; IPC and UTS namespaces; and a network namespace with nothing but the loopback device, unless it is to have the
machine's network, or that of its job, which the daemon has made. None of time: the clock in memory that the program
shares with its server is the machine's.

This command stays as the parent, in the machine's namespaces, and ends as the program does.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
import signal
import stat
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from xmigd.cli import first
from xmigd.cli.exits import CommandError, Exit
from xmigd.cli.launch import PASSED_ON, Reactions, run
from xmigd.errors import XmigError
from xmigd.networks.addresses import own_addresses
from xmigd.networks.carrier import begin_loopback
from xmigd.published import Published, pass_on

Network = Literal["private", "host", "job"]

NEWNS, NEWUTS, NEWIPC, NEWPID, NEWNET = 0x0002_0000, 0x0400_0000, 0x0800_0000, 0x2000_0000, 0x4000_0000
NOSUID, NODEV, NOEXEC, REC, PRIVATE = 0x2, 0x4, 0x8, 0x4000, 0x4_0000
BPF_LOAD, BPF_JUMP_EQUAL, BPF_RETURN = 0x20, 0x15, 0x06
PR_SET_SECCOMP, SECCOMP_MODE_FILTER, SECCOMP_ALLOW, SECCOMP_ERRNO = 22, 2, 0x7FFF_0000, 0x5_0000
IO_URING_SETUP = 425
SHM = "/dev/shm"
DETACH = 2
OF_CONTAINERS = (
    b"/run/netns/", b"/run/docker/", b"/run/containerd/", b"/var/lib/docker/", b"/var/lib/containers/",
    b"/var/lib/containerd/", b"/var/lib/kubelet/",
)  # fmt: skip


def check(command: list[str], environment: Mapping[str, str]) -> None:
    """Raises CommandError, FileNotFoundError."""
    if os.geteuid() != 0:
        raise CommandError(
            "only root can run a program in namespaces of its own, from which it can be restored beside others",
            hint="run it as root, or without --movable", exit_code=Exit.NOT_ALLOWED,
        )  # fmt: skip
    hidden = os.path.realpath(environment.get("XMIG_SOCKET", ""))
    if hidden.startswith((f"{SHM}/", "/proc/")):
        raise CommandError(
            f"the daemon's socket is in {SHM}, and the program has a {SHM} of its own",
            hint="start xmigd with another XMIG_RUNTIME_DIR", exit_code=Exit.REFUSED,
        )  # fmt: skip
    if shutil.which(command[0], path=environment.get("PATH", os.defpath)) is None:
        if os.path.exists(command[0]):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        raise FileNotFoundError(command[0])


def run_apart(
    command: list[str], environment: Mapping[str, str], network: Network, reactions: Reactions | None = None,
    published: Sequence[Published] = (), job_network: str | None = None,
) -> int:  # fmt: skip
    """Run it and wait: its wait status. `published`: ports that listen for it. `job_network`: the namespace, if
    `network` is the job's. Raises CommandError, and OSError if it cannot be started."""
    check(command, environment)
    its_session = not any(os.isatty(fd) for fd in range(3))  # a terminal stops a dump anyway
    status = os.memfd_create("xmig-status", 0)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    inner = dict(environment)
    instructions = {
        "status": status, "blocked": sorted(blocked), "ignored": sorted(reactions or ()),
        "passed_on": sorted(PASSED_ON - (reactions or {}).keys()), "preload": inner.pop("LD_PRELOAD", ""),
    }  # fmt: skip
    inner.setdefault("UV_USE_IO_URING", "0")
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # a first process loses what it does not block
        _enter(network, job_network)
        _open_again()
        _close_io_uring()
        if its_session:
            os.setsid()

    first_process = 0

    def started(pid: int) -> None:
        nonlocal first_process
        first_process = pid
        _called(_libc().setns(own, NEWPID))  # or this process could have no threads, and no further children

    def entered() -> None:
        try:
            pass_on(published, first_process)
        except XmigError as error:  # the program runs, and has its network
            print(f"xmigctl: {error}", file=sys.stderr)

    starter = [sys.executable, "-I", "-S", str(Path(first.__file__).resolve()), json.dumps(instructions), *command]
    _called(_libc().unshare(NEWPID))
    try:
        ended = run(
            starter, inner, prepare, reactions, started=started, entered=entered, passes_all=its_session, kept=(status,)
        )  # fmt: skip
    finally:
        os.close(own)
    _go_to_the_end()
    how, _, number = os.pread(status, 64, 0).decode().partition(" ")
    return int(number) if how == "killed" else ended


def _enter(network: Network, job_network: str | None) -> None:
    """The namespaces, in the first process of the new pid namespace. Raises OSError."""
    size, addresses = os.statvfs(SHM), own_addresses()
    if job_network is not None:
        _enter_network(job_network)
    _called(_libc().unshare(NEWNS | NEWIPC | NEWUTS | (NEWNET if network == "private" else 0)))
    _mount("none", "/", "", REC | PRIVATE)
    _leave_mounts()
    for path in ("/proc", SHM):  # nothing of the machine's lies under its own
        while _libc().umount2(path.encode(), DETACH) == 0:
            pass
    _mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC)
    _mount("tmpfs", SHM, "tmpfs", NOSUID | NODEV, f"mode=1777,size={size.f_blocks * size.f_frsize}")
    if network == "private":
        begin_loopback(addresses)


def _enter_network(path: str) -> None:
    namespace = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _called(_libc().setns(namespace, NEWNET))
    finally:
        os.close(namespace)


def _close_io_uring() -> None:
    """CRIU cannot dump it, and libraries use it by themselves where it is there (libuv, and with it PyTorch's
    TCPStore). They do without where the kernel does not know the call. CRIU dumps and restores the filter."""
    code = b"".join(
        struct.pack("HBBI", *each)
        for each in (
            (BPF_LOAD, 0, 0, 0),  # the call's number, which is the same on every architecture
            (BPF_JUMP_EQUAL, 0, 1, IO_URING_SETUP),
            (BPF_RETURN, 0, 0, SECCOMP_ERRNO | errno.ENOSYS),
            (BPF_RETURN, 0, 0, SECCOMP_ALLOW),
        )
    )
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    _called(_libc().prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_char_p(program), 0, 0))


def _open_again() -> None:
    """The files that the program inherits, in its own mount namespace: CRIU refuses those of another one. What shares
    its place in the file goes on sharing it."""
    found: dict[tuple[int, int, int, int], int] = {}
    for number in sorted(int(name) for name in os.listdir("/proc/self/fd")):
        try:
            if not os.get_inheritable(number) or os.isatty(number):
                continue
            status, flags = os.fstat(number), fcntl.fcntl(number, fcntl.F_GETFL)
            if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode) or stat.S_ISCHR(status.st_mode)):
                continue
            at = os.lseek(number, 0, os.SEEK_CUR) if stat.S_ISREG(status.st_mode) else 0
            key = (status.st_dev, status.st_ino, flags, at)
            if key in found:
                os.dup2(found[key], number)
                continue
            again = os.open(os.readlink(f"/proc/self/fd/{number}"), flags & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC))
            opened = os.fstat(again)
            if (opened.st_dev, opened.st_ino) == (status.st_dev, status.st_ino):
                if stat.S_ISREG(status.st_mode):
                    os.lseek(again, at, os.SEEK_SET)
                os.dup2(again, number)
                found[key] = number
            os.close(again)
        except OSError:  # it has no name any more: then it is inherited as it is, and check-movable names it
            continue


def _go_to_the_end() -> None:
    """Whoever has started this command goes on behind what the program has written."""
    for number in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISREG(os.fstat(number).st_mode):
                os.lseek(number, 0, os.SEEK_END)


def _leave_mounts() -> None:
    """Those of other namespaces and containers come and go: what is restored would need them again, and CRIU dumps no
    namespace that is mounted."""
    with open("/proc/self/mountinfo") as file:
        lines = [line.split() for line in file]
    for words in reversed(lines):  # what is mounted on top comes later
        path = words[4].encode().decode("unicode_escape").encode("latin-1")  # \\040 is a space
        kind = words[words.index("-") + 1]
        if kind == "nsfs" or path.startswith(OF_CONTAINERS):
            _libc().umount2(path, DETACH)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    _called(
        _libc().mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode() or None)
    )


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _called(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
