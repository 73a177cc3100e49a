"""One MPS of one device and one user: a control daemon, and the MPS server that it starts.

It runs as its user, in folders of its own, and outlives the daemon as GPU servers do. It is never repaired: what has
had a fault is condemned, and ended once nobody uses it; another one with another number takes its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from xmigd import log
from xmigd.ipc import pidfd as pidfds
from xmigd.ipc.fds import Fd
from xmigd.servers.scopes import Scopes
from xmigd.servers.server import groups_of, home_of

CONTROL = "nvidia-cuda-mps-control"
ASK_PATIENCE = 5.0  # seconds for an answer of the control daemon
START_PATIENCE = 15.0  # seconds until it answers, and until its MPS server runs
LOOK_AGAIN = 0.05  # seconds
END_PATIENCE = 5.0  # seconds for an end that was requested
ANSWER_BYTES = 1 << 16  # whoever answers is a process of the user
MOST_SERVERS = 4  # of one control daemon, that are watched
LOG_BYTES = 4096  # of the end of a log
LOG_LINES = 6

logger = log.get("mps")


class Unusable(Exception):
    """MPS cannot be used, and why."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose servers are clients of it."""

    device: str  # kind:ordinal
    uid: int
    gid: int

    @property
    def name(self) -> str:
        return f"{self.device.replace(':', '')}.{self.uid}.{self.gid}"


class Control:
    """`ended`, with a reason, is called once: it has ended, or its MPS server has, and nobody requested that."""

    def __init__(self, folder: Path, owner: Owner, number: int, ended: Callable[[Control, str], None]) -> None:
        self.owner = owner
        self.number = number
        self.folder = folder / f"{owner.name}.{number}"
        self._identity = folder / f"{owner.name}.{number}.json"
        self._condemned = self._identity.with_suffix(".condemned")
        self._clients_file = self._identity.with_suffix(".clients")
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._child: subprocess.Popen[bytes] | None = None
        self._pid = 0  # of the control daemon
        self._watched: dict[int, Fd] = {}  # the control daemon and its MPS servers, by pid
        self._clients: dict[int, int] = {}  # that work there: start times by pid
        self._unannounced: dict[int, Fd] = {}  # of an earlier daemon, which have not been in touch with this one
        self._over = False

    @property
    def environment(self) -> dict[str, str]:
        """Of its clients."""
        pipe, logs = self.folder / "pipe", self.folder / "log"
        return {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(logs)}

    async def start(self, scopes: Scopes) -> None:
        """Raises Unusable."""
        try:
            await asyncio.to_thread(self._make_folders)
            self._child = await asyncio.to_thread(self._start_child)
            self._pid = self._child.pid
            self._watch(self._pid)
            self._write_identity()
            await scopes.place(self._child.pid, f"MPS of {self.owner.device}, user {self.owner.uid}")
            await self._until_ready()
        except OSError as error:
            self.kill()
            raise Unusable(
                f"{CONTROL} cannot be started: {error.strerror or error}; it comes with NVIDIA's driver"
            ) from None
        except BaseException:
            self.kill()
            raise

    def adopt(self) -> bool:
        """One that an earlier daemon has started. False: a part of it runs no more, or it was condemned, or a client
        that worked has ended, and nobody saw how; what is left is ended."""
        condemned = self._condemned.exists()
        try:
            found: dict[str, int] = json.loads((self._condemned if condemned else self._identity).read_text())
            known = [(int(pid), started) for pid, started in found.items()]
            self._pid = known[0][0]
            living = [pid for pid, started in known if pidfds.same_process(pid, started)]
            for pid in living:
                self._watch(pid)
            whole = not condemned and known != [] and len(living) == len(known) and self._find_clients()
        except (OSError, ValueError, IndexError, AttributeError):
            whole = False
        if not whole:
            self.kill()
        return whole

    def _find_clients(self) -> bool:
        """Those of an earlier daemon. False: one has ended. Raises OSError, ValueError, AttributeError."""
        if not self._clients_file.exists():
            return True
        found: dict[str, int] = json.loads(self._clients_file.read_text())
        self._clients = {int(pid): int(started) for pid, started in found.items()}
        for pid, started in self._clients.items():
            if not pidfds.same_process(pid, started):
                return False
            fd = self._unannounced[pid] = Fd(os.pidfd_open(pid))
            self._loop.add_reader(fd.fileno(), self._client_gone, pid)
        return True

    @property
    def has_unannounced(self) -> bool:
        """Clients of an earlier daemon that will come, or end."""
        return bool(self._unannounced)

    def client_works(self, pid: int) -> None:
        """Its kernels may run. The next daemon has to know: should the client end meanwhile, nobody has seen how."""
        self._announced(pid)
        self._clients[pid] = pidfds.start_time(pid)
        self._write_clients()

    def client_rests(self, pid: int) -> None:
        """Or it has ended; what that means, others decide."""
        if self._clients.pop(pid, None) is not None and not self._over:
            self._write_clients()

    def _announced(self, pid: int) -> None:
        if (fd := self._unannounced.pop(pid, None)) is not None:
            self._loop.remove_reader(fd.fileno())
            fd.close()

    def _client_gone(self, pid: int) -> None:
        self._announced(pid)
        if not self._over:
            self._over = True
            self._ended(self, f"a client (pid {pid}) has ended that an earlier daemon had started")

    async def look(self) -> None:
        """Watch the MPS servers that it has started meanwhile."""
        if self._over:
            return
        try:
            listed = await self._ask("get_server_list")
        except (Unusable, OSError):
            return  # what does not answer any more is found when a server needs it
        for word in listed.split()[:MOST_SERVERS]:
            pid = int(word) if word.isdecimal() else 0
            if not self._over and pid > 0 and pid not in self._watched:
                with contextlib.suppress(OSError):
                    self._watch(pid)
                    self._write_identity()

    async def end(self) -> None:
        """Nobody uses it any more."""
        self._over = True
        try:
            with contextlib.suppress(Unusable, OSError):
                await self._ask("quit")
            end = self._loop.time() + END_PATIENCE
            while self._watched and self._loop.time() < end:
                await asyncio.sleep(LOOK_AGAIN)
        finally:
            self.kill()

    def kill(self) -> None:
        """At once, whoever uses it."""
        self._over = True
        if (control := self._watched.get(self._pid)) is not None and not pidfds.has_exited(control):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)  # with it an MPS server that it has not named yet
        for fd in self._watched.values():
            self._loop.remove_reader(fd.fileno())
            pidfds.send_signal(fd, signal.SIGKILL)
            fd.close()
        self._watched.clear()
        self._watch_no_clients()
        if self._child is not None:
            self._child.kill()  # also one that could not be watched
            self._child.wait()
            self._child = None
        self._forget_identity()
        self._loop.run_in_executor(None, self._remove)  # its user may have put anything there

    def condemn(self) -> None:
        """Also for the next daemon. It is to be killed when its clients have ended."""
        self._over = True
        with contextlib.suppress(OSError):
            self._identity.rename(self._condemned)

    def leave(self) -> None:
        """The daemon leaves, and it stays."""
        self._over = True
        for fd in self._watched.values():
            self._loop.remove_reader(fd.fileno())
            fd.close()
        self._watched.clear()
        self._watch_no_clients()
        if self._child is not None:
            self._child.returncode = 0  # whoever it is left to waits for it
            self._child = None

    def last_lines(self) -> list[str]:
        """Of its logs, as they are."""
        lines: list[str] = []
        for folder, name in (("log", "control.log"), ("log", "server.log"), (".", "output")):
            with contextlib.suppress(OSError):
                # In a folder of its user: never through a link, never one that makes a reader wait.
                fd = os.open(self.folder / folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                with open(fd, "rb") as file:
                    size = os.fstat(fd).st_size
                    text = os.pread(file.fileno(), LOG_BYTES, max(0, size - LOG_BYTES)).decode(errors="replace")
                lines += [f"{name}: {line.strip()}" for line in text.splitlines()[-LOG_LINES:] if line.strip()]
        return lines

    # --- small parts --------------------------------------------------------------------------------------------------

    def _make_folders(self) -> None:
        """What lies in `folder` stays the daemon's: its user cannot put a link in the place of anything that root opens
        or gives away there."""
        self._forget_identity()
        self._remove()
        self.folder.mkdir(mode=0o711)
        for folder in (self.folder / "pipe", self.folder / "log"):
            folder.mkdir(mode=0o700)
            if os.geteuid() == 0:
                os.chown(folder, self.owner.uid, self.owner.gid, follow_symlinks=False)

    def _start_child(self) -> subprocess.Popen[bytes]:
        output = os.open(self.folder / "output", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(output, "wb") as file:
            return subprocess.Popen(
                [CONTROL, "-f"], stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd="/", umask=0o077,
                env=self._own_environment(), start_new_session=True, user=self._user[0], group=self._user[1],
                extra_groups=self._user[2],
            )  # fmt: skip

    @property
    def _user(self) -> tuple[int | None, int | None, list[int] | None]:
        """Whom it becomes, as Popen takes it."""
        uid, gid = self.owner.uid, self.owner.gid
        return (uid, gid, groups_of(uid, gid)) if os.geteuid() == 0 and uid != 0 else (None, None, None)

    def _own_environment(self) -> dict[str, str]:
        """It sees its device alone, which for its clients is device 0 then (shim/device/cuda/device.cc)."""
        passed = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "LANG") if name in os.environ}
        ordinal = self.owner.device.partition(":")[2]
        return passed | home_of(self.owner.uid) | self.environment | {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ordinal
        }  # fmt: skip

    def _write_identity(self) -> None:
        """For the next daemon: the processes, by pid, with their start times. The control daemon is the first."""
        self._write(self._identity, {pid: pidfds.start_time(pid) for pid in self._watched})

    def _write(self, file: Path, processes: dict[int, int]) -> None:
        new = file.with_name(f"{file.name}.new")
        new.write_text(json.dumps(processes))
        new.rename(file)

    def _write_clients(self) -> None:
        try:
            self._write(self._clients_file, self._clients)
        except OSError as error:  # nobody's program waits for that
            logger.error("the clients of an MPS are not written down", number=self.number, why=error.strerror)

    def _watch_no_clients(self) -> None:
        for pid in list(self._unannounced):
            self._announced(pid)

    async def _until_ready(self) -> None:
        """It answers, and its MPS server runs: a fault of that one is seen before anybody has to meet it."""
        end = self._loop.time() + START_PATIENCE
        why = "it does not answer"
        requested = False
        while self._loop.time() < end and not self._over:
            try:
                if not requested:
                    why = await self._ask(f"start_server -uid {self.owner.uid}") or "its MPS server does not start"
                    requested = True
                await self.look()
            except (Unusable, OSError) as error:
                why = str(error)
            if len(self._watched) > 1:
                return
            await asyncio.sleep(LOOK_AGAIN)
        if self._over:
            why = "it has ended"
        raise Unusable(f"MPS of {self.owner.device} cannot be used: {why}; {' | '.join(self.last_lines()[-3:])}")

    async def _ask(self, command: str) -> str:
        """What the control daemon answers. Raises Unusable; OSError."""
        return await asyncio.to_thread(self._ask_now, command)

    def _ask_now(self, command: str) -> str:
        asking = subprocess.Popen(
            [CONTROL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd="/",
            env=self._own_environment(), user=self._user[0], group=self._user[1], extra_groups=self._user[2],
        )  # fmt: skip
        with asking:
            late = threading.Timer(ASK_PATIENCE, asking.kill)
            late.start()
            try:
                assert asking.stdin is not None
                assert asking.stdout is not None
                with contextlib.suppress(BrokenPipeError):
                    asking.stdin.write(f"{command}\n".encode())
                    asking.stdin.close()
                answer = asking.stdout.read(ANSWER_BYTES).decode(errors="replace").strip()
                asking.stdout.close()  # who says more is ended by that, or by the clock
                code = asking.wait()
            finally:
                late.cancel()
        if code == -signal.SIGKILL:
            raise Unusable(f"{CONTROL} has not answered `{command}` within {ASK_PATIENCE:g} s")
        if code != 0:
            raise Unusable(f"{CONTROL} has failed (`{command}`): {answer[:300]}")
        return answer

    def _watch(self, pid: int) -> None:
        """Raises OSError: there is none, or it is somebody else's."""
        fd = Fd(os.pidfd_open(pid))
        if pidfds.owner(pid) != self.owner.uid:  # that it is this one is sure only while it is held
            fd.close()
            raise PermissionError(f"process {pid} is not one of user {self.owner.uid}")
        self._watched[pid] = fd
        self._loop.add_reader(fd.fileno(), self._gone, pid)

    def _gone(self, pid: int) -> None:
        fd = self._watched.pop(pid)
        self._loop.remove_reader(fd.fileno())
        fd.close()
        which = "control daemon" if pid == self._pid else "server"
        if not self._over:
            self._over = True
            self._ended(self, f"the MPS {which} of {self.owner.device} (pid {pid}) has ended")

    def _forget_identity(self) -> None:
        for file in (self._identity, self._condemned, self._clients_file):
            file.unlink(missing_ok=True)

    def _remove(self) -> None:
        with contextlib.suppress(RecursionError):  # whoever nests so many folders keeps them
            shutil.rmtree(self.folder, ignore_errors=True)
