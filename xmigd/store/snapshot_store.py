"""The thread that stores snapshots: off the event loop, within a budget, and never a reason for a job to wait.

A snapshot that comes too early for the budget is skipped; the next one that is stored takes the journal since the last
stored one along, as far as it is still there. Content of device memory is not stored here: that is a checkpoint. What
is stored is what makes one complete: the snapshot's file (objects, memory map, the hash of every chunk), the journal,
the module images.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from xmigd import failpoints, log
from xmigd.database.writer import Writer
from xmigd.errors import Unavailable
from xmigd.failpoints import Write
from xmigd.ipc.fds import Fd, close_all
from xmigd.ipc.messages import Snapshot
from xmigd.native import Layout
from xmigd.settings import MIB, Settings
from xmigd.store import catalogue
from xmigd.store.manifest import Manifest, Manifests, Part
from xmigd.store.memory import Journal, SnapshotFile, Unreadable, image_pieces, read_snapshot
from xmigd.store.objects import Objects, Stored, private_folder

logger = log.get("store")

ACTIVE = 60.0  # seconds after its last snapshot in which a process has a share of the budget
POSITIONS = 64  # skipped snapshots whose positions are remembered: places where a kept journal may begin
TIDY_AFTER = 10.0
SWEEP_AFTER = 3600.0
SAY_AFTER = 60.0
NICENESS = 10
T = TypeVar("T")


class HasFd(Protocol):
    @property
    def fd(self) -> Fd: ...
    @property
    def kind(self) -> str: ...
    @property
    def message(self) -> bytes: ...


@dataclass(slots=True)
class Seen:
    """What is known of a process between its snapshots."""

    # Of the last stored snapshot and of those since; the loop appends, the thread takes from the front.
    positions: list[int] = field(default_factory=list)
    not_before: float = 0.0
    last_snapshot: float = 0.0
    # By the message that hands it over: how much of it was there, and what is kept.
    images: dict[bytes, tuple[int, Part]] = field(default_factory=dict)
    requested_database: bool = False
    busy: bool = False


@dataclass(slots=True)
class Request:
    process: str
    job: str
    snapshot: Snapshot
    fds: list[Fd]  # journal, snapshot0, snapshot1
    images: list[tuple[bytes, Fd | None]]  # without a descriptor: its part is known


@dataclass(slots=True)
class Figures:
    """Since the daemon's start."""

    kept: int = 0
    skipped: int = 0  # by the budget
    failed: int = 0
    stored_bytes: int | None = None  # of the store as it is now; null: not known yet
    seconds: float = 0.0  # processor time of the thread
    failure: str | None = None  # why nothing can be kept at present


class SnapshotStore:
    def __init__(self, settings: Settings, layout: Layout, writer: Writer, readers: Engine) -> None:
        self._settings = settings
        self._layout = layout
        self._writer = writer
        self._readers = readers
        self.objects = Objects(settings.store_folder / "objects")
        self.manifests = Manifests(settings.store_folder / "snapshots")
        self.figures = Figures()
        self._seen: dict[str, Seen] = {}
        self._queue: list[Request] = []
        self._wake = threading.Condition()
        self._stopping = False
        self._tidy_at = 0.0
        self._sweep_at = 0.0
        self._say_at = 0.0
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    # --- the event loop's side: never waits -------------------------------------------------------------------------

    def snapshot(
        self, process: str, job: str, snapshot: Snapshot, fds: Sequence[Fd], handles: Mapping[int, HasFd]
    ) -> None:
        """A snapshot was committed. `fds`: journal, snapshot0, snapshot1."""
        seen = self._seen.setdefault(process, Seen())
        now = time.monotonic()
        seen.last_snapshot = now
        seen.positions.append(snapshot.position)
        if len(seen.positions) > POSITIONS:
            del seen.positions[1]
        if seen.busy or now < seen.not_before:
            self.figures.skipped += 1
            return
        taken: list[Fd] = []
        images: list[tuple[bytes, Fd | None]] = []
        try:
            for fd in fds:
                taken.append(Fd(os.dup(fd.fileno())))
            for handle in handles.values():
                if handle.kind == "image":
                    known = handle.message in seen.images
                    images.append((handle.message, None if known else Fd(os.dup(handle.fd.fileno()))))
        except OSError as error:
            close_all([*taken, *(fd for _, fd in images if fd is not None)])
            self._failed(process, snapshot, f"no descriptors: {error.strerror}")
            return
        seen.busy = True
        with self._wake:
            self._queue.append(Request(process, job, snapshot, taken, images))
            self._wake.notify()

    def ended(self, process: str) -> None:
        self._seen.pop(process, None)

    def close(self) -> None:
        """What is being kept now is given up; what is kept is complete."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout=30)

    # --- the thread's side ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while True:
            with self._wake:
                if not self._queue and not self._stopping:
                    self._wake.wait(timeout=max(0.0, self._sweep_at - time.monotonic()))
                if self._stopping:
                    break
                request = self._queue.pop(0) if self._queue else None
            try:
                if request is not None:
                    self._take(request)
                self._tidy()
            except Exception as error:  # whatever a hostile process makes of its memory, the next one is kept
                logger.error("keeping failed", why=f"{type(error).__name__}: {error}")
        for request in self._queue:
            self._close(request)

    def _take(self, request: Request) -> None:
        seen = self._seen.get(request.process, Seen())
        began = time.thread_time()
        try:
            self._check_room()
            self._keep(request, seen)
        except (Unreadable, Unavailable) as error:
            self._failed(request.process, request.snapshot, str(error))
        except OSError as error:
            self._failed(request.process, request.snapshot, error.strerror or str(error), lasting=True)
        else:
            self.figures.kept += 1
            if self.figures.failure is not None:
                logger.info("snapshots are kept again")
                self.figures.failure = None
        finally:
            self._close(request)
            cost = time.thread_time() - began
            self.figures.seconds += cost
            now = time.monotonic()
            active = sum(other.last_snapshot > now - ACTIVE for other in list(self._seen.values()))
            seen.not_before = now + cost / self._settings.store_budget * max(1, active)
            seen.busy = False

    def _check_room(self) -> None:
        folder = self._settings.store_folder
        private_folder(folder)
        about = os.statvfs(folder)
        if about.f_bavail * about.f_frsize < self._settings.store_free_mib * MIB:
            raise OSError(28, f"less than {self._settings.store_free_mib} MiB are left on the disk of {folder}")

    def _keep(self, request: Request, seen: Seen) -> None:
        parts: list[Part] = []
        try:
            manifest = self._keep_parts(request, seen, parts)
            digest = self.manifests.write(manifest)
        except (Unreadable, OSError):
            self._take_back(parts)
            raise
        failpoints.hit("store.manifest")
        try:
            self._write("stored_snapshots.add", lambda session: catalogue.add(session, manifest, digest))
        except Unavailable:
            self.manifests.remove(manifest.process, manifest.number)
            self._take_back(parts)
            raise
        while seen.positions and seen.positions[0] < manifest.position:
            seen.positions.pop(0)

    def _keep_parts(self, request: Request, seen: Seen, parts: list[Part]) -> Manifest:
        """What the manifest is to name. Each of `parts` is in the store, also when the next one cannot be kept."""
        journal_fd, snapshot0, snapshot1 = request.fds
        # The journal first: it is what is written over soonest.
        start, journal = self._keep_journal(Journal(journal_fd.fileno(), self._layout), request, seen)
        if journal is not None:
            parts.append(_part("journal", "", journal))
        snapshot = read_snapshot((snapshot0.fileno(), snapshot1.fileno()), request.snapshot.number)
        if snapshot.position != request.snapshot.position:
            raise Unreadable("its file says another position than its report")
        parts.insert(0, _part("snapshot", "", self.objects.put([snapshot.content])))
        missing = self._keep_images(request, snapshot, seen, parts)
        failpoints.hit("store.objects")
        return Manifest(
            process=request.process, job=request.job, number=snapshot.number, position=snapshot.position,
            sequence=snapshot.sequence, journal_from=start if journal is not None else None, missing_images=missing,
            at=time.time(), parts=tuple(parts),
        )  # fmt: skip

    def _take_back(self, parts: list[Part]) -> None:
        """No record names them, unless another snapshot has the same. On a busy machine many a one is given up: what
        was there of it does not wait for the next sweep."""
        with contextlib.suppress(SQLAlchemyError), Session(self._readers) as session:
            _, needed = catalogue.known(session)
            for part in parts:
                if part.hash not in needed:
                    self.objects.remove(part.hash)

    def _keep_journal(self, journal: Journal, request: Request, seen: Seen) -> tuple[int, Stored | None]:
        """From the last stored snapshot on, or from the first one since that is still there."""
        end = request.snapshot.position
        if not seen.requested_database:
            with Session(self._readers) as session:
                last = catalogue.latest(session, request.process)
            seen.positions.insert(0, 0 if last is None else last.position)
            seen.requested_database = True
        for start in sorted({position for position in seen.positions if position < end}):
            if end - start > journal.ring_bytes or not journal.has(start):
                continue
            try:
                return start, self.objects.put(self._unless_stopping(journal.pieces(start, end)))
            except Unreadable:
                if self._stopping:
                    raise
        return end, None

    def _keep_images(self, request: Request, snapshot: SnapshotFile, seen: Seen, parts: list[Part]) -> int:
        """Returns how many are missing."""
        wanted = dict(snapshot.images)
        known: dict[bytes, tuple[int, Part]] = {}
        for message, fd in request.images:
            number, offset, size = _image(message)
            received = wanted.pop(number, None)
            if received is None or received > size:
                continue
            before = seen.images.get(message)
            if before is not None and before[0] == received and self.objects.path(before[1].hash).exists():
                part: Part | None = before[1]
            elif fd is None or received > self._settings.store_image_mib * MIB:
                part = None  # known in vain: the store has lost it, and the next stored snapshot brings it again
            else:
                part = self._keep_image(fd, number, offset, received)
            if part is None:
                wanted[number] = received
            else:
                known[message] = (received, part)
                parts.append(part)
        seen.images = known
        return len(wanted)

    def _keep_image(self, fd: Fd, number: int, offset: int, size: int) -> Part | None:
        def pieces() -> Iterator[bytes]:
            return self._unless_stopping(image_pieces(fd.fileno(), offset, size))

        try:
            return _part("image", str(number), self.objects.put_once(pieces))
        except Unreadable:
            if self._stopping:
                raise
            return None

    def _unless_stopping(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            if self._stopping:
                raise Unreadable("xmigd is stopping")
            yield piece

    # --- order ------------------------------------------------------------------------------------------------------

    def _tidy(self) -> None:
        now = time.monotonic()
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_AFTER
            with Session(self._readers) as session:
                keys, hashes = catalogue.known(session)
            removed = self.manifests.sweep(keys) + self.objects.sweep(hashes)
            if removed:
                logger.info("removed what no record names", files=removed)
        if now >= self._tidy_at:
            self._tidy_at = now + TIDY_AFTER
            with contextlib.suppress(Unavailable):
                self._forget(lambda session: catalogue.superfluous(
                    session, snapshots=self._settings.store_snapshots, days=self._settings.store_days
                ))  # fmt: skip
                while self._size() > self._settings.store_mib * MIB and self._forget(catalogue.oldest):
                    pass

    def _size(self) -> int:
        with Session(self._readers) as session:
            self.figures.stored_bytes = catalogue.stored_bytes(session)
        return self.figures.stored_bytes

    def _forget(self, choose: Callable[[Session], list[int]]) -> int:
        """First the rows, then the files: a row never names what is not there."""

        def write(session: Session) -> tuple[list[catalogue.Key], list[str]]:
            return catalogue.remove(session, choose(session))

        with Session(self._readers) as session:
            if not choose(session):
                return 0
        keys, hashes = self._write("stored_snapshots.remove", write)
        for process, number in keys:
            self.manifests.remove(process, number)
        for name in hashes:
            self.objects.remove(name)
        return len(keys)

    def _write(self, name: Write, work: Callable[[Session], T]) -> T:
        future: Future[Any] = self._writer.submit(name, work)
        done: T = future.result(60)
        return done

    def _failed(self, process: str, snapshot: Snapshot, why: str, *, lasting: bool = False) -> None:
        self.figures.failed += 1
        if lasting:
            self.figures.failure = why
        now = time.monotonic()
        if now >= self._say_at:
            self._say_at = now + SAY_AFTER
            failed = self.figures.failed
            logger.warning(
                "a snapshot is not kept", process=process[:12], snapshot=snapshot.number, why=why, failed=failed
            )

    @staticmethod
    def _close(request: Request) -> None:
        close_all([*request.fds, *(fd for _, fd in request.images if fd is not None)])


def _part(kind: str, name: str, stored: Stored) -> Part:
    return Part.model_validate(
        {"kind": kind, "name": name, "hash": stored.hash, "bytes": stored.bytes, "stored_bytes": stored.stored_bytes}
    )


def _image(message: bytes) -> tuple[int, int, int]:
    """Number, offset in its file and bytes of the image that a message hands over."""
    fields = json.loads(message)
    number = fields["name"].rpartition(":")[2]
    return (int(number) if number.isdecimal() and len(number) < 20 else -1), fields["address"], fields["bytes"]
