"""Processes as /proc shows them: their descriptors, mappings and namespaces, and what the kernel says of these.

Functions raise FileNotFoundError or ProcessLookupError for a process that has ended, and PermissionError for one that
may not be read.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import stat
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

GONE = (FileNotFoundError, ProcessLookupError)
NAMESPACES = ("user", "pid", "uts", "ipc", "time", "cgroup", "mnt", "net")
READ, WRITE = 1, 2
DELETED = " (deleted)"


class Stat:
    """Of /proc/PID/stat. Raises FileNotFoundError, ProcessLookupError."""

    def __init__(self, pid: int) -> None:
        with open(f"/proc/{pid}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()
        self.state = words[0].decode()
        self.parent, self.group, self.session = (int(word) for word in words[1:4])


@dataclass(frozen=True, slots=True)
class Descriptor:
    number: int
    link: str
    stat: os.stat_result
    info: str  # of fdinfo

    @property
    def name(self) -> str:
        return f"descriptor {self.number}: {self.link}"

    def field(self, name: str) -> str:
        return next((line.partition(":")[2].strip() for line in self.info.splitlines() if line.startswith(name)), "")

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.stat.st_mode) or stat.S_ISDIR(self.stat.st_mode)

    @property
    def flags(self) -> int:
        return int(self.field("flags:") or "0", 8)

    @property
    def inode(self) -> int:
        return int(self.link.partition("[")[2].rstrip("]"))


@dataclass(frozen=True, slots=True)
class Mapping:
    pid: int
    start: int
    end: int
    shared: bool
    path: str

    @property
    def name(self) -> str:
        return f"mapping {self.start:x}: {self.path}"

    def stat(self) -> os.stat_result:
        return os.stat(f"/proc/{self.pid}/map_files/{self.start:x}-{self.end:x}")


@dataclass(slots=True)
class Process:
    pid: int
    descriptors: list[Descriptor] = field(default_factory=list)
    mappings: list[Mapping] = field(default_factory=list)
    namespaces: dict[str, str] = field(default_factory=dict)


def read(pid: int) -> Process:
    """Raises PermissionError, FileNotFoundError, ProcessLookupError."""
    found = Process(pid)
    if Stat(pid).state in "ZX":  # it has nothing any more, and CRIU dumps it as that
        return found
    found.namespaces = namespaces(pid)
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(*GONE):
            found.descriptors.append(read_descriptor(pid, number))
    found.descriptors.sort(key=lambda each: each.number)
    with open(f"/proc/{pid}/maps", errors="surrogateescape") as file:
        for line in file:
            area, permissions, _, _, _, *path = line.rstrip("\n").split(maxsplit=5)
            if path and not path[0].startswith("["):
                start, end = (int(word, 16) for word in area.split("-"))
                found.mappings.append(Mapping(pid, start, end, permissions[3] == "s", path[0]))
    return found


def read_descriptor(pid: int, number: str) -> Descriptor:
    link = os.readlink(f"/proc/{pid}/fd/{number}")
    with open(f"/proc/{pid}/fdinfo/{number}", errors="replace") as file:
        return Descriptor(int(number), link, os.stat(f"/proc/{pid}/fd/{number}"), file.read())


_machine: int | Literal["self"] = "self"


def machine() -> int | Literal["self"]:
    """The process that sees the machine as CRIU does."""
    return _machine


def seen_as_by(pid: int) -> None:
    """Of a daemon with a view of its own, as a unit of systemd has one: from now on, `machine` is another process."""
    global _machine
    _machine = pid


def namespaces(pid: int | Literal["self"]) -> dict[str, str]:
    """Of the kinds that this kernel has. Raises FileNotFoundError: it has ended, and has given back some at least."""
    return {kind: os.readlink(f"/proc/{pid}/ns/{kind}") for kind in NAMESPACES if kind in _kinds()}


@functools.cache
def _kinds() -> frozenset[str]:
    return frozenset(os.listdir("/proc/self/ns"))


def mounts(pid: int | Literal["self"]) -> set[int]:
    """Their numbers, as a process sees them from its root."""
    try:
        with open(f"/proc/{pid}/mountinfo", "rb") as file:
            return {int(line.split()[0]) for line in file}
    except OSError as error:
        if error.errno == errno.EINVAL:  # it has ended, and nobody has waited for it
            raise ProcessLookupError(f"process {pid} has ended") from None
        raise


def mount_points(pid: int | Literal["self"]) -> dict[str, set[tuple[str, str]]]:
    """Of each path where something is mounted, as a process sees it: what lies there, one upon the other, each as its
    file system and the folder of that. Raises OSError."""
    found: dict[str, set[tuple[str, str]]] = {}
    with open(f"/proc/{pid}/mountinfo", "rb") as file:
        for line in file:
            _, _, device, folder, path, *_ = line.split()
            name = _unescaped(path).decode(errors="replace")  # CRIU would be given no other than UTF-8
            found.setdefault(name, set()).add((device.decode(), folder.decode(errors="replace")))
    return found


def _unescaped(path: bytes) -> bytes:
    return path.decode("unicode_escape").encode("latin-1")  # \040 is a space


def own_paths(pid: int) -> Iterable[str]:
    for name in ("cwd", "root", "exe"):
        with contextlib.suppress(*GONE):
            yield os.readlink(f"/proc/{pid}/{name}")


def ends(flags: int) -> int:
    return {os.O_RDONLY: READ, os.O_WRONLY: WRITE}.get(flags & os.O_ACCMODE, READ | WRITE)


def protocol(pid: int, number: int) -> str:
    """As the kernel calls it: UNIX, TCP, TCPv6, NETLINK ..."""
    name = os.getxattr(f"/proc/{pid}/fd/{number}", "system.sockprotoname")
    return name.rstrip(b"\0").decode(errors="replace")


def is_there(path: str, at: os.stat_result) -> bool:
    """Is it the file of this name? Names may really end like those of deleted files."""
    with contextlib.suppress(OSError):
        there = os.lstat(path)
        return (there.st_dev, there.st_ino) == (at.st_dev, at.st_ino)
    return False


def is_init(pid: int) -> bool:
    return pids_in_namespaces(pid)[-1] == 1


def pids_in_namespaces(pid: int) -> list[int]:
    """Here, and in each namespace within: the last one is what the process sees."""
    with open(f"/proc/{pid}/status", errors="replace") as file:
        return [int(word) for word in next(line for line in file if line.startswith("NSpid:")).split()[1:]]


def is_mapped(pid: int) -> bool:
    with open(f"/proc/{pid}/uid_map") as users, open(f"/proc/{pid}/gid_map") as groups:
        return bool(users.read() and groups.read())


def opens_by_handle(watch: dict[str, str]) -> bool:
    """As CRIU looks for what is watched: through a mount of its filesystem."""
    device = int(watch["sdev"], 16)
    handle = bytes.fromhex(watch["f_handle"])
    packed = struct.pack("Ii", int(watch["fhandle-bytes"], 16), int(watch["fhandle-type"], 16)) + handle
    library = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/mountinfo", "rb") as file:
        mounts = [line.split() for line in file]
    for words in mounts:
        major, minor = words[2].split(b":")
        if (int(major) << 20) | int(minor) == device:
            with contextlib.suppress(OSError):
                folder = os.open(_unescaped(words[4]), os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
                try:
                    opened = library.open_by_handle_at(folder, packed, os.O_PATH | os.O_CLOEXEC)
                finally:
                    os.close(folder)
                if opened >= 0:
                    os.close(opened)
                    return True
    return False


_PAGEMAP_SCAN = 0xC0606610
_PAGE_IS_GUARD = 1 << 8
_END_OF_MEMORY = 0x7FFFFFFFF000


def has_guard_pages(pid: int) -> bool:
    """The kernel answers with PAGEMAP_SCAN; one that does not know guard pages has none."""
    region = ctypes.create_string_buffer(24)
    request = struct.pack(
        "12Q", 96, 0, 0, _END_OF_MEMORY, 0, ctypes.addressof(region), 1, 1, 0, _PAGE_IS_GUARD, 0, _PAGE_IS_GUARD
    )
    with open(f"/proc/{pid}/pagemap", "rb", buffering=0) as file, contextlib.suppress(OSError):
        regions: int = fcntl.ioctl(file, _PAGEMAP_SCAN, bytearray(request))  # as many as there are, here at most one
        return regions > 0
    return False


def wide_instructions() -> str | None:
    """Which of the instructions that not every CPU has this one has; None: it is no x86."""
    with open("/proc/cpuinfo") as file:
        flags = next((line.split(":")[1].split() for line in file if line.startswith("flags")), None)
    if flags is None:
        return None
    has = [name for name, begins in (("AVX-512", "avx512"), ("AMX", "amx")) if any(f.startswith(begins) for f in flags)]
    return " and ".join(has) or "neither AVX-512 nor AMX"
