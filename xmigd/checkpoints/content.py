from __future__ import annotations
import os
from pathlib import Path
from xmigd.checkpoints.manifest import Chunk, Content
from xmigd.store.objects import Objects
PIECE = 2 << 20
class Chunks:
    def __init__(self, folder: Path) -> None:
        self._objects = Objects(folder)
    def get(self, name: str, size: int) -> bytes:
        return self._objects.get(name, size)
    def sync(self) -> None: ...
    def bytes(self) -> int:
        return sum(p.stat().st_size for p in self._objects.folder.glob("*/*")) if self._objects.folder.exists() else 0
    def remove_unneeded(self, needed: set[str]) -> None:
        self._objects.sweep(needed)
def store_file(chunks: Chunks, fd: int, size: int) -> Content:
    found = []
    at = 0
    while at < size:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            break
        at -= at % PIECE
        data = os.pread(fd, min(PIECE, size - at), at)
        if any(data):
            s = chunks._objects.put([data])
            found.append(Chunk(at=at, bytes=len(data), hash=s.hash))
        at += PIECE
    return Content(bytes=size, chunks=tuple(found))
def restore_file(chunks: Chunks, content: Content, fd: int) -> None:
    os.ftruncate(fd, content.bytes)
    for c in content.chunks:
        os.pwrite(fd, chunks.get(c.hash, c.bytes), c.at)
