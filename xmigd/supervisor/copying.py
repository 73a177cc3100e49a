"""The content of a process's last snapshot, which its server copies to memory of its own while the program goes on
(shim/server/snapshot/snapshot_copy.h)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from xmigd.errors import Conflict
from xmigd.ipc import messages as m
from xmigd.ipc.fds import Fd, close_all
from xmigd.supervisor.state import ProcessState

Progress = Callable[[int], None]  # bytes that are copied
ROOM_FOR_INCREMENT = 1 << 30  # bytes; what is beyond that is copied once more (xmigd/checkpoints/memory.py)
Report = m.SuspendProgress | m.SnapshotSlab | m.SnapshotCopied | m.SnapshotNotCopied


@dataclass(frozen=True, slots=True)
class Known:
    """A snapshot whose content is stored. Of what the same server has not written since, it copies nothing."""

    server: int
    generation: int
    number: int
    pieces: Mapping[int, str]  # SHA-256 of each chunk, by its address; empty: zeros


@dataclass(frozen=True, slots=True)
class SnapshotCopy:
    """`slabs`: memory, with its place in the shadow that a next server is given; None: its content is that of `since`.
    `file`: the snapshot's file that names these places. `rounded`: what a lossy copy has rounded."""

    number: int
    server: int
    since: Known | None
    slabs: tuple[tuple[m.SnapshotSlab, Fd | None], ...]
    file: Fd
    bytes: int  # that were copied
    ms: float
    rounded: tuple[m.RoundedNumbers, ...] = ()


@dataclass(slots=True)
class _Begun:
    number: int
    server: int
    since: Known | None
    progress: Progress
    made: asyncio.Future[SnapshotCopy]
    slabs: list[tuple[m.SnapshotSlab, Fd | None]] = field(default_factory=list)


class Copying:
    """Of one process."""

    def __init__(self, process: ProcessState) -> None:
        self._process = process
        self._begun: _Begun | None = None
        self._known: Known | None = None

    @property
    def known(self) -> Known | None:
        """Of the server that has the process; None: nothing is known of it."""
        known, process = self._known, self._process
        same = known is not None and (known.server, known.generation) == (process.machine.active, process.generation)
        return known if same else None

    def note(self, known: Known) -> None:
        """It is stored."""
        self._known = known

    def forget(self) -> None:
        """The next copy has everything."""
        self._known = None

    @property
    def under_way(self) -> bool:
        return self._begun is not None

    def room(self, since: Known | None) -> int:
        """Bytes in the folder of checkpoints that a copy gets, if they are there. How much has changed since then
        nobody knows before."""
        last = self._process.last_snapshot
        live = 0 if last is None else last.live_bytes
        return live if since is None else min(live, ROOM_FOR_INCREMENT)

    def begin(
        self, number: int, progress: Progress, *, since: Known | None = None, beside: int = 0,
        keep_bits: int = 0,
    ) -> asyncio.Future[SnapshotCopy]:  # fmt: skip
        """Of the snapshot at which it is paused. Who cancels it does not want it any more. `since`: what is `known`, if
        all of that is there still. `beside`: bytes that others write in the folder of checkpoints meanwhile.
        `keep_bits`: of the mantissas of named numbers; 0: the copy is exact. Raises Conflict: there is no server, or
        another copy is being made."""
        server = self._process.server(self._process.machine.active)
        if server is None:
            raise Conflict("its server was lost", hint="ask again when the process is running")
        if self._begun is not None:
            raise Conflict("its snapshot is being copied already", code="operation_under_way")
        made: asyncio.Future[SnapshotCopy] = asyncio.get_running_loop().create_future()
        begun = self._begun = _Begun(number, server.number, since, progress, made)
        begun.made.add_done_callback(lambda made: self._over(begun, made))
        pool, wanted, room = self._process.host_pool, self.room(since), list[Fd]()
        if since is None:
            pool.make_room(wanted)
            room = pool.take(wanted)
        room += pool.make(wanted - len(room) * pool.piece, beside)
        self._process.give_room(server, room)
        lossy = {"keep_bits": keep_bits} if keep_bits else {}  # a server of an earlier version does not know it
        server.send(m.pack("copy_snapshot", number=number, since=0 if since is None else since.number, **lossy))
        return begun.made

    def reported(self, message: Report, fds: list[Fd]) -> None:
        """By the server that has the process. What belongs to a copy that was given up is closed."""
        begun = self._begun
        if begun is None or begun.made.done():
            return close_all(fds)
        match message:
            case m.SuspendProgress():
                begun.progress(message.done_bytes)
            case _ if message.number != begun.number or len(fds) != m.expected_fds(message):
                close_all(fds)
                self._fail(begun, "its server has not handed over what it copied")
            case m.SnapshotSlab():
                if message.known and begun.since is None:
                    self._fail(begun, "its server counts on a copy that nobody has")
                begun.slabs.append((message, None if message.known else fds[0]))
            case m.SnapshotCopied():
                slabs, begun.slabs = tuple(begun.slabs), []
                about = (begun.number, begun.server, begun.since)
                begun.made.set_result(SnapshotCopy(*about, slabs, fds[0], message.bytes, message.ms, message.rounded))
            case m.SnapshotNotCopied():
                self._fail(begun, message.text)

    def server_lost(self, why: str) -> None:
        if self._begun is not None:
            self._fail(self._begun, f"its server was lost: {why}")

    def _fail(self, begun: _Begun, why: str) -> None:
        if not begun.made.done():
            begun.made.set_exception(Conflict(f"its snapshot was not copied: {why}", code="not_copied"))

    def _over(self, begun: _Begun, made: asyncio.Future[SnapshotCopy]) -> None:
        cancelled = made.cancelled()
        if not cancelled:
            made.exception()  # nobody may wait for it any more: that of another rank has failed
        close_all(fd for _, fd in begun.slabs if fd is not None)
        self._begun = None
        server = self._process.server(self._process.machine.active)
        if cancelled and server is not None:
            server.send(m.pack("forget_snapshot_copy"))
