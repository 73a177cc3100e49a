"""Between a process of the supervisor and a checkpoint: what is read of one, and what is made again from the other.

The process is suspended meanwhile: its shadow lies in host memory, nothing executes, and the journal, which its program
may still append to, is written down with the program, at one moment.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from xmigd.checkpoints.content import Chunks, Writing
from xmigd.checkpoints.manifest import Content, Image, Memory, OpenFile, Program
from xmigd.checkpoints.manifest import Device as DeviceSeen
from xmigd.devices import header
from xmigd.devices.names import devices_of
from xmigd.errors import Conflict
from xmigd.ipc import messages as m
from xmigd.ipc.fds import Fd, close_all
from xmigd.memory.handles import Handle, make_handle
from xmigd.native import Layout
from xmigd.supervisor.process import Process
from xmigd.text import harmless

Progress = Callable[[int], None]  # bytes that are done


@dataclass(frozen=True, slots=True)
class Held:
    """What a suspended process consists of beside its program: descriptors of our own."""

    snapshots: tuple[Fd, Fd]
    handles: tuple[tuple[Handle, Fd], ...]

    @property
    def bytes(self) -> int:
        return sum(os.fstat(fd.fileno()).st_blocks * 512 for _, fd in self.handles)

    def close(self) -> None:
        close_all([*self.snapshots, *(fd for _, fd in self.handles)])


def hold(process: Process) -> Held:
    """Raises OSError: no descriptors."""
    assert process.memory is not None
    taken: list[Fd] = []
    try:
        for fd in (process.memory.snapshot0, process.memory.snapshot1):
            taken.append(Fd(os.dup(fd.fileno())))
        handles = []
        for handle in process.handles.values():
            taken.append(Fd(os.dup(handle.fd.fileno())))
            handles.append((handle, taken[-1]))
    except OSError:
        close_all(taken)
        raise
    return Held((taken[0], taken[1]), tuple(handles))


def store_memory(writing: Writing, held: Held, progress: Progress) -> tuple[list[Memory], tuple[Content, Content]]:
    """Blocks. Raises OSError: no room."""
    done = 0
    memory: list[Memory] = []
    for handle, fd in held.handles:
        content = writing.store(fd.fileno())
        memory.append(
            Memory(
                id=handle.id, kind="image" if handle.kind == "image" else "shadow", ordinal=handle.ordinal,
                message=handle.message.decode(), content=content,
            )
        )  # fmt: skip
        done += handle.size
        progress(done)
    first, second = (writing.store(fd.fileno()) for fd in held.snapshots)
    return memory, (first, second)


def store_images(writing: Writing, folder: Path) -> list[Image]:
    """What CRIU has written. Blocks. Raises OSError: no room."""
    images = []
    for path in sorted(folder.glob("*.img")):
        with path.open("rb") as file:
            images.append(Image(name=path.name, content=writing.store(file.fileno())))
    return images


def open_files(pids: Iterable[int]) -> list[OpenFile]:
    """The regular files that stopped processes have open, each once. Raises Conflict: a name cannot be written down."""
    found: dict[str, OpenFile] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    status, path = entry.stat(), os.readlink(entry)
                    if not stat.S_ISREG(status.st_mode) or not path.startswith("/") or path.startswith("/memfd:"):
                        continue
                    if not _is_text(path):
                        raise Conflict(
                            f"process {pid} has a file open whose name is no UTF-8: {harmless(path)}",
                            code="not_movable", hint="give it another name",
                        )  # fmt: skip
                    writable = bool(entry.lstat().st_mode & stat.S_IWUSR)
                    earlier = found.get(path)
                    writable = writable or (earlier is not None and earlier.writable)
                    found[path] = OpenFile(path=path, bytes=status.st_size, writable=writable)
    return [found[path] for path in sorted(found)]


def _is_text(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def describe(
    process: Process, memory: Iterable[Memory], snapshots: tuple[Content, Content], images: Iterable[Image],
    files: Iterable[OpenFile], layout: Layout, leader: bool,
) -> Program:  # fmt: skip
    assert process.memory is not None
    row, journal = process.row, process.memory.journal.fileno()
    kinds = [name.partition(":")[0] for name in devices_of(row.device)]
    devices = [
        DeviceSeen(kind=kinds[min(place, len(kinds) - 1)], name=seen.name, total_bytes=seen.total_bytes)  # type: ignore[arg-type]
        for place, seen in enumerate(header.descriptions(journal))
    ]
    sizes = [os.fstat(fd.fileno()).st_size for fd in process.memory.shared]
    return Program(
        id=row.origin or row.id, pid=row.pid, uid=row.uid, gid=row.gid, leader=leader, command=row.command,
        generation=process.generation, devices=tuple(devices), layout=layout.layout_version,
        shared_bytes=(sizes[0], sizes[1], sizes[2]), memory=tuple(memory), snapshots=snapshots, images=tuple(images),
        files=tuple(files),
    )  # fmt: skip


# --- and back ---------------------------------------------------------------------------------------------------------


def check_files(files: Iterable[OpenFile]) -> None:
    """Are the files there that the program had open, as far as it knows them? Raises Conflict."""
    for file in files:
        try:
            size = os.stat(file.path).st_size
        except OSError as error:
            raise Conflict(
                f"the program had {file.path} open: {error.strerror}", code="file_missing",
                hint="put the file where it was",
            ) from None  # fmt: skip
        if size < file.bytes:
            raise Conflict(
                f"{file.path} has {size} bytes, and had {file.bytes} when the program had it open",
                code="file_changed", hint="put the file back as it was",
            )  # fmt: skip
        if size > file.bytes:
            what = "written to" if file.writable else "changed"
            raise Conflict(
                f"{file.path} was {what} since: it has {size} bytes, and had {file.bytes}",
                code="file_changed",
                hint=f"truncate -s {file.bytes} brings a log back to where the program was" if file.writable else "",
            )


def restore_memory(chunks: Chunks, program: Program, progress: Progress) -> tuple[dict[int, Handle], tuple[Fd, Fd]]:
    """Its shadow and its images in new memory, and the snapshots' files. Blocks. Raises Damaged, OSError."""
    made: list[Fd] = []
    handles: dict[int, Handle] = {}
    done = 0
    try:
        for memory in program.memory:
            fd = _new_memory(f"xmig-{memory.kind}", made)
            chunks.restore(memory.content, fd.fileno())
            handles[memory.id] = make_handle(_message(memory), fd)
            done += memory.content.bytes
            progress(done)
        files = []
        for number, content in enumerate(program.snapshots):
            files.append(_new_memory(f"xmig-snapshot{number}", made))
            chunks.restore(content, files[-1].fileno())
    except BaseException:
        close_all(made)
        raise
    return handles, (files[0], files[1])


def restore_images(chunks: Chunks, program: Program, folder: Path) -> None:
    """For CRIU. Blocks. Raises Damaged, OSError."""
    for image in program.images:
        number = os.open(folder / image.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(number, "wb") as file:
            chunks.restore(image.content, file.fileno())


def _new_memory(name: str, made: list[Fd]) -> Fd:
    made.append(Fd(os.memfd_create(name, os.MFD_CLOEXEC)))
    return made[-1]


def _message(memory: Memory) -> m.MemoryAdd:
    return m.MemoryAdd.model_validate(json.loads(memory.message) | {"change": 0})


def let_go_on(pids: Iterable[int]) -> None:
    """They were left stopped."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
