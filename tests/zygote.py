"""Daemons that start fast: a process that has imported everything forks one for each line on its standard input,
`{"env": ..., "log": ..., "folder": ..., "program": ..., "namespaces": [...]}`. It answers with the pid, and says
`PID STATUS` when one has ended, as wait() has it. Nothing but the time to import is saved, and the time
to free all of it; each is a daemon like any. Its other end is forked.py."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import runpy
import select
import signal
import sys
from typing import NoReturn

exit_code: int | None = None  # of a daemon that has come to its end


@atexit.register  # before all others, and so called after them
def leave() -> None:
    """What a daemon has in memory goes with its process. To free one object after the other would first copy what it
    shares with this one, and take a third as long as a start."""
    if exit_code is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


from xmigd.main import be_lean, main  # noqa: E402

be_lean()  # before anything large is imported, as in any daemon

import anyio._backends._asyncio  # noqa: E402
import cryptography.x509  # noqa: E402
import sqlalchemy  # noqa: E402
import uvicorn.lifespan.off  # noqa: E402
from alembic import command  # noqa: E402
from sqlalchemy.dialects import sqlite  # noqa: E402

from xmigd import daemon, failpoints  # noqa: E402
from xmigd.database.models import Base  # noqa: E402

assert daemon.logger is not None  # to import them is what takes the time
assert command.upgrade is not None
# What a daemon imports with its first request.
assert anyio._backends._asyncio.backend_class is not None
assert cryptography.x509.CertificateBuilder is not None  # with its first start
assert uvicorn.lifespan.off.LifespanOff is not None
for table in Base.registry.mappers:  # what its first queries find out about each
    sqlalchemy.select(table.class_).compile(dialect=sqlite.dialect())


libc = ctypes.CDLL(None, use_errno=True)


def enter(namespaces: list[str]) -> None:
    """All of them are opened before the first is entered: then the others' paths may lead elsewhere."""
    opened = [os.open(path, os.O_RDONLY) for path in namespaces]
    for fd, path in zip(opened, namespaces, strict=True):
        if libc.setns(fd, 0) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
        os.close(fd)
    if any(path.endswith("/pid") for path in namespaces):  # it is for children
        be_parent_of(os.fork())


def be_parent_of(pid: int) -> None:
    """End as the child does, and as a shell says it. The child goes on."""
    if pid:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os._exit(code if code >= 0 else 128 - code)


def become_a_daemon(
    env: dict[str, str], log: str, folder: str, program: str | None, namespaces: list[str]
) -> NoReturn:  # fmt: skip
    for number, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY | os.O_APPEND), (2, os.O_WRONLY | os.O_APPEND)):
        fd = os.open(os.devnull if number == 0 else log, flags | (os.O_CREAT if number else 0), 0o600)
        os.dup2(fd, number)
        os.close(fd)
    enter(namespaces)
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    failpoints.arm(env.get("XMIG_FAILPOINT", ""))
    sys.argv = ["xmigd"]
    try:
        if program:
            runpy.run_path(program, run_name="__main__")
        else:
            main()
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        end(ended.code or 0)
    end(0)


def end(code: int) -> NoReturn:
    """Threads are waited for, and what is to happen at the end happens; `leave` comes last."""
    global exit_code
    exit_code = code
    sys.exit(code)


def serve() -> None:
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    running = 0
    while True:
        ready, _, _ = select.select([sys.stdin, woken], [], [])
        if woken in ready:
            os.read(woken, 512)
            while running:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                running -= 1
                print(pid, status, flush=True)
        if sys.stdin not in ready:
            continue
        line = sys.stdin.readline()  # nobody writes a second one before this is answered
        if not line:
            return
        wanted = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(woken)
            os.close(wake)
            become_a_daemon(**wanted)
        running += 1
        print(pid, flush=True)


if __name__ == "__main__":
    serve()
