"""CRIU, which writes down what the kernel has of a program, and makes the program again from that."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO

from xmigd.checkpoints import apart, connections, movable, proc
from xmigd.errors import Unavailable, XmigError
from xmigd.ipc import pidfd as pidfds
from xmigd.ipc.fds import Fd
from xmigd.servers.scopes import SLICE

PATIENCE = 600.0  # seconds for a dump or a restoration
OLDEST = 4  # earlier ones fail on kernels since 6.x
LOCK, PIDFILE = "lock", "restored.pid"  # beside its images
# What it has restored is written down, with the machine's start, before its lock is free: the pid alone may be another
# process's when the next daemon looks.
IDENTITY = "restored.process"
RECORDED = (
    f'boot=$1; shift; "$@" || exit; {{ echo "$boot" && cat "/proc/$(cat {PIDFILE})/stat"; }} > {IDENTITY} || '
    f'{{ kill -KILL "$(cat {PIDFILE})"; exit 1; }}; exit 0'
)
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
ERROR = re.compile(r"^(?:\(\d+\.\d+\))?\s*(?:\d+: )?Error \([^)]*\): (.*)$")


class CriuFailed(XmigError):
    """CRIU could not do it. The program is as it was."""

    status = 409
    code = "criu_failed"


class Criu:
    def __init__(self, program: Path, *, confined: bool = False) -> None:
        """`confined`: this daemon is a unit of systemd. What it starts itself has its view of the machine and its
        limits, and what that restored would keep them for ever. So the manager starts CRIU, in a unit without any."""
        self._program = program
        self.confined = confined
        if confined:
            proc.seen_as_by(1)
        self._version: tuple[int, ...] | None = None  # once it was looked at

    async def check(self) -> None:
        """Raises Unavailable: it is not there, too old, or may not be used."""
        if self._version is not None:
            return
        if os.geteuid() != 0:
            raise Unavailable("only root can dump programs", hint="run xmigd as root", code="criu_missing")
        if shutil.which(self._program) is None:
            raise Unavailable(f"{self._program} is not there", hint="dnf install criu", code="criu_missing")
        code, output = await asyncio.to_thread(_version, self._program)
        version = re.search(r"^Version: (\d+(?:\.\d+)*)", output, re.MULTILINE)
        numbers = () if version is None else tuple(int(number) for number in version[1].split("."))
        if code != 0 or version is None or numbers[0] < OLDEST:
            found = version[1] if version is not None else output.strip() or "nothing"
            raise Unavailable(
                f"CRIU {OLDEST} or later is needed, {self._program} is {found}", hint="dnf install criu",
                code="criu_missing",
            )  # fmt: skip
        self._version = numbers

    def as_dumped(self, pid: int) -> movable.Criu:
        """What it refuses depends on this. It was checked. Raises NotFound."""
        assert self._version is not None
        return movable.as_dumped(pid, self._version)

    async def dump(self, pid: int, images: Path, *, leader: bool, mounts: Sequence[str] = (), network: int = 0) -> None:
        """Write process `pid` and its children into the folder. They are left stopped. `leader`: of its session; a
        program in the session of another one is restored into a session of its own. `mounts`: those of the machine's
        in its mount namespace. `network`: the inode of its network, if that is not to be dumped. Raises CriuFailed."""
        remaps = ["--link-remap"] if mounts else []  # in its /dev/shm, which is dumped; others are refused before
        # Both ends of a connection are in the tree, and stand still: nothing has to be locked out.
        await self._do(
            "dump", images, "--tree", str(pid), "--leave-stopped", "--tcp-established", "--network-lock", "skip",
            *remaps, *_session(leader), *apart.dumped_with(mounts), *apart.without_network(network),
            first=_with_connections(pid),
        )  # fmt: skip

    async def restore(
        self, images: Path, *, leader: bool, namespaces: Sequence[str] = (), mounts: Sequence[str] = (),
        network: Path | None = None,
    ) -> int:  # fmt: skip
        """Make it again, with the pid that it had, or that it sees. Returns its pid here; it is left stopped.
        `namespaces`: that it has for itself. `network`: a namespace that is there, in place of the one that was not
        dumped. Raises CriuFailed."""
        options = ("--restore-detached", "--leave-stopped", "--pidfile", str(images / PIDFILE), "--tcp-established")
        place = partial(apart.restored_in, str(images / "root"), namespaces, mounts, network)
        await self._do("restore", images, *options, *_session(leader), place=place)
        return int((images / PIDFILE).read_text())

    async def _do(
        self, action: str, images: Path, *options: str, first: Sequence[str] = (),
        place: Callable[[list[str]], list[str]] = list,
    ) -> None:  # fmt: skip
        """`first`: what comes before the command, and executes it. `place`: what it becomes where it is executed."""
        log = images / f"{action}.log"
        command = [str(self._program), action, "--images-dir", str(images), "--log-file", log.name, "-v2", *options]
        command = [*first, *place(command)]
        if action == "restore":
            # As a daemon reads it, the next one, too: in a container, a unit may see another than this one does.
            command = ["sh", "-c", RECORDED, "sh", pidfds.boot_id().decode(), *command]
        if self.confined:
            command = _by_the_manager(action, images, [*command, "--manage-cgroups=ignore"])
        # It holds the lock for as long as it runs, whatever becomes of us.
        with open(images / LOCK, "w") as lock, open(images / f"{action}.out", "w+b") as output:
            fcntl.flock(lock, fcntl.LOCK_EX)
            code = await _run(command, images, output, lock.fileno())
            if code != 0:
                output.seek(0)
                printed = output.read(4096).decode(errors="replace").strip()
                why = _why(log) or printed or f"it ended with {code}"
                raise CriuFailed(f"CRIU could not {action} the program: {why}")


def _by_the_manager(action: str, images: Path, command: list[str]) -> list[str]:
    """It ends with CRIU, as CRIU does. What is restored stays in the unit, which is there for as long as that is."""
    output = f"append:{images / action}.out"
    own = {
        "dump": {"Type": "oneshot", "Description": "CRIU writes a program down"},
        "restore": {
            "Type": "forking", "PIDFile": f"{images / PIDFILE}", "Description": "A program that xMIG has restored",
        },
    }[action]  # fmt: skip
    unit = {
        "Slice": SLICE, "WorkingDirectory": f"{images}", "StandardOutput": output, "StandardError": output,
        "LimitNOFILE": "infinity", "LimitMEMLOCK": "infinity", "TasksMax": "infinity", "OOMPolicy": "continue",
        "KillMode": "mixed", "TimeoutStartSec": "infinity", **own,
    }  # fmt: skip
    properties = [f"--property={name}={value}" for name, value in unit.items()]
    environment = [f"--setenv={name}={value}" for name, value in ENVIRONMENT.items()]
    name = f"--unit=xmig-{action}-{images.name.removeprefix('criu-')}"
    return ["systemd-run", "--quiet", "--collect", name, *properties, *environment, "--", *command]


def _with_connections(pid: int) -> list[str]:
    return [sys.executable, "-I", "-S", str(Path(connections.__file__).resolve()), str(pid)]


def _session(leader: bool) -> list[str]:
    return [] if leader else ["--shell-job"]


def ended(images: Path) -> int | None:
    """Wait until the CRIU of an earlier daemon that works in this folder has ended. Returns the pid of what it has
    restored, if that is there. Blocks."""
    with contextlib.suppress(OSError), open(images / LOCK) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
    with contextlib.suppress(OSError, ValueError, IndexError):
        boot, _, stat = (images / IDENTITY).read_bytes().partition(b"\n")
        pid = int(stat.split(maxsplit=1)[0])
        if boot == pidfds.boot_id() and pidfds.same_process(pid, pidfds.started(stat)):
            return pid
    return None


def _version(program: Path) -> tuple[int, str]:
    try:
        done = subprocess.run(
            [program, "--version"], env=ENVIRONMENT, capture_output=True, text=True, errors="replace", check=False,
            timeout=60,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, done.stdout


async def _run(command: list[str], folder: Path, output: IO[bytes], *kept: int) -> int:
    """In a session of its own, which what it restores may get. Returns its exit code. Raises Unavailable: it cannot be
    started, or hangs.

    It is never killed: in the middle of a dump its own code is in the program. If this daemon leaves, it goes on. So
    this is no subprocess of asyncio's, which are killed with their loop.
    """
    try:
        process = subprocess.Popen(
            command, cwd=folder, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True, pass_fds=kept,
        )  # fmt: skip
    except OSError as error:
        raise Unavailable(f"{command[0]} cannot be started: {error.strerror}", code="criu_missing") from None
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    with contextlib.closing(Fd(os.pidfd_open(process.pid))) as pidfd:
        loop.add_reader(pidfd.fileno(), over.set)
        try:
            await asyncio.wait_for(over.wait(), PATIENCE)
        except TimeoutError:
            raise Unavailable(f"CRIU did not end within {PATIENCE:g} s, and goes on", code="criu_failed") from None
        finally:
            loop.remove_reader(pidfd.fileno())
    return process.wait()


def _why(log: Path) -> str:
    """The first errors in its log: what follows them is what came of them."""
    with contextlib.suppress(OSError):
        lines = log.read_text(errors="replace").splitlines()
        found = [match[1] for line in lines if (match := ERROR.match(line)) is not None]
        # It goes on without these: the second is tried at each start.
        real = [one for one in found if not one.startswith("rlimit:") and "iptables-restore" not in one]
        return "; ".join((real or found)[:2])
    return ""
