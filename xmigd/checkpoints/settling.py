"""Checkpoints that are in host memory only go to the disk, in the background, the oldest first.

A thread does it: to compress and to write takes a multiple of the time in which a checkpoint is made. What is to be
done is in the database, so a daemon that comes later goes on. A disk that is full is an event, and is tried again.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from xmigd import log
from xmigd.checkpoints import repository
from xmigd.checkpoints.archive import pieces_of
from xmigd.checkpoints.behind import Behind
from xmigd.checkpoints.content import Chunks
from xmigd.checkpoints.manifest import Manifest
from xmigd.database.reader import Reader
from xmigd.database.writer import Writer
from xmigd.events.bus import Bus, EventType
from xmigd.store.objects import TEMPORARY, Damaged, private_folder

logger = log.get("settling")

MEMORY = "memory"  # in the folder of checkpoints: a link to their folder in host memory
LONGEST_RETRY = 10.0  # seconds after a failure


def _remember(link: Path, folder: Path | None) -> None:
    """For a daemon with another setting."""
    if folder is None or (link.is_symlink() and link.readlink() == folder):
        return
    private_folder(link.parent)
    new = link.with_suffix(TEMPORARY)
    new.unlink(missing_ok=True)
    new.symlink_to(folder)
    new.rename(link)


class Settling(Behind):
    """Made in the event loop's thread. Nobody waits for its thread."""

    def __init__(self, *, folder: Path, chunks: Chunks, writer: Writer, reader: Reader, bus: Bus) -> None:
        """`folder`: of all checkpoints."""
        self._folder = folder
        self._chunks = chunks
        self._writer = writer
        self._reader = reader
        self._bus = bus
        self._loop = asyncio.get_running_loop()
        super().__init__("settling", longest_retry=LONGEST_RETRY, every=chunks.memory.period, logger=logger)
        self._lost: set[str] = set()  # was reported

    def open(self) -> None:
        """What an earlier daemon has left in host memory is found."""
        with self._reader.session() as session:
            listed = {id for id, _ in repository.every(session)}
            waiting = {id for id, _, _ in repository.unsettled(session)}
        memory, link = self._chunks.memory, self._folder / MEMORY
        try:
            memory.open({id: id not in waiting for id in listed}, link.readlink() if link.is_symlink() else None)
        except OSError as error:
            logger.error("checkpoints are not kept in host memory", folder=error.filename, why=error.strerror)
        else:
            _remember(link, memory.folder.absolute() if memory.folder.is_dir() else None)

    # --- in its thread ------------------------------------------------------------------------------------------------

    def _report(self, error: Exception, wait: float) -> None:
        why = error.strerror if isinstance(error, OSError) else str(error)
        logger.warning("checkpoints stay in host memory", why=why, again_in=wait)
        self._publish("checkpoint.disk_failed", "", 0, {"why": why, "again_in_s": wait})

    def _look(self) -> None:
        """Raises OSError: the disk is full."""
        self._chunks.memory.relieve()
        with self._reader.session() as session:
            waiting = repository.unsettled(session)
        for checkpoint, expected, owner in waiting:
            if self._stopping.is_set():
                return
            try:
                self._settle(checkpoint, expected, owner)
            except Damaged as error:
                if checkpoint not in self._lost and self._is_listed(checkpoint):
                    self._lost.add(checkpoint)
                    logger.error("a checkpoint is lost", checkpoint=checkpoint[:12], why=error.message)
                    self._publish("checkpoint.lost", checkpoint, owner, {"why": error.message})

    def _settle(self, checkpoint: str, expected: str, owner: int) -> None:
        manifest = Manifest.model_validate_json(repository.document(self._folder, checkpoint, expected))
        with self._chunks.writing() as writing:
            if not writing.settle_all(pieces_of(manifest), self._stopping.is_set):
                return
            writing.sync()
            stored = writing.stored_bytes
            self._writer.submit(
                "checkpoints.on_disk", lambda session: repository.settled(session, checkpoint, stored)
            ).result()
        self._chunks.memory.is_on_disk(checkpoint)
        self._publish("checkpoint.on_disk", checkpoint, owner, {"stored_bytes": stored})

    def _is_listed(self, checkpoint: str) -> bool:
        with self._reader.session() as session:
            return bool(repository.page(session, checkpoint=checkpoint, limit=1))

    def _publish(self, kind: EventType, checkpoint: str, owner: int, data: dict[str, object]) -> None:
        """That the disk is full is the operators' business."""
        subject = "checkpoint" if checkpoint else "node"
        self._loop.call_soon_threadsafe(lambda: self._bus.publish(kind, subject, checkpoint, None, data, owner=owner))
