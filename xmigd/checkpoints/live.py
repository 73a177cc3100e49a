"""Between a process of the supervisor and a checkpoint: what is read of one, and what is made again from the other.

Nothing executes while its program is dumped, so the journal, which the program may append to, is written down with the
program, at one moment. What the last snapshot holds is in host memory: of a suspended process it is the shadow; of one
that goes on, its server copies it there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import stat
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from xmigd.checkpoints.apart import inner_pid, root_in
from xmigd.checkpoints.content import Chunks, Source, Writing
from xmigd.checkpoints.known import Places, known_after, known_contents, places_of
from xmigd.checkpoints.manifest import Content, Image, Memory, OpenFile, Program
from xmigd.checkpoints.manifest import Device as DeviceSeen
from xmigd.checkpoints.memory import Slab
from xmigd.checkpoints.opened import check_name
from xmigd.checkpoints.pids import tree
from xmigd.checkpoints.slabs import arrange, rewritten
from xmigd.devices import header
from xmigd.devices.names import devices_of
from xmigd.errors import Conflict
from xmigd.ipc import messages as m
from xmigd.ipc.fds import Fd, close_all, write_all
from xmigd.memory.handles import Handle, make_handle
from xmigd.memory.host_pool import PLAIN as IN_HOST_MEMORY
from xmigd.native import Layout
from xmigd.store.memory import MAX_SNAPSHOT, Unreadable, extent_bytes
from xmigd.store.objects import Damaged
from xmigd.supervisor.copying import Known, SnapshotCopy
from xmigd.supervisor.process import Process
from xmigd.text import harmless

Progress = Callable[[int], None]  # bytes that are done
# Of CRIU's files, those with memory of the program: nearly all of it, and nobody writes to them afterwards.
MEMORY_IMAGES = re.compile(r"pages-\d+\.img$")


@dataclass(frozen=True, slots=True)
class Piece:
    """Memory, as a server handed it over, and a descriptor of our own. `start`: an image may lie within a file."""

    id: int
    kind: Literal["shadow", "image"]
    ordinal: int
    message: bytes
    start: int
    size: int
    fd: Fd | None
    content: Content | None = None  # that is stored already; then there is no descriptor
    slab: Slab | None = None  # it stays in host memory


@dataclass(slots=True)
class Held:
    """What a process consists of beside its program. The snapshots' two files; None: it has not that one."""

    snapshots: list[Fd | None]
    pieces: list[Piece]
    copy: SnapshotCopy | None = None
    places: Places = field(default_factory=dict)  # of the copy

    @property
    def bytes(self) -> int:
        return sum(piece.size for piece in self.pieces)

    def close(self) -> None:
        close_all(fd for fd in (*self.snapshots, *(piece.fd for piece in self.pieces)) if fd is not None)

    def add(self, copy: SnapshotCopy) -> None:
        """The content of its snapshot. From here on it is closed with the rest. Raises Conflict."""
        self.snapshots[copy.number & 1] = copy.file
        self.copy = copy
        first = 1 + max((piece.id for piece in self.pieces), default=0)
        for id, (slab, fd) in enumerate(copy.slabs, first):
            message = m.pack(
                "memory", op="add", id=id, kind="shadow", ordinal=slab.ordinal, address=slab.address, bytes=slab.bytes,
                name=IN_HOST_MEMORY,
            )  # fmt: skip
            self.pieces.append(Piece(id, "shadow", slab.ordinal, message, 0, slab.bytes, fd))

    def look_up(self) -> None:
        """What of the copy is stored already. Blocks. Raises Conflict."""
        if self.copy is None:
            return
        self.places = places_of(self.copy)
        first = len(self.pieces) - len(self.copy.slabs)
        for number, content in enumerate(known_contents(self.copy, self.places), first):
            self.pieces[number] = replace(self.pieces[number], content=content)

    def retain(self, writing: Writing, owner: int) -> None:
        """The copy stays in host memory, as far as that is possible. Raises OSError."""
        if self.copy is None:
            return
        first = len(self.pieces) - len(self.copy.slabs)
        for number, piece in enumerate(self.pieces[first:], first):
            if piece.fd is not None:
                fd, slab = writing.retain(piece.fd, owner)
                self.pieces[number] = replace(piece, fd=fd, slab=slab)

    def known(self, memory: Sequence[Memory], generation: int) -> Known | None:
        """Once this is stored."""
        if self.copy is None:
            return None
        contents = [one.content for one in memory[len(memory) - len(self.copy.slabs) :]]
        return known_after(self.copy, self.places, contents, generation)


def hold(process: Process, *, suspended: bool) -> Held:
    """Of one that is not suspended, only what its program has loaded: its snapshot's content is added. Raises OSError:
    no descriptors."""
    assert process.memory is not None
    held = Held([None, None], [])
    try:
        if suspended:
            held.snapshots = [Fd(os.dup(fd.fileno())) for fd in (process.memory.snapshot0, process.memory.snapshot1)]
        for handle in process.handles.values():
            if suspended or handle.kind == "image":
                kind: Literal["shadow", "image"] = "image" if handle.kind == "image" else "shadow"
                fd = Fd(os.dup(handle.fd.fileno()))
                message = _own(_message(handle.message))
                start = message.address if kind == "image" else 0
                packed = m.pack_memory(message)
                held.pieces.append(Piece(handle.id, kind, handle.ordinal, packed, start, handle.size, fd))
    except OSError:
        held.close()
        raise
    return held


def store_memory(
    writing: Writing, held: Held, owner: int, progress: Progress
) -> tuple[list[Memory], tuple[Content, Content]]:
    """`owner`: user of the process. Blocks. Raises OSError: no room."""
    done = 0
    held.retain(writing, owner)
    memory: list[Memory] = []
    fresh = ((piece.fd, piece) for piece in held.pieces if piece.content is None)
    sources = [Source(fd.fileno(), piece.start, piece.size, piece.slab) for fd, piece in fresh if fd is not None]
    stored = writing.store_all(sources)
    for piece in held.pieces:
        content = next(stored) if piece.content is None else piece.content
        message = piece.message.decode()
        memory.append(Memory(id=piece.id, kind=piece.kind, ordinal=piece.ordinal, message=message, content=content))
        done += piece.size
        progress(done)
    for _ in stored:  # there is none left: its threads end
        pass
    first, second = (Content(bytes=0, chunks=()) if fd is None else writing.store(fd.fileno()) for fd in held.snapshots)
    return memory, (first, second)


def store_images(writing: Writing, folder: Path) -> list[Image]:
    """What CRIU has written. Blocks. Raises OSError: no room."""
    paths, opened, sources = sorted(folder.glob("*.img")), list[Fd](), list[Source]()
    try:
        for path in paths:
            opened.append(Fd(os.open(path, os.O_RDONLY | os.O_CLOEXEC)))
            slab = None
            if MEMORY_IMAGES.match(path.name):
                opened[-1], slab = writing.retain(opened[-1], None)
            sources.append(Source(opened[-1].fileno(), slab=slab))
        contents = writing.store_all(sources)
        return [Image(name=path.name, content=content) for path, content in zip(paths, contents, strict=True)]
    finally:
        close_all(opened)


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
                    if status.st_nlink == 0 or not _is_here(path, status):  # CRIU has its content
                        continue
                    if not _is_text(path):
                        raise Conflict(
                            f"process {pid} has a file open whose name is no UTF-8: {harmless(path)}",
                            code="not_movable", hint="give it another name",
                        )  # fmt: skip
                    writable = bool(entry.lstat().st_mode & stat.S_IWUSR)
                    earlier = found.get(path)
                    writable = writable or (earlier is not None and earlier.writable)
                    found[path] = OpenFile(path=path, bytes=status.st_size, writable=writable, owner=status.st_uid)
    return [found[path] for path in sorted(found)]


def _is_here(path: str, of: os.stat_result) -> bool:
    """By this name? What lies in a mount of the program's own does not."""
    with contextlib.suppress(OSError):
        found = os.stat(path)
        return (found.st_dev, found.st_ino) == (of.st_dev, of.st_ino)
    return False


def _is_text(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def describe(process: Process, layout: Layout, *, leader: bool, files: Iterable[OpenFile]) -> Program:
    """A process that stands still, without its content: it may have ended when that is stored."""
    assert process.memory is not None
    row, journal = process.row, process.memory.journal.fileno()
    kinds = [name.partition(":")[0] for name in devices_of(row.device)]
    devices = [
        DeviceSeen(kind=kinds[min(place, len(kinds) - 1)], name=seen.name, total_bytes=seen.total_bytes)  # type: ignore[arg-type]
        for place, seen in enumerate(header.descriptions(journal))
    ]
    sizes = [os.fstat(fd.fileno()).st_size for fd in process.memory.shared]
    nothing = Content(bytes=0, chunks=())
    return Program(
        id=row.origin or row.id, pid=row.pid, inner_pid=inner_pid(row.pid), device=row.device, uid=row.uid, gid=row.gid,
        leader=leader,
        command=row.command,
        generation=process.generation, devices=tuple(devices), layout=layout.layout_version,
        shared_bytes=(sizes[0], sizes[1], sizes[2]), memory=(), snapshots=(nothing, nothing), images=(),
        files=tuple(files),
    )  # fmt: skip


# --- and back ---------------------------------------------------------------------------------------------------------


def check_files(files: Iterable[OpenFile], *, copied: bool = False) -> None:
    """Are the files there that the program had open, as far as it knows them? `copied`: those that it writes to may be
    longer now. Raises Conflict."""
    for file in files:
        check_name(file.path)
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
        if size > file.bytes and not (copied and file.writable):
            what = "written to" if file.writable else "changed"
            raise Conflict(
                f"{file.path} was {what} since: it has {size} bytes, and had {file.bytes}",
                code="file_changed",
                hint=f"truncate -s {file.bytes} brings a log back to where the program was" if file.writable else "",
            )


def check_unused(files: Iterable[OpenFile], pids: Iterable[int]) -> None:
    """No job of these processes writes to what the program writes to. Blocks. Raises Conflict."""
    wanted: dict[tuple[int, int], str] = {}
    for file in files:
        with contextlib.suppress(OSError):
            if file.writable:
                at = os.stat(file.path)
                wanted[at.st_dev, at.st_ino] = file.path
    if not wanted:
        return
    for pid in {one for each in pids for one in tree(root_in(each))}:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    status = entry.stat()
                    path = wanted.get((status.st_dev, status.st_ino))
                    if path is not None and entry.lstat().st_mode & stat.S_IWUSR:
                        raise Conflict(
                            f"process {pid} writes to {path}, which the program would write to, too",
                            code="file_in_use", hint="end that job, or let this one have copies: --own-files",
                        )  # fmt: skip


def memory_bytes(chunks: Chunks, program: Program) -> int:
    """Of the device memory of its last snapshot. Blocks. Raises Damaged, OSError."""
    found: list[int] = []
    for content in program.snapshots:
        if content.bytes > MAX_SNAPSHOT:
            raise Damaged(f"the file of its snapshot has {content.bytes} bytes")
        if content.bytes:
            with contextlib.closing(Fd(os.memfd_create("xmig-snapshot", os.MFD_CLOEXEC))) as file:
                chunks.restore(content, file.fileno())
                try:
                    found.append(extent_bytes(os.pread(file.fileno(), content.bytes, 0)))
                except Unreadable as error:
                    raise Damaged(f"the file of its snapshot is damaged: {error}") from None
    return max(found, default=0)


Images = dict[int, tuple[Content, Fd]]  # of a program, by their numbers: memory with what they are


def restore_memory(
    chunks: Chunks, checkpoint: str, program: Program, progress: Progress, enough: threading.Event,
    images: Images | None = None,
) -> tuple[dict[int, Handle], tuple[Fd, Fd]]:  # fmt: skip
    """Its shadow and its images, and the snapshots' files: in new memory, but for what of the shadow is in host memory
    as it was copied. `images`: those that are there from before, and afterwards all. Blocks. Raises Damaged, OSError;
    NotWanted: `enough` was set meanwhile."""
    made: list[Fd] = []
    handles: dict[int, Handle] = {}
    done = 0
    slabs = chunks.slabs_of(checkpoint, program.uid)
    try:
        shared = arrange(program, [(slab, os.fstat(fd.fileno()).st_size) for slab, fd in slabs])
        wanted = [
            (_own(_message(memory.message.encode())), memory.content)
            for memory in program.memory
            if shared is None or memory.kind != "shadow"
        ]
        if shared is not None:
            wanted += shared.rest
            for number, message in shared.sealed:
                made.append(Fd(os.dup(slabs[number][1].fileno())))
                handles[message.id] = make_handle(message, made[-1])
                done += message.bytes
        filled: list[tuple[Content, int]] = []
        for message, content in wanted:
            before = None if images is None or message.kind != "image" else images.get(message.id)
            if before is not None and before[0] == content:
                made.append(Fd(os.dup(before[1].fileno())))
                handles[message.id] = make_handle(message, made[-1])
                continue
            handles[message.id] = make_handle(message, _new_memory(f"xmig-{message.kind}", made))
            filled.append((content, made[-1].fileno()))
        files = [_new_memory(f"xmig-snapshot{number}", made) for number in range(len(program.snapshots))]
        filled += zip(program.snapshots, (fd.fileno() for fd in files), strict=True)
        for size in chunks.restore_all(filled, enough):
            done += size
            progress(done)
        if shared is not None:
            for content, fd in zip(program.snapshots, files, strict=True):
                if content.bytes:
                    file = rewritten(os.pread(fd.fileno(), content.bytes, 0), shared, program)
                    write_all(fd.fileno(), file, 0)
        if images is not None:
            images.clear()
            for message, content in wanted:
                if message.kind == "image":
                    images[message.id] = content, Fd(os.dup(handles[message.id].fd.fileno()))
    except Unreadable as error:
        close_all(made)
        raise Damaged(f"the file of its snapshot is damaged: {error}") from None
    except BaseException:
        close_all(made)
        raise
    finally:
        close_all(fd for _, fd in slabs)
    return handles, (files[0], files[1])


def shared_bytes(handles: Mapping[int, Handle]) -> int:
    """What of them a checkpoint has, too."""
    return sum(handle.size for handle in handles.values() if _message(handle.message).sealed)


def restore_images(chunks: Chunks, checkpoint: str, program: Program, folder: Path) -> None:
    """For CRIU. Blocks. Raises Damaged, OSError."""
    with contextlib.ExitStack() as stack:
        files, images = [], []
        for image in program.images:
            if MEMORY_IMAGES.match(image.name) and chunks.link(checkpoint, image.content, folder / image.name):
                continue
            images.append(image)
            number = os.open(folder / image.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            files.append(stack.enter_context(open(number, "wb")).fileno())
        for _ in chunks.restore_all(zip((image.content for image in images), files, strict=True)):
            pass


def _new_memory(name: str, made: list[Fd]) -> Fd:
    made.append(Fd(os.memfd_create(name, os.MFD_CLOEXEC)))
    return made[-1]


def _message(packed: bytes) -> m.MemoryAdd:
    return m.MemoryAdd.model_validate(json.loads(packed) | {"change": 0})


def _own(message: m.MemoryAdd) -> m.MemoryAdd:
    """Memory that a checkpoint has, too, is a slab. What is stored of it is not, nor what is made of that."""
    return message.model_copy(update={"sealed": False})


def let_go_on(pids: Iterable[int]) -> None:
    """They were left stopped."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
