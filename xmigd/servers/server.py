"""One xmig-server: started or adopted, its connection, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from xmigd.errors import ProtocolError
from xmigd.ipc import exits
from xmigd.ipc import pidfd as pidfds
from xmigd.ipc.channel import Channel, Peer, Received
from xmigd.ipc.fds import Fd, close_all
from xmigd.ipc.messages import ServerMessage, expected_fds, pack, parse
from xmigd.native import SERVER
from xmigd.servers import holder
from xmigd.servers.output import Output
from xmigd.servers.scopes import Scopes

# What of the daemon's environment a server may see: where to find programs and the driver, and the sanitizers' options.
PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "ASAN_OPTIONS", "UBSAN_OPTIONS", "TSAN_OPTIONS",
             "LSAN_OPTIONS", "CUDA_VISIBLE_DEVICES", "LLVM_PROFILE_FILE")  # fmt: skip


CLOSE_GRACE = 0.5  # seconds in which a server that closes its connection has begun to exit
LOOK_AGAIN = 0.001  # seconds: whether it has
END_PATIENCE = 5.0  # seconds for an end that was requested


@dataclass(frozen=True, slots=True)
class ServerProgram:
    """How servers are started on this node."""

    native_dir: Path
    runtime_dir: Path
    device_memory: int
    scopes: Scopes = field(default_factory=Scopes)
    # Ordinals, a bit each, whose contexts are opened at once; the others are when a program needs them. None: all.
    devices: int | None = None
    address: str = ""  # of this node, for servers of others; empty: their process has no ranks there

    def command(self, device: str, control_fd: int) -> list[str]:
        command = [str(self.native_dir / SERVER), "--device", device, "--control-fd", str(control_fd)]
        if self.device_memory:
            command += ["--memory", str(self.device_memory)]
        if self.devices is not None:
            ordinals = [str(each) for each in range(self.devices.bit_length()) if self.devices >> each & 1]
            command += ["--open", ",".join(ordinals) or "late"]
        if self.address:
            command += ["--address", self.address]
        return [*command, "--runtime-dir", str(self.runtime_dir)]


class HolderProgram(ServerProgram):
    """Likewise, of the holders of suspended processes. They run as the daemon does: what they hold is the daemon's."""

    def command(self, device: str, control_fd: int) -> list[str]:
        script = Path(holder.__file__)
        return [sys.executable, "-I", str(script), "--control-fd", str(control_fd), "--runtime-dir",
                str(self.runtime_dir)]  # fmt: skip


def groups_of(uid: int, gid: int) -> list[int]:
    try:
        return os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)
    except KeyError:
        return [gid]


def home_of(uid: int) -> dict[str, str]:
    """Where the driver keeps what it has compiled (~/.nv/ComputeCache), as it does natively."""
    try:
        return {"HOME": pwd.getpwuid(uid).pw_dir}
    except KeyError:
        return {}


@dataclass(frozen=True, slots=True)
class Ending:
    """How a server ended."""

    text: str
    clean: bool = False
    killed: bool = False  # by SIGKILL

    @classmethod
    def of(cls, code: int) -> Ending:
        if code >= 0:
            return cls(f"exit code {code}", clean=code == 0)
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return cls(f"killed by {name}", killed=-code == signal.SIGKILL)


class ServerHooks:
    """What a server's owner wants to hear of."""

    def __init__(
        self,
        *,
        started: Callable[[Server], None],
        failed: Callable[[Server, str], None],
        message: Callable[[Server, ServerMessage, list[Fd], bool], None],
        misbehaved: Callable[[Server, str], None],
        exited: Callable[[Server, Ending, int], None],
        ending: Callable[[Server], None] = lambda _: None,
        printed: Callable[[Server, str, int], None] = lambda _, __, ___: None,
    ) -> None:
        """`printed`: a line of its standard output or error, printable; or how many lines were too many. `ending`: none
        of its code runs any more, and its exit follows."""
        self.started = started
        self.failed = failed
        self.message = message
        self.misbehaved = misbehaved
        self.exited = exited
        self.ending = ending
        self.printed = printed


class Server:
    """A server process. `exited` is the last thing that is heard of it, after every message that it sent; it says when
    the first sign of its end was seen (CLOCK_MONOTONIC, ns)."""

    def __init__(self, number: int, device: str, hooks: ServerHooks) -> None:
        self.number = number
        self.device = device
        self.pid = 0
        self.start_time = 0
        self.device_bytes = 0  # that it takes for itself
        self.preloaded_bytes = 0  # and for what it has loaded ahead, as a standby
        self.communicators = 0  # that it has made ahead, as have the other ranks' servers
        self.communicator_bytes = 0  # of its devices, that these take
        self.preloaded = False  # all that it was instructed to
        self.devices = 0  # whose contexts it was instructed to open, as a standby
        self.takes_profiling = True  # one of an earlier version does not
        self.takes_sharing = True  # likewise
        self.quota_slots: tuple[int, ...] = ()  # that it writes, in the page of its job's memory quota
        self._hooks = hooks
        self._loop = asyncio.get_running_loop()
        self._channel: Channel | None = None
        self._pidfd: Fd | None = None
        self._output: Output | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._kill_wanted = False
        self._ended_at = 0

    # --- beginnings ---------------------------------------------------------------------------------------------

    async def spawn(
        self, program: ServerProgram, user: Peer, about: str = "", environment: Mapping[str, str] | None = None
    ) -> None:
        """Start it as `user`. Ends in `started` or `failed`. `about`: for whom it works, in words. `environment`: what
        it has beside what every server has."""
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            self._hooks.failed(self, f"no control socket: {error.strerror}")
            return
        try:
            self._output, printing = Output.make(self._printed)
        except OSError as error:
            ours.close()
            theirs.close()
            self._hooks.failed(self, f"no pipe for what it prints: {error.strerror}")
            return
        try:
            with theirs:
                child = await asyncio.to_thread(
                    self._start_child, program, user, theirs.fileno(), printing.fileno(), environment or {}
                )
        except (OSError, subprocess.SubprocessError) as error:
            ours.close()
            self._close_output()
            reason = error.strerror if isinstance(error, OSError) else str(error)
            self._hooks.failed(self, f"{program.native_dir / SERVER} cannot be started: {reason}")
            return
        finally:
            printing.close()
        self._child = child
        try:
            self._pidfd = Fd(os.pidfd_open(child.pid))
        except OSError as error:
            ours.close()
            child.kill()
            await asyncio.to_thread(child.wait)
            self._close_output()
            self._hooks.failed(self, f"no pidfd of the server: {error.strerror}")
            return
        self._begin(child.pid, ours)
        await program.scopes.place(child.pid, f"GPU server of {about}")

    def adopt(self, pid: int, pidfd: Fd, channel_socket: socket.socket, *, takes_output: bool) -> None:
        """One that outlived an earlier daemon; not our child. `takes_output`: the pipe of that daemon has no reader any
        more, and it takes another one for it."""
        self._pidfd = pidfd
        self._begin(pid, channel_socket)
        if takes_output:
            with contextlib.suppress(OSError):  # without descriptors it goes on unheard
                self._output, printing = Output.make(self._printed)
                self.send(pack("output"), (printing,))

    def _start_child(
        self, program: ServerProgram, user: Peer, control_fd: int, printing: int, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        change = os.geteuid() == 0 and user.uid != 0
        passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        return subprocess.Popen(
            program.command(self.device, control_fd),
            stdin=subprocess.DEVNULL,
            stdout=printing,
            stderr=printing,
            cwd="/",
            env=passed | home_of(user.uid) | {**environment},
            pass_fds=(control_fd,),
            start_new_session=True,
            restore_signals=False,  # SIGPIPE stays ignored: a server outlives the daemon, who reads what it prints
            user=user.uid if change else None,
            group=user.gid if change else None,
            extra_groups=groups_of(user.uid, user.gid) if change else None,
            umask=0o077,
        )

    def _begin(self, pid: int, sock: socket.socket) -> None:
        assert self._pidfd is not None
        self.pid = pid
        self.start_time = pidfds.start_time(pid)
        self._channel = Channel(self._loop, sock, self._received, self._channel_ended)
        self._loop.add_reader(self._pidfd.fileno(), self._gone)
        self._hooks.started(self)
        if self._kill_wanted:
            self.kill()

    def hand_over(self, hooks: ServerHooks) -> None:
        """From now on somebody else listens."""
        self._hooks = hooks

    # --- life -----------------------------------------------------------------------------------------------------

    def send(self, data: bytes, fds: Sequence[Fd] = ()) -> None:
        if self._channel is not None:
            self._channel.send(data, fds)

    def kill(self) -> None:
        """SIGKILL: nothing that a server could do on its way out is needed, and no server can refuse it."""
        self._kill_wanted = True
        if self._pidfd is not None:
            pidfds.send_signal(self._pidfd, signal.SIGKILL)

    def end(self, why: str) -> None:
        """It stops, waits for its device and exits; if it does not in time, it is killed."""
        self.send(pack("stop", reason=why[:1000]))
        self._loop.call_later(END_PATIENCE, self.kill)

    def forget(self) -> None:
        """The daemon is leaving, the server stays: it sees its connection end and looks for the next daemon."""
        if self._channel is not None:
            self._channel.close()
        self._close_output()
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd.fileno())
            self._pidfd.close()
            self._pidfd = None
        if self._child is not None:
            self._child.returncode = self._child.returncode if self._child.returncode is not None else 0

    def _received(self, received: Received) -> None:
        try:
            message = parse(received.data)
            expected = expected_fds(message)
            if len(received.fds) != expected and not received.fds_missing:
                raise ProtocolError(f"{message.type} with {len(received.fds)} descriptors instead of {expected}")
        except ProtocolError as error:
            close_all(received.fds)
            self._misbehaved(str(error))
            return
        self._hooks.message(self, message, received.fds, received.fds_missing)

    def _printed(self, line: str, dropped: int) -> None:
        self._hooks.printed(self, line, dropped)

    def _close_output(self) -> None:
        output, self._output = self._output, None
        if output is not None:
            output.close()

    def refuse(self, reason: str) -> None:
        """What it reported fits the schema but cannot be true."""
        self._misbehaved(reason)

    def _misbehaved(self, reason: str) -> None:
        if self._channel is not None:
            self._channel.close()
        self._hooks.misbehaved(self, reason)

    def _channel_ended(self, reason: str, by_peer: bool) -> None:
        if not by_peer:
            self._hooks.misbehaved(self, reason)
            return
        self._ended_at = time.monotonic_ns()
        self._look_whether_it_ends(reason)

    def _look_whether_it_ends(self, reason: str) -> None:
        """With a GPU to give back that takes long, and only its end says why it has ended."""
        if self._pidfd is None:
            return
        if pidfds.is_exiting(self.pid):
            self.kill()  # for one of which some threads live
            if pidfds.runs_no_more(self.pid):
                self._hooks.ending(self)
                return
        elif time.monotonic_ns() - self._ended_at > CLOSE_GRACE * 1e9:
            self._ended_at = 0
            self._hooks.misbehaved(self, reason)
            return
        self._loop.call_later(LOOK_AGAIN, self._look_whether_it_ends, reason)

    # --- the end ----------------------------------------------------------------------------------------------------

    def _gone(self) -> None:
        assert self._pidfd is not None
        if self._channel is not None:
            self._channel.drain()
            self._channel.close()
        self._loop.remove_reader(self._pidfd.fileno())
        ending = Ending("it has exited")  # of one that is not our child, on an older kernel, no more is known
        if self._child is not None:
            ending = Ending.of(self._child.wait())  # it has exited: this does not wait
        elif (status := exits.exit_status(self._pidfd, self.pid, self.start_time)) is not None:
            ending = Ending.of(os.waitstatus_to_exitcode(status))
        self._pidfd.close()
        self._pidfd = None
        self._close_output()
        self._hooks.exited(self, ending, self._ended_at or time.monotonic_ns())
