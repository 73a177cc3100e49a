"""Content by its hash: `objects/ab/ab12….zst`, compressed, mode 0600, never changed once it is there.

An object appears under its name only when it is complete and on the disk: it is written under another name, synced,
then renamed. What is read is checked against the hash that it is requested by; a flipped bit, or a truncated file, is
`Damaged`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import zstandard

from xmigd.errors import XmigError

LEVEL = 1  # what a core compresses at several hundred MiB/s
PIECE = 1 << 20
TEMPORARY = ".part"


class Damaged(XmigError):
    """Something of the store is not what was put there."""

    status = 410
    code = "damaged"


@dataclass(frozen=True, slots=True)
class Stored:
    hash: str  # SHA-256 of the content, hexadecimal
    bytes: int  # of the content
    stored_bytes: int  # of the file


class Objects:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str) -> Path:
        return self.folder / name[:2] / f"{name}.zst"

    def put(self, pieces: Iterable[bytes]) -> Stored:
        """Keep this content, whose hash is not known before it was read. Raises OSError: no room."""
        private_folder(self.folder)
        number, name = tempfile.mkstemp(suffix=TEMPORARY, dir=self.folder)
        temporary = Path(name)
        digest, size = hashlib.sha256(), 0
        try:
            with open(number, "wb", buffering=0) as file:
                # The checksum of zstd is of no use to us: the hash covers the content.
                with zstandard.ZstdCompressor(level=LEVEL).stream_writer(file, closefd=False) as compressor:
                    for piece in pieces:
                        digest.update(piece)
                        size += len(piece)
                        compressor.write(piece)
                stored = file.tell()
                path = self.path(digest.hexdigest())
                if path.exists():
                    return Stored(digest.hexdigest(), size, path.stat().st_size)
                os.fsync(file.fileno())
            path.parent.mkdir(exist_ok=True, mode=0o700)
            temporary.rename(path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
        return Stored(digest.hexdigest(), size, stored)

    def put_once(self, pieces: Callable[[], Iterable[bytes]]) -> Stored:
        """The same for what is probably here already: it is hashed first, which is cheaper than to compress it."""
        digest, size = hashlib.sha256(), 0
        for piece in pieces():
            digest.update(piece)
            size += len(piece)
        path = self.path(digest.hexdigest())
        with contextlib.suppress(FileNotFoundError):
            return Stored(digest.hexdigest(), size, path.stat().st_size)
        return self.put(pieces())

    def read(self, name: str, size: int) -> Iterator[bytes]:
        """The content, piece by piece. The last piece is followed by Damaged if what came before was not right: do not
        use any of it before the end."""
        digest, left = hashlib.sha256(), size
        try:
            with open(self.path(name), "rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as reader:
                while piece := reader.read(PIECE):
                    left -= len(piece)
                    if left < 0:
                        raise Damaged(f"{name[:12]} is longer than it was")
                    digest.update(piece)
                    yield piece
        except FileNotFoundError:
            raise Damaged(f"{name[:12]} is gone from the store") from None
        except (zstandard.ZstdError, OSError) as error:
            raise Damaged(f"{name[:12]} cannot be read: {error}") from None
        if left != 0 or digest.hexdigest() != name:
            raise Damaged(f"{name[:12]} is not what was kept under this hash")

    def get(self, name: str, size: int) -> bytes:
        return b"".join(self.read(name, size))

    def remove(self, name: str) -> int:
        """Returns the bytes that this gave back."""
        path = self.path(name)
        with contextlib.suppress(FileNotFoundError):
            size = path.stat().st_size
            path.unlink()
            return size
        return 0

    def sweep(self, needed: set[str]) -> int:
        """Remove everything else: a daemon that died may have left what no manifest names. Returns how much."""
        removed = 0
        for folder, _, names in os.walk(self.folder):
            for name in names:
                if name.endswith(TEMPORARY) or name.removesuffix(".zst") not in needed:
                    Path(folder, name).unlink(missing_ok=True)
                    removed += 1
        return removed


def write_durably(path: Path, content: bytes) -> None:
    """All of it or nothing, on the disk when this returns. Raises OSError."""
    private_folder(path.parent)
    number, name = tempfile.mkstemp(suffix=TEMPORARY, dir=path.parent)
    try:
        with open(number, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(name, path)
        sync_folder(path.parent)
    finally:
        Path(name).unlink(missing_ok=True)


def private_folder(path: Path) -> None:
    """Make it and what is missing above it, for us alone: memory of programs is in there."""
    for folder in (*reversed(path.parents), path):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)


def sync_folder(path: Path) -> None:
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)
