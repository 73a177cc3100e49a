"""What stops a program from being dumped with CRIU and restored elsewhere, read from /proc before anybody tries.

Nothing is stopped, opened or changed. What CRIU refuses was found by letting it dump small programs, one for each rule
here; tests/criu/test_movable.py does so again and compares. A program goes on while it is read, so this is what was so
a moment ago.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from xmigd.checkpoints import proc, sockets
from xmigd.checkpoints.apart import KINDS, namespaces_of
from xmigd.errors import Forbidden, NotFound
from xmigd.text import harmless

Stops = Literal["here", "elsewhere", "depends"]
Code = Literal[
    "address", "bpf", "cpu", "descriptor", "device", "file", "files", "guard_pages", "io_uring", "limits", "lock",
    "memory", "namespace", "perf_event", "pidfd", "pipe", "semaphore", "session", "shared_memory", "socket",
    "sysv_memory", "tcp_connection", "terminal", "tracer", "unix_socket", "userfaultfd", "watch",
]  # fmt: skip
Option = Literal["ext-unix-sk", "file-locks", "link-remap", "own-namespaces", "shell-job", "tcp-established"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """`stops`: `here`, CRIU refuses to dump it. `elsewhere`, it is dumped, and what is restored on another node lacks
    something. `depends`, it is restored where the other node has the same."""

    code: Code
    pid: int
    what: str
    why: str
    hint: str
    stops: Stops


@dataclass(frozen=True, slots=True, kw_only=True)
class Criu:
    """How CRIU is started, as far as it decides what CRIU refuses."""

    version: tuple[int, ...] = (4, 2)
    options: frozenset[Option] = frozenset()
    ghost_limit: int = 1 << 20  # bytes of a deleted file (--ghost-limit)
    elsewhere: frozenset[tuple[str, str]] = frozenset()  # connections, from where to where: other ends dumped there


def as_dumped(pid: int, version: tuple[int, ...] = (4, 2)) -> Criu:
    """CRIU as a checkpoint of this process starts it. Raises NotFound: it has ended."""
    options: set[Option] = {"tcp-established"}
    if not leads(pid):
        options.add("shell-job")
    if namespaces := namespaces_of(pid):
        options.add("own-namespaces")
        if "mnt" in namespaces:
            options.add("link-remap")
    return Criu(version=version, options=frozenset(options))


def leads(pid: int) -> bool:
    """Its session? Raises NotFound: it has ended."""
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        raise NotFound(f"there is no process {pid}", hint="its program has ended") from None


def processes_of(pid: int) -> list[int]:
    """The process and all that descend from it, parents first: what CRIU dumps with it. Raises NotFound."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(*proc.GONE, PermissionError):  # /proc may hide other users' processes (hidepid)
                children.setdefault(proc.Stat(int(name)).parent, []).append(int(name))
    if not os.path.exists(f"/proc/{pid}"):
        raise NotFound(f"there is no process {pid}", hint="its program has ended")
    found = [pid]
    for each in found:  # which grows meanwhile
        found += sorted(children.get(each, ()))
    return found


def obstacles(pid: int, criu: Criu | None = None) -> list[Obstacle]:
    """What stands in the way of the process and its descendants, that which stops most first. Raises NotFound: it has
    ended. Raises Forbidden: this process may not read one of them."""
    # Names of files are the program's: they may have any bytes.
    found = [replace(each, what=harmless(each.what)) for each in _Tree(pid, criu or Criu()).obstacles()]
    order = ("here", "elsewhere", "depends")
    return sorted(found, key=lambda each: order.index(each.stops))


PIPE_OF_PACKETS = os.O_DIRECT
PIDFD_OF_THREAD = os.O_EXCL
MEM, TTY, TTY_AUX, PTS = 1, 4, 5, range(136, 144)  # major numbers, Documentation/admin-guide/devices.txt
INET = ("TCP", "UDP", "UDP-Lite", "UDPLITE", "RAW", "PING")

NESTED = ("net", "mnt")  # namespaces of which CRIU dumps several

# anon_inode: what CRIU dumps, and a code with a hint for what it does not.
DUMPED = ("eventfd", "eventpoll", "inotify", "fanotify", "signalfd", "timerfd", "pidfd")
REFUSED: dict[str, tuple[Code, str]] = {
    "io_uring": ("io_uring", "run it with xmigctl run --movable, or sysctl kernel.io_uring_disabled=2"),
    "perf_event": ("perf_event", "end the profiler"),
    "userfaultfd": ("userfaultfd", "close it before the dump"),
    "bpf": ("bpf", "close it before the dump"),
}  # fmt: skip
# Mapped by the kernel under names that look like deleted files; CRIU dumps their content.
ANONYMOUS = ("/memfd:", "/dev/zero", "/SYSV", "/[aio]", "/anon_hugepage")


class _Tree:
    """A process tree as it was read once."""

    def __init__(self, root: int, criu: Criu) -> None:
        self.root = root
        self.criu = criu
        self._inet_read: dict[tuple[str, str], dict[int, sockets.InetSocket]] = {}
        self._mounts_read: dict[int, set[int]] = {}
        self.processes: list[proc.Process] = []
        for pid in processes_of(root):
            try:
                with contextlib.suppress(*proc.GONE):
                    self.processes.append(proc.read(pid))
            except PermissionError as error:
                raise _not_readable(pid, error) from None
        if not self.processes or self.processes[0].pid != root or not self.processes[0].namespaces:
            raise NotFound(f"process {root} has ended")
        self.pids = {each.pid for each in self.processes}
        self.namespaces = {link for each in self.processes for link in each.namespaces.values()}
        self.sockets: set[int] = set()
        self.ends: dict[tuple[int, int], int] = {}  # of pipes and FIFOs, by device and inode
        self.masters: set[str] = set()  # indices of pseudoterminals whose masters are in the tree
        for each in (one for process in self.processes for one in process.descriptors):
            if stat.S_ISSOCK(each.stat.st_mode):
                self.sockets.add(each.inode)
            elif stat.S_ISFIFO(each.stat.st_mode):
                key = (each.stat.st_dev, each.stat.st_ino)
                self.ends[key] = self.ends.get(key, 0) | proc.ends(each.flags)
            elif each.stat.st_rdev == os.makedev(TTY_AUX, 2):
                self.masters.add(each.field("tty-index:"))

    def obstacles(self) -> Iterator[Obstacle]:
        for process in self.processes:
            try:
                with contextlib.suppress(*proc.GONE):
                    yield from self._of_process(process)
            except PermissionError as error:
                raise _not_readable(process.pid, error) from None
        yield from self._files()
        if (present := proc.wide_instructions()) is not None:
            yield _depends(
                "cpu", self.root, f"this CPU has {present}",
                "libraries chose their code for the CPU on which they were started",
                "restore it where the CPU has the same",
            )  # fmt: skip

    # --- of a process ------------------------------------------------------------------------------------------------

    def _of_process(self, process: proc.Process) -> Iterator[Obstacle]:
        pid = process.pid
        if not process.namespaces:  # it has ended, and nobody has waited for it
            return
        yield from self._session(pid)
        yield from self._namespaces_of(process)
        yield from self._tracer(pid)
        yield from self._limits(pid)
        for each in process.descriptors:
            with contextlib.suppress(*proc.GONE):  # closed meanwhile
                yield from self._descriptor(pid, each)
        for mapping in {each.path: each for each in process.mappings}.values():
            with contextlib.suppress(*proc.GONE):
                yield from self._mapping(mapping)
        if self.criu.version < (4, 2) and proc.has_guard_pages(pid):
            yield _here(
                "guard_pages", pid, "memory with guard pages (MADV_GUARD_INSTALL)",
                "CRIU before 4.2 does not know them", "use CRIU 4.2 or later",
            )  # fmt: skip

    def _session(self, pid: int) -> Iterator[Obstacle]:
        if pid == self.root and (session := proc.Stat(pid).session) != pid:
            yield self._unless(
                "shell-job", "session", pid, f"session {session}", "its session leader is not in the process tree",
                "start it in a session of its own (setsid)", otherwise="depends",
            )  # fmt: skip

    def _namespaces_of(self, process: proc.Process) -> Iterator[Obstacle]:
        """CRIU sees namespaces of the first process that are not its own, and those of the others that are not the
        first one's."""
        pid, own = process.pid, self.processes[0].namespaces
        daemons = proc.namespaces(proc.machine())
        for kind, link in process.namespaces.items():
            hint = f"start the whole program in the daemon's {kind} namespace"
            if pid != self.root:
                if link != own[kind] and kind not in NESTED:
                    yield _here("namespace", pid, link, f"CRIU dumps no {kind} namespace within another", hint)
                elif link != own[kind] and own[kind] == daemons[kind]:
                    why = f"CRIU restores it only if the program's first process has a {kind} namespace, too"
                    yield _elsewhere("namespace", pid, link, why, hint)
            elif link != daemons[kind]:
                yield from self._namespace_of_root(kind, link, hint)

    def _namespace_of_root(self, kind: str, link: str, hint: str) -> Iterator[Obstacle]:
        pid = self.root
        if "own-namespaces" in self.criu.options and kind in KINDS:
            return
        if kind == "mnt":
            yield _here("namespace", pid, link, "CRIU has to be given each of its mounts", hint)
        elif kind == "net" and shutil.which("iptables-restore") is None:
            yield _here("namespace", pid, link, "CRIU locks it with iptables-restore, which is not installed", hint)
        elif kind == "pid" and not proc.is_init(pid):
            yield _here("namespace", pid, link, "CRIU dumps a pid namespace only with its first process", hint)
        elif kind == "user" and not proc.is_mapped(pid):
            yield _here("namespace", pid, link, "it has no uid_map or gid_map", hint)
        elif kind == "user" and self.processes[0].namespaces["pid"] == proc.namespaces(proc.machine())["pid"]:
            why = "CRIU restores a user namespace only with a pid namespace, to mount its /proc"
            yield _elsewhere("namespace", pid, link, why, hint)

    def _tracer(self, pid: int) -> Iterator[Obstacle]:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(*proc.GONE), open(f"/proc/{pid}/task/{thread}/status", errors="replace") as file:
                tracer = next((line.split()[1] for line in file if line.startswith("TracerPid:")), "0")
                if tracer != "0":
                    yield _here(
                        "tracer", pid, f"thread {thread} is traced by process {tracer}",
                        "a process has one tracer, and CRIU has to be that", "end the debugger, strace or profiler",
                    )  # fmt: skip
                    return

    def _limits(self, pid: int) -> Iterator[Obstacle]:
        try:
            resource.prlimit(pid, resource.RLIMIT_CPU)
        except PermissionError:
            yield _here(
                "limits", pid, f"resource limits of user {os.stat(f'/proc/{pid}').st_uid}",
                "only with CAP_SYS_RESOURCE may CRIU read those of another user's process",
                "give the daemon CAP_SYS_RESOURCE",
            )  # fmt: skip

    # --- descriptors -------------------------------------------------------------------------------------------------

    def _descriptor(self, pid: int, each: proc.Descriptor) -> Iterator[Obstacle]:
        mode = each.stat.st_mode
        if each.field("lock:"):
            yield self._unless(
                "file-locks", "lock", pid, each.name, "a lock of this file is held", "release it", otherwise="depends"
            )
        if stat.S_ISCHR(mode):
            yield from self._character_device(pid, each)
        elif stat.S_ISBLK(mode):
            yield _here("device", pid, each.name, "CRIU dumps no block devices", "close it")
        elif stat.S_ISSOCK(mode):
            yield from self._socket(pid, each)
        elif stat.S_ISFIFO(mode):
            yield from self._pipe(pid, each)
        elif each.link.startswith(("anon_inode:", "pidfd:")):
            yield from self._anonymous(pid, each)
        elif not each.link.startswith("/"):  # of a namespace
            if each.link not in self.namespaces:
                yield _here("namespace", pid, each.name, "no process of the tree is in this namespace", "close it")
        elif not each.link.startswith("/memfd:"):
            yield from self._file(pid, each)

    def _character_device(self, pid: int, each: proc.Descriptor) -> Iterator[Obstacle]:
        major, minor = os.major(each.stat.st_rdev), os.minor(each.stat.st_rdev)
        if major == MEM or (major == TTY_AUX and minor in (0, 2)):
            return
        if major in PTS:
            if str(minor) not in self.masters and not each.link.endswith(proc.DELETED):
                yield self._unless(
                    "shell-job", "terminal", pid, each.name, "the terminal's other end is not in the process tree",
                    "start it with its input and output in files",
                )  # fmt: skip
        elif (major == TTY and minor > 0) or (major == TTY_AUX and minor == 1):
            yield _depends(
                "terminal", pid, each.name, "it is a terminal of this machine",
                "start it with its input and output in files",
            )  # fmt: skip
        else:
            yield _here("device", pid, each.name, "CRIU dumps no device files", _device_hint(each.link))

    def _anonymous(self, pid: int, each: proc.Descriptor) -> Iterator[Obstacle]:
        kind = each.link.partition(":")[2].strip("[]")
        if each.link.startswith("pidfd:") or kind == "pidfd":
            target = int(each.field("Pid:") or "-1")
            if each.flags & PIDFD_OF_THREAD:
                yield _here("pidfd", pid, each.name, "CRIU dumps no pidfd of a thread", "close it")
            elif target > 0 and target not in self.pids:
                what = f"{each.name} of process {target}"
                yield _here("pidfd", pid, what, "that process is not in the tree", "close it")
        elif kind in ("inotify", "fanotify"):
            yield from self._watches(pid, each)
        elif kind not in DUMPED:
            yield _here(*_refused(pid, each.name, kind))

    def _watches(self, pid: int, each: proc.Descriptor) -> Iterator[Obstacle]:
        for line in each.info.splitlines():
            words = dict(word.partition(":")[::2] for word in line.split() if ":" in word)
            if "f_handle" in words and not proc.opens_by_handle(words):
                yield _here(
                    "watch", pid, f"{each.name} watches inode {int(words['ino'], 16)}",
                    "the filesystem of what is watched opens no files by handle", "watch files of another filesystem",
                )  # fmt: skip
                return
        yield _depends(
            "watch", pid, each.name, "what it watches has to be there", "have the same paths on the other node"
        )

    def _pipe(self, pid: int, each: proc.Descriptor) -> Iterator[Obstacle]:
        if each.link.startswith("pipe:") and each.flags & PIPE_OF_PACKETS:
            yield _here("pipe", pid, each.name, "CRIU dumps no pipes of packets (O_DIRECT)", "open it without O_DIRECT")
        key = (each.stat.st_dev, each.stat.st_ino)
        missing = (proc.READ | proc.WRITE) & ~self.ends[key]
        if missing and missing & self._open_outside.get(key, 0):
            end = "read" if missing & proc.READ else "write"
            yield _elsewhere(
                "pipe", pid, each.name, f"its {end} end is open outside of the tree only, and will be closed",
                "start the program with its input and output in files",
            )  # fmt: skip

    @cached_property
    def _open_outside(self) -> dict[tuple[int, int], int]:
        """Which ends of the tree's pipes other processes have open, as far as they may be read."""
        found: dict[tuple[int, int], int] = {}
        for name in os.listdir("/proc"):
            if name.isdecimal() and int(name) not in self.pids:
                with contextlib.suppress(*proc.GONE, PermissionError):
                    for number in os.listdir(f"/proc/{name}/fd"):
                        with contextlib.suppress(*proc.GONE):
                            at = os.stat(f"/proc/{name}/fd/{number}")
                            if (key := (at.st_dev, at.st_ino)) in self.ends and stat.S_ISFIFO(at.st_mode):
                                flags = proc.read_descriptor(int(name), number).flags
                                found[key] = found.get(key, 0) | proc.ends(flags)
        return found

    def _file(self, pid: int, each: proc.Descriptor) -> Iterator[Obstacle]:
        if each.link.startswith("/proc/"):
            return
        if int(each.field("mnt_id:")) not in self._mounts(pid):
            yield _here("file", pid, each.name, "it lies in no mount of the mount namespace", "close it")
            return
        yield from self._path(pid, each.name, each.link, each.stat)

    def _mounts(self, pid: int) -> set[int]:
        """Its own list lacks what lies outside of its root; ours lacks what is mounted in its namespace only."""
        if pid not in self._mounts_read:
            ours = set() if self._has_mounts else proc.mounts(proc.machine())
            self._mounts_read[pid] = ours | proc.mounts(pid)
        return self._mounts_read[pid]

    @cached_property
    def _has_mounts(self) -> bool:
        """Of its own, and CRIU dumps them."""
        own = self.processes[0].namespaces.get("mnt") != proc.namespaces(proc.machine()).get("mnt")
        return own and "own-namespaces" in self.criu.options

    def _path(self, pid: int, name: str, path: str, at: os.stat_result) -> Iterator[Obstacle]:
        """Of a file that is open or mapped: is it still there by its name?"""
        if at.st_nlink == 0:
            if stat.S_ISREG(at.st_mode) and at.st_blocks * 512 > self.criu.ghost_limit:
                yield _here(
                    "file", pid, name, f"CRIU dumps deleted files of at most {self.criu.ghost_limit} bytes",
                    "keep the file, or raise CRIU's --ghost-limit",
                )  # fmt: skip
        elif path.endswith(proc.DELETED) and not proc.is_there(path, at):
            if self._has_mounts and os.path.dirname(path) == "/dev/shm" and "link-remap" in self.criu.options:
                return  # it is dumped with that folder
            semaphore = os.path.basename(path).startswith("sem.")  # sem_open makes it so, and renames it
            yield self._unless(
                "link-remap", "semaphore" if semaphore else "file", pid, name,
                "it is a file that has another name now than when it was opened",
                "run it with xmigctl run --movable" if semaphore else "keep the file under its name",
            )  # fmt: skip

    # --- sockets -----------------------------------------------------------------------------------------------------

    def _socket(self, pid: int, each: proc.Descriptor) -> Iterator[Obstacle]:
        protocol = proc.protocol(pid, each.number)
        inode = each.inode
        name = f"descriptor {each.number}: {protocol} socket"
        if protocol in ("UNIX", "UNIX-STREAM"):
            if (unix := self._unix.get(inode)) is not None:  # of this network namespace
                yield from self._unix_socket(pid, name, inode, unix)
            return
        if protocol == "NETLINK":
            if sockets.netlink_unread(pid).get(inode):
                yield _here("socket", pid, name, "CRIU dumps no netlink socket with unread data", "read it")
            return
        inet = protocol.removesuffix("v6") in INET
        if not inet and protocol != "PACKET":
            yield _here("socket", pid, name, "CRIU dumps no sockets of this kind", "close it")
            return
        if self.criu.version < (4, 2) and not self._inet_is_read:
            yield _here(
                "socket", pid, name, "CRIU before 4.2 cannot read such a socket's options on Linux 6.16 and later",
                "use CRIU 4.2 or later",
            )  # fmt: skip
        if protocol.startswith("TCP"):
            yield from self._tcp(pid, name, self._inet(pid, "tcp").get(inode))
        elif protocol in ("UDP", "UDPv6") and (udp := self._inet(pid, "udp").get(inode)) and udp.port:
            yield _address(pid, f"{name} at {udp.local}")

    def _unix_socket(self, pid: int, name: str, inode: int, unix: sockets.UnixSocket) -> Iterator[Obstacle]:
        if unix.state == sockets.LISTENING and 0 in unix.waiting:
            yield _here(
                "unix_socket", pid, f"{name} at {unix.name}", "a connection that it has not accepted was closed",
                "accept connections before the dump",
            )  # fmt: skip
        why = "its other end is not in the process tree"
        hint = "close the connection before the dump"
        if unix.peer:
            if unix.peer not in self.sockets:
                peer = self._unix[unix.peer].name if unix.peer in self._unix else ""
                name += f" connected with {peer}" if peer else ""
                yield self._unless("ext-unix-sk", "unix_socket", pid, name, why, hint)
        elif unix.state == sockets.ESTABLISHED and unix.type != socket.SOCK_DGRAM and not unix.shut_down:
            listening = self._accepting.get(inode)
            if listening is None:
                yield _here("unix_socket", pid, name, why, hint)
            elif listening not in self.sockets:  # which CRIU does not look at
                yield _elsewhere("unix_socket", pid, name, why, hint)

    def _tcp(self, pid: int, name: str, tcp: sockets.InetSocket | None) -> Iterator[Obstacle]:
        if tcp is None or tcp.state == sockets.CLOSED:
            return
        if tcp.state != sockets.LISTENING:
            if "tcp-established" in self.criu.options and (tcp.remote, tcp.local) in self._connections:
                return
            if tcp.state == sockets.ESTABLISHED and (tcp.local, tcp.remote) in self.criu.elsewhere:
                own = self.processes[0].namespaces.get("net") != proc.namespaces(proc.machine())["net"]
                yield _depends(
                    "tcp_connection", pid, f"{name} from {tcp.local} to {tcp.remote}",
                    "its other end has to be in a process of the job on another node" + (
                        "" if own else ", and both addresses have to exist"
                    ),
                    "restore it with that" if own else "have the same addresses when it is restored",
                )  # fmt: skip
                return
            yield self._unless(
                "tcp-established", "tcp_connection", pid, f"{name} from {tcp.local} to {tcp.remote}",
                "its other end is not in the process tree, or it was not dumped with --tcp-established",
                "close connections before the dump",
            )  # fmt: skip
            return
        if tcp.waiting:
            yield _here(
                "tcp_connection", pid, f"{name} at {tcp.local}", f"{tcp.waiting} connections wait to be accepted",
                "accept connections before the dump",
            )  # fmt: skip
        yield _address(pid, f"{name} listens at {tcp.local}")

    @cached_property
    def _connections(self) -> set[tuple[str, str]]:
        """Of the tree: from where to where."""
        return {
            (each.local, each.remote)
            for process in self.processes if process.namespaces
            for inode, each in self._inet(process.pid, "tcp").items() if inode in self.sockets
        }  # fmt: skip

    def _inet(self, pid: int, protocol: str) -> dict[int, sockets.InetSocket]:
        """Read once for each network namespace."""
        key = (protocol, os.readlink(f"/proc/{pid}/ns/net"))
        if key not in self._inet_read:
            self._inet_read[key] = sockets.inet_sockets(pid, protocol)
        return self._inet_read[key]

    @cached_property
    def _unix(self) -> dict[int, sockets.UnixSocket]:
        return sockets.unix_sockets()

    @cached_property
    def _accepting(self) -> dict[int, int]:
        """Of Unix connections that were not accepted yet: by which socket they will be."""
        return {one: inode for inode, each in self._unix.items() for one in each.waiting}

    @cached_property
    def _inet_is_read(self) -> bool:
        return sockets.kernel_has_credentials_of_inet()

    # --- memory and files --------------------------------------------------------------------------------------------

    def _mapping(self, each: proc.Mapping) -> Iterator[Obstacle]:
        pid, path = each.pid, each.path
        if path.startswith("anon_inode:"):
            yield _here(*_refused(pid, each.name, path.partition(":")[2].strip("[]")))
        elif path.startswith("/secretmem"):
            yield _here("memory", pid, each.name, "CRIU cannot read secret memory", "use no memfd_secret")
        elif path.startswith("/SYSV"):
            if self.processes[0].namespaces.get("ipc") == proc.namespaces(proc.machine())["ipc"]:
                yield _here(
                    "sysv_memory", pid, each.name, "CRIU dumps it only with an IPC namespace of its own",
                    "start the program in an IPC namespace of its own (unshare --ipc)",
                )  # fmt: skip
        elif path.startswith("/dev/shm/") and not path.endswith(proc.DELETED):
            semaphore = os.path.basename(path).startswith("sem.")
            if each.shared and not self._has_mounts:
                yield _elsewhere(
                    "semaphore" if semaphore else "shared_memory", pid, each.name,
                    "its content is in /dev/shm and is not dumped",
                    "use memory without a name (memfd), or move its /dev/shm with it",
                )  # fmt: skip
        elif path.endswith(proc.DELETED) and not path.startswith(ANONYMOUS):
            yield from self._path(pid, each.name, path, each.stat())
        elif path.startswith("/dev/") and not path.startswith(ANONYMOUS) and not stat.S_ISREG(each.stat().st_mode):
            yield _here("device", pid, each.name, "CRIU dumps no mapped devices", _device_hint(path))

    def _files(self) -> Iterator[Obstacle]:
        """One note for all files that have to be there on the other node."""
        paths = {
            path
            for process in self.processes
            for path in (
                *(each.link for each in process.descriptors if each.is_file),
                *(each.path for each in process.mappings),
                *proc.own_paths(process.pid),
            )
            if path.startswith("/") and path != "/" and not path.endswith(proc.DELETED)
            and not path.startswith(("/memfd:", "/proc/", "/dev/"))
        }  # fmt: skip
        if not paths:
            return
        folders = Counter("/".join(os.path.dirname(path).split("/")[:4]) or "/" for path in paths)
        listed = ", ".join(f"{folder} ({count})" for folder, count in folders.most_common(6))
        yield _depends(
            "files", self.root, f"{len(paths)} files: {listed}" + (", ..." if len(folders) > 6 else ""),
            "their content is not dumped, only their names",
            "have the same files at the same paths on the other node",
        )  # fmt: skip

    def _unless(
        self, option: Option, code: Code, pid: int, what: str, why: str, hint: str, *,
        otherwise: Stops = "elsewhere",
    ) -> Obstacle:  # fmt: skip
        """What CRIU refuses unless it has an option."""
        if option in self.criu.options:
            return Obstacle(code=code, pid=pid, what=what, why=why, hint=hint, stops=otherwise)
        return _here(code, pid, what, why, hint)


# --- words -----------------------------------------------------------------------------------------------------------


def _here(code: Code, pid: int, what: str, why: str, hint: str) -> Obstacle:
    return Obstacle(code=code, pid=pid, what=what, why=why, hint=hint, stops="here")


def _elsewhere(code: Code, pid: int, what: str, why: str, hint: str) -> Obstacle:
    return Obstacle(code=code, pid=pid, what=what, why=why, hint=hint, stops="elsewhere")


def _depends(code: Code, pid: int, what: str, why: str, hint: str) -> Obstacle:
    return Obstacle(code=code, pid=pid, what=what, why=why, hint=hint, stops="depends")


def _refused(pid: int, name: str, kind: str) -> tuple[Code, int, str, str, str]:
    """Of what has no file."""
    known = next((found for begins, found in REFUSED.items() if kind.startswith(begins)), None)
    code, hint = known or ("descriptor", "close it")
    return code, pid, name, f"CRIU does not dump {kind}", hint


def _address(pid: int, what: str) -> Obstacle:
    return _depends(
        "address", pid, what, "the address has to exist, and to be free",
        "bind to all addresses, or have this one on the other node",
    )  # fmt: skip


def _device_hint(path: str) -> str:
    if path.startswith("/dev/nvidia"):
        return "start it with xmigctl run, and without the genuine driver (--strict)"
    return "close it"


def _not_readable(pid: int, error: PermissionError) -> Forbidden:
    return Forbidden(
        f"the daemon may not read process {pid}: {error.filename or error.strerror}", code="process_not_readable",
        hint="run xmigd as root, or with CAP_SYS_PTRACE and CAP_CHECKPOINT_RESTORE",
    )  # fmt: skip
