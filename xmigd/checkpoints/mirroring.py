"""Finished checkpoints are copied to the mirror in the background, and removed from it when they are removed here.

A thread does it, because what is on the network may block for minutes; nothing waits for that thread, not even the end
of the daemon. What is to be done is in the database, so a daemon that comes later goes on. A mirror that is gone or
full is an event, and is tried again; no checkpoint fails by it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from xmigd import log
from xmigd.checkpoints import repository
from xmigd.checkpoints.behind import Behind
from xmigd.checkpoints.content import Chunks
from xmigd.checkpoints.mirror import SecondPlace
from xmigd.database.reader import Reader
from xmigd.database.writer import Writer
from xmigd.events.bus import Bus
from xmigd.store.objects import Damaged, write_durably

logger = log.get("mirror")

LONGEST_RETRY = 600.0  # seconds after a failure
LOOK_EVERY = 60.0  # seconds


class Mirroring(Behind):
    """Made in the event loop's thread."""

    def __init__(
        self, mirror: SecondPlace, *, folder: Path, chunks: Chunks, writer: Writer, reader: Reader, bus: Bus
    ) -> None:  # fmt: skip
        """`folder`: of all checkpoints here."""
        self.mirror = mirror
        self._folder = folder
        self._chunks = chunks
        self._writer = writer
        self._reader = reader
        self._bus = bus
        self._loop = asyncio.get_running_loop()
        super().__init__("mirror", longest_retry=LONGEST_RETRY, every=LOOK_EVERY, logger=logger)

    @property
    def name(self) -> str:
        """By which the database knows the mirror."""
        return self.mirror.name

    # --- in its thread ------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Do what is to be done. Raises OSError: the directory is gone or full; Damaged: a checkpoint is."""
        with self._reader.session() as session:
            removed = repository.to_unmirror(session)
            waiting = repository.unmirrored(session, self.name)
        if not removed and not waiting:
            return
        self._prepare()
        if removed:
            self.mirror.remove(removed)
            self._write_unmirrored(removed)
        damaged: Damaged | None = None
        for checkpoint, expected in waiting:
            try:
                self._copy(checkpoint, expected)
            except Damaged as error:  # the others are copied nevertheless
                if self._is_listed(checkpoint):
                    damaged = error
            if self._stopping.is_set():
                return
        if damaged is not None:
            raise damaged

    def _prepare(self) -> None:
        """The folder in the mirror is made once. If it is gone later, the mirror is not mounted. Raises OSError."""
        known = self._folder / "mirror"
        new = not known.exists() or known.read_text() != self.mirror.place
        try:
            self.mirror.prepare(new=new)
        except FileNotFoundError as error:
            why = error.strerror if new else f"{error.strerror}; to begin a new one, remove {known}"
            raise FileNotFoundError(error.errno, why, error.filename) from None
        if new:
            write_durably(known, self.mirror.place.encode())

    def _copy(self, checkpoint: str, expected: str) -> None:
        document = repository.document(self._folder, checkpoint, expected)
        if not self.mirror.copy(document, self._chunks, self._stopping.is_set):
            return
        name = self.name
        write = self._writer.submit(
            "checkpoints.mirrored", lambda session: repository.mirrored(session, checkpoint, name)
        )
        write.result()
        logger.info("a checkpoint is in the mirror", checkpoint=checkpoint[:12], mirror=name)
        self._publish("checkpoint.mirrored", checkpoint, {"mirror": name})

    def _write_unmirrored(self, removed: list[str]) -> None:
        self._writer.submit("checkpoints.unmirrored", lambda session: repository.unmirror(session, removed)).result()

    def _is_listed(self, checkpoint: str) -> bool:
        with self._reader.session() as session:
            return bool(repository.page(session, checkpoint=checkpoint, limit=1))

    def _report(self, error: Exception, wait: float) -> None:
        why = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else str(error)
        logger.warning("the mirror of checkpoints fails", mirror=self.name, why=why, again_in=wait)
        data = {"mirror": self.name, "why": why, "failures": self._failures, "again_in_s": wait}
        self._publish("checkpoint.mirror_failed", "", data)

    def _publish(self, kind: str, checkpoint: str, data: dict[str, object]) -> None:
        """The owner of a checkpoint sees that it is mirrored; that the mirror fails is the operators' business."""

        def publish() -> None:
            if kind == "checkpoint.mirrored":
                self._bus.publish("checkpoint.mirrored", "checkpoint", checkpoint, None, data, owner=owner)
            else:
                self._bus.publish("checkpoint.mirror_failed", "node", "", None, data, owner=0)

        owner = 0
        if checkpoint:
            with self._reader.session() as session:
                owner = next((row["uid"] for row in repository.page(session, checkpoint=checkpoint)), 0)
        self._loop.call_soon_threadsafe(publish)
