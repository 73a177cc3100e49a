"""A second place for finished checkpoints: a directory, of another machine say, with the layout of the first one.

`DIRECTORY/<node>/`: manifests, and `objects/`. Invariants:

- A piece gets its name there when it is on the disk, and was read again and is what was written. A manifest follows the
  last of its pieces. So what a manifest names is there, whatever was interrupted.
- Each piece is written once, whichever checkpoints need it.
- Nothing is created in a directory that is not there: an empty mount point is not the mirror.
Everything here blocks, for long where the directory is on the network and that is gone.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from xmigd import failpoints, log
from xmigd.checkpoints.archive import pieces_of
from xmigd.checkpoints.content import HEADER, Chunks, decode
from xmigd.checkpoints.manifest import Manifest
from xmigd.store.objects import TEMPORARY, Damaged, private_folder, sync_folder, write_durably

logger = log.get("mirror")


class SecondPlace(Protocol):
    """A directory, or a bucket (bucket.py)."""

    name: str  # by which the database knows it
    place: str  # of this node in there

    def prepare(self, *, new: bool) -> None: ...

    def copy(self, document: bytes, chunks: Chunks, stopping: Callable[[], bool]) -> bool: ...

    def piece(self, name: str, size: int) -> bytes | None: ...

    def manifest(self, checkpoint: str, expected: str) -> bytes | None: ...

    def document(self, checkpoint: str) -> bytes | None: ...

    def of(self, node: str) -> SecondPlace:
        """The place of another node."""
        ...

    def remove(self, checkpoints: list[str]) -> None: ...


class Mirror:
    """Every thread may call it; copies and removals come from one thread."""

    def __init__(self, directory: Path, node: str) -> None:
        self.directory = directory
        self.folder = directory / node
        self.name, self.place = str(directory), str(self.folder)
        self._pieces = Chunks(self.folder / "objects")
        self._sound: set[str] = set()  # that this daemon has written or read there

    def prepare(self, *, new: bool) -> None:
        """`new`: nothing of this node is there yet. Raises OSError: it is not there, or not what it was."""
        if not self.directory.is_dir():
            raise OSError(errno.ENOENT, "the directory is not there", str(self.directory))
        if not self.folder.is_dir():
            if not new:
                raise OSError(errno.ENOENT, "the folder of this node is gone: is it mounted?", str(self.folder))
            private_folder(self.folder)
        private_folder(self.folder / "objects")

    def copy(self, document: bytes, chunks: Chunks, stopping: Callable[[], bool]) -> bool:
        """A checkpoint, by its manifest, out of `chunks`. False: it was interrupted, and goes on from there the next
        time. Raises Damaged: a piece is, here; OSError: no room, or the directory is gone."""
        manifest = Manifest.model_validate_json(document)
        touched = set()
        for name, size in pieces_of(manifest).items():
            if stopping():
                return False
            if self._copy_piece(name, size, chunks):
                touched.add(self._pieces.path(name).parent)
        for folder in touched:
            sync_folder(folder)
        sync_folder(self._pieces.folder)
        failpoints.hit("mirror.objects")
        write_durably(self._manifest_path(manifest.id), document)
        failpoints.hit("mirror.manifest")
        return True

    def _copy_piece(self, name: str, size: int, chunks: Chunks) -> bool:
        """Was it written?"""
        if name in self._sound:
            return False
        if self.piece(name, size) is not None:
            self._sound.add(name)
            return False
        piece, path = chunks.encoded(name, size), self._pieces.path(name)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        number, temporary = tempfile.mkstemp(suffix=TEMPORARY, dir=path.parent)
        try:
            with open(number, "wb") as file:
                file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            with open(temporary, "rb") as file:
                if file.read(len(piece) + 1) != piece:
                    raise OSError(errno.EIO, "it has other content than was written", str(path))
            os.rename(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
        self._sound.add(name)
        return True

    def piece(self, name: str, size: int) -> bytes | None:
        """A piece as its file has it; None: it is not there, or damaged."""
        with contextlib.suppress(OSError, Damaged):
            with open(self._pieces.path(name), "rb") as file:
                piece = file.read(HEADER.size + size + 1)
            decode(piece, name, size)
            return piece
        return None

    def manifest(self, checkpoint: str, expected: str) -> bytes | None:
        """The document that has this hash; None: it is not there."""
        document = self.document(checkpoint)
        return document if document is not None and hashlib.sha256(document).hexdigest() == expected else None

    def document(self, checkpoint: str) -> bytes | None:
        """A manifest, as it is there."""
        with contextlib.suppress(OSError):
            return self._manifest_path(checkpoint).read_bytes()
        return None

    def of(self, node: str) -> Mirror:
        return Mirror(self.directory, node)

    def remove(self, checkpoints: list[str]) -> None:
        """With the pieces that no other checkpoint there has. Raises OSError."""
        for checkpoint in checkpoints:
            self._manifest_path(checkpoint).unlink(missing_ok=True)
        needed: set[str] = set()
        for path in self.folder.glob("*.json"):
            try:
                needed |= pieces_of(Manifest.model_validate_json(path.read_bytes())).keys()
            except (ValidationError, Damaged) as error:  # what it needs is not known
                logger.error("nothing is removed from the mirror's content", manifest=str(path), why=str(error))
                return
        for folder, _, names in os.walk(self.folder / "objects"):
            for name in names:
                if name not in needed:
                    self._sound.discard(name)
                    Path(folder, name).unlink(missing_ok=True)

    def _manifest_path(self, checkpoint: str) -> Path:
        return self.folder / f"{checkpoint}.json"
