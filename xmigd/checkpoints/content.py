"""Content by its hash, in pieces of 2 MiB: `objects/ab/ab12…`, mode 0600, never changed once it is there. A piece may
also, or only for the moment, be in host memory (memory.py).

Equal pieces are kept once, whichever checkpoint, process or memory they belong to. A piece lies in a file of its own,
in the encoding in which it is smallest (docs/formats.md). It appears under its name when it is complete, but is on the
disk only after `Writing.sync`: a machine that was lost before that, or a disk that failed, may leave a piece that is
not what its name says. So one that is there already is read and compared before it counts, once in the life of the
daemon, and is written again if it is damaged. It is read from the disk: the kernel may have in memory what the disk has
not taken, and has reported that to an earlier daemon, or to nobody. If the disk fails, what was written since it last
did not is written again, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import struct
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

import zstandard

from xmigd.checkpoints.manifest import Chunk, Content
from xmigd.checkpoints.memory import Kept, MemoryTier, Slab, read_into
from xmigd.checkpoints.planes import PLANES, Bytes, join, split
from xmigd.ipc.fds import Fd, close_all, write_all
from xmigd.store.objects import TEMPORARY, Damaged, private_folder

PIECE = 2 << 20  # bytes
LEVEL = 1
SAMPLE = 64 << 10  # bytes of a piece by which its encoding is chosen
WORTHWHILE = 0.95  # of its size: what does not become smaller than that is kept as it is
THREADS = max(4, min(16, (os.cpu_count() or 1) // 2))

MAGIC = b"XMPIECE1"
HEADER = struct.Struct("<8sB3sIQ")  # magic, encoding, RESERVED, CRC-32 of the payload, bytes of the content
RESERVED = bytes(3)
# Encodings: 0 as it is; 1 compressed (zstd); n > 1: as planes, the first bytes of all n, then the second ones, and so
# on, and then compressed. The high bytes of floating-point numbers are much alike, the low ones are not.
RAW, ZSTD = 0, 1

_LIBC = ctypes.CDLL(None, use_errno=True)
_ALL_OF_IT = ctypes.c_int64(0), ctypes.c_int64(0)
SYNC_FILE_RANGE_WRITE = 2  # of linux/fs.h
_ZEROS = bytes(PIECE)


@dataclass(frozen=True, slots=True)
class Source:
    """A file of which only the pieces that have some of these bytes are stored. `bytes` None: all from `start` on.
    `slab`: it is in host memory already, and stays there."""

    fd: int
    start: int = 0
    bytes: int | None = None
    slab: Slab | None = None

    def has(self, piece: int) -> bool:
        return self.start < piece + PIECE and (self.bytes is None or piece < self.start + self.bytes)


class InTransit(Protocol):
    """What comes from another node (transit.py)."""

    def read(self, name: str, size: int, buffer: bytearray) -> memoryview | None: ...

    def slabs_of(self, owner: int) -> list[tuple[Slab, Fd]]: ...


class NotWanted(Exception):
    """What was to be read is not needed any more."""


class Chunks:
    """The pieces of all checkpoints of a node. Its methods block; every thread may call them."""

    def __init__(self, folder: Path, memory: MemoryTier | None = None) -> None:
        self.folder = folder
        self.memory = memory or MemoryTier(folder / "nowhere", limit=0)
        self.transits: dict[str, InTransit] = {}  # by manifest
        self._lock = threading.Lock()
        self._writers = 0
        self._sound: set[str] = set()  # that were written, or read and compared, by this daemon
        self._fresh: set[str] = set()  # that were written since the last `sync`
        self._doubtful: set[str] = set()  # that the disk may not have, although they can be read
        self._failed = 0  # times that `sync` has failed
        self._syncing = threading.Lock()
        self._flushing = threading.Lock()
        self._flushed = False  # is what earlier daemons have written on the disk, or lost?
        # Where else a piece may be, as its file has it, and checked; None: it is not there.
        self.elsewhere: Callable[[str, int], bytes | None] = lambda name, size: None

    def path(self, name: str) -> Path:
        return self.folder / name[:2] / name

    def get(self, name: str, size: int) -> bytes:
        """The piece of this hash. Raises Damaged: it is gone, or not what it was; then it is of no use to anybody."""
        if (found := self.memory.get(name, size)) is not None:
            return found
        return self.on_disk(name, size)

    def on_disk(self, name: str, size: int) -> bytes:
        """The same, of the disk."""
        try:
            return bytes(self._read(name, size)[1])
        except Damaged:
            self._sound.discard(name)  # so that it is written again by the next one that has it
            raise

    def encoded(self, name: str, size: int) -> bytes:
        """The same piece as its file has it, for `Writing.take` on another node. Raises Damaged."""
        try:
            return bytes(self._read(name, size)[0])
        except Damaged:
            self._sound.discard(name)
            if (found := self.memory.get(name, size)) is not None:  # it has yet to go to the disk
                return b"".join(encode(found))
            raise

    def from_anywhere(self, name: str, size: int) -> bytes:
        """As `encoded`, or from elsewhere if it is gone or damaged here. Raises Damaged."""
        try:
            return self.encoded(name, size)
        except Damaged:
            if (found := self.elsewhere(name, size)) is None:
                raise
            return found

    def _read(self, name: str, size: int, buffer: bytearray | None = None) -> tuple[Bytes, Bytes]:
        """File and content; in this buffer, if it is large enough."""
        wanted = HEADER.size + size + 1  # the payload is never longer than the content
        place = memoryview(bytearray(wanted) if buffer is None or wanted > len(buffer) else buffer)[:wanted]
        try:
            with open(self.path(name), "rb", buffering=0) as file:
                piece = place[: read_into(file, place)]
        except OSError as error:
            raise Damaged(f"piece {name[:12]} cannot be read: {error.strerror}") from None
        return piece, checked(piece, name, size)

    def slabs_of(self, manifest: str, owner: int) -> list[tuple[Slab, Fd]]:
        """Memory that has its content as it is, of this user's programs, open for reading. Raises OSError: no
        descriptors."""
        transit = self.transits.get(manifest)
        return self.memory.slabs_of(manifest, owner) if transit is None else transit.slabs_of(owner)

    def restore(self, content: Content, fd: int) -> None:
        """Write it into an empty file; what is zero stays a hole. Raises Damaged, OSError."""
        for _ in self.restore_all([(content, fd)]):
            pass

    def restore_all(
        self, contents: Iterable[tuple[Content, int]], enough: threading.Event | None = None
    ) -> Iterator[int]:
        """The same of many, in their order; yields the bytes of each that is complete. Raises NotWanted: `enough` was
        set meanwhile."""

        def one(chunk: Chunk, fd: int) -> None:
            if enough is not None and enough.is_set():
                raise NotWanted
            write_all(fd, self._restored(chunk.hash, chunk.bytes, _own.piece), chunk.at)

        with ThreadPoolExecutor(2 * THREADS) as pool:  # nobody's program runs yet
            begun = []
            try:
                for content, fd in contents:
                    check_places(content)
                    os.ftruncate(fd, content.bytes)
                    begun.append((content.bytes, [pool.submit(one, chunk, fd) for chunk in content.chunks]))
                for size, pieces in begun:
                    for piece in pieces:
                        piece.result()
                    yield size
            except BaseException:
                pool.shutdown(cancel_futures=True)  # the rest is left out
                raise

    def link(self, checkpoint: str, content: Content, path: Path) -> bool:
        """It becomes a file of this name, which is only to be read, if it is in host memory in one piece and
        undamaged."""

        def sound(chunk: Chunk) -> bool:
            """In this file: another one with an equal piece says nothing of it."""
            with path.open("rb", buffering=0) as file:
                file.seek(chunk.at)
                piece = memoryview(_own.piece)[: chunk.bytes]
                return hashlib.sha256(piece[: read_into(file, piece)]).hexdigest() == chunk.hash

        places = {chunk.at: (chunk.hash, chunk.bytes) for chunk in content.chunks}
        if not places or not self.memory.link(checkpoint, content.bytes, places, path):
            return False
        with ThreadPoolExecutor(2 * THREADS) as pool:  # nobody's program runs yet
            if all(pool.map(sound, content.chunks)):
                return True
        path.unlink()
        return False

    def without_damaged(self, checkpoint: str, owners: Iterable[int]) -> bool:
        """Reads the slabs that programs of these users are given as a whole: those that are not what they were are not
        given again. True: the disk has what the checkpoint had in them. Blocks. Raises OSError."""
        given = [each for owner in set(owners) for each in self.memory.slabs_of(checkpoint, owner)]

        def sound(fd: Fd, at: int, name: str, size: int) -> bool:
            piece = memoryview(_own.piece)[:size]
            return os.preadv(fd.fileno(), [piece], at) == size and hashlib.sha256(piece).hexdigest() == name

        found = False
        try:
            with ThreadPoolExecutor(THREADS) as pool:
                for slab, fd in given:
                    looks = [pool.submit(sound, fd, at, name, size) for at, (name, size) in list(slab.places.items())]
                    if not all(look.result() for look in looks):
                        found |= self.memory.drop_damaged(checkpoint, slab)
        finally:
            close_all(fd for _, fd in given)
        return found

    def _restored(self, name: str, size: int, buffer: bytearray) -> Bytes:
        """The piece, wherever it is. Raises Damaged."""
        places: list[InTransit | MemoryTier] = [*self.transits.values(), self.memory]
        for place in places:
            if (found := place.read(name, size, buffer)) is not None:
                return found
        try:
            return self._read(name, size, buffer)[1]
        except Damaged:
            self._sound.discard(name)
            if (elsewhere := self.elsewhere(name, size)) is None:
                raise
            return checked(elsewhere, name, size)

    @contextlib.contextmanager
    def writing(self, *, owner: int | None = None, durable: bool = True) -> Iterator[Writing]:
        """Nothing is removed meanwhile. What was stored has to be named in a manifest, on the disk, before it ends.
        `owner`: of its programs; it goes to host memory first, if there is room for all of it, and to the disk as well
        if it has to be `durable`. Raises OSError: there is no folder for it."""
        kept = None if owner is None else self.memory.begin(owner)
        with self.nothing_is_removed():
            try:
                with contextlib.closing(Writing(self, kept, durable=durable)) as writing:
                    yield writing
            finally:
                if kept is not None:
                    self.memory.give_up(kept)

    @contextlib.contextmanager
    def nothing_is_removed(self) -> Iterator[None]:
        with self._lock:
            self._writers += 1
        try:
            yield
        finally:
            with self._lock:
                self._writers -= 1

    def remove_unneeded(self, needed: Callable[[], set[str]]) -> bool:
        """Remove every piece that is not needed. False: nothing was removed, for somebody writes; try again later.
        `needed` is called when nobody can begin to write."""
        with self._lock:
            if self._writers:
                return False
            names = needed()
            for folder, _, files in os.walk(self.folder):
                for name in files:
                    if name not in names:
                        self._sound.discard(name)
                        Path(folder, name).unlink(missing_ok=True)
            return True

    def sync(self, folder: int, failed: int) -> None:
        """Every piece is on the disk when this returns, if nothing has failed since it had failed so often. `folder`:
        a descriptor of it, opened before anything was written: what has failed before, the kernel tells others only.
        Raises OSError: what was written since the last time may be lost, whoever has written it."""
        with self._syncing:
            with self._lock:
                fresh, self._fresh = self._fresh, set()
            try:
                if not os.path.samestat(os.stat(self.folder), os.fstat(folder)):
                    raise OSError(errno.ESTALE, "the folder has become another one")
                _syncfs(folder)
            except OSError:
                with self._lock:
                    fresh |= self._fresh
                    self._fresh = set()
                    self._sound -= fresh
                    self._doubtful |= fresh
                    self._failed += 1
                raise
            if self._failed != failed:
                raise OSError(errno.EIO, "the disk has failed since this began")

    def put(self, content: Bytes, kept: Kept | None = None, slab: Slab | None = None, at: int = 0) -> tuple[str, int]:
        """Keep it: the hash, and the bytes that it took on disk, 0 if it was here. `kept`: in host memory, if it goes
        there; `slab`: where it is there already. Raises OSError: no room."""
        name = hashlib.sha256(content).hexdigest()
        if kept is not None and slab is not None and kept.whole:
            self.memory.note(kept, slab, at, name, len(content))
            return name, 0
        if kept is not None and self.memory.keep(kept, name, content):
            return name, 0
        return name, self.keep(name, len(content), lambda: encode(content))

    def is_sound(self, name: str) -> bool:
        """On the disk, and written or read by this daemon?"""
        return name in self._sound

    def keep(self, name: str, size: int, piece: Callable[[], tuple[Bytes, ...]]) -> int:
        if name in self._sound:
            return 0
        path = self.path(name)
        if name not in self._doubtful and path.exists():
            with contextlib.suppress(Damaged):
                self._leave_memory(path)
                self._read(name, size)
                with self._lock:
                    self._sound.add(name)
                    self._fresh.add(name)  # an earlier daemon may have ended before it was on the disk
                return 0
        path.parent.mkdir(mode=0o700, exist_ok=True)
        number, temporary = tempfile.mkstemp(suffix=TEMPORARY, dir=path.parent)
        try:
            with open(number, "wb") as file:
                file.writelines(piece())
                stored = file.tell()
                file.flush()
                _LIBC.sync_file_range(number, *_ALL_OF_IT, SYNC_FILE_RANGE_WRITE)  # it begins; `sync` waits for the end
            with self._lock:
                if name not in self._sound:
                    os.rename(temporary, path)
                    self._sound.add(name)
                    self._fresh.add(name)
                    self._doubtful.discard(name)
                    return stored
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        Path(temporary).unlink()  # another thread was faster
        return 0

    def _leave_memory(self, path: Path) -> None:
        """What is read of the file from now on comes from the disk, if it is on one. Raises Damaged."""
        with self._flushing:
            if not self._flushed:  # what the kernel has yet to write would stay in memory
                folder = _open_folder(self.folder)
                try:
                    with contextlib.suppress(OSError):  # whatever of it is not there, is found now
                        _syncfs(folder)
                finally:
                    os.close(folder)
                self._flushed = True
        try:
            with open(path, "rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise Damaged(f"{path.name[:12]} cannot be read: {error.strerror}") from None


class Writing:
    """What one checkpoint stores."""

    def __init__(self, chunks: Chunks, kept: Kept | None = None, *, durable: bool = True) -> None:
        self._chunks = chunks
        self._kept = kept
        self._durable = durable
        self._failed = chunks._failed
        self.on_disk = True  # after `sync`
        self.stored_bytes = 0  # on disk, of what was not there before
        private_folder(chunks.folder)
        self._folder = _open_folder(chunks.folder)

    def close(self) -> None:
        os.close(self._folder)

    def store(self, fd: int) -> Content:
        """All of a file. Raises OSError: no room, or it cannot be read."""
        return next(self.store_all([Source(fd)]))

    def store_all(self, sources: Iterable[Source]) -> Iterator[Content]:
        """The same of many, in their order: the threads do not wait for the end of each."""

        def one(source: Source, size: int, at: int) -> tuple[Chunk, int] | None:
            content = memoryview(_own.piece)[: min(PIECE, size - at)]
            read_all(source.fd, content, at)
            # Much faster than to look at each byte, and nobody else can run meanwhile.
            if _own.piece.startswith(_ZEROS[: len(content)]):
                return None
            name, stored = self.put(content, source, at)
            return Chunk(at=at, bytes=len(content), hash=name), stored

        with ThreadPoolExecutor(THREADS) as pool:
            begun = []
            try:
                for source in sources:
                    size = os.fstat(source.fd).st_size
                    places = (at for at in _places(source.fd, size) if source.has(at))
                    begun.append((source.fd, size, [pool.submit(one, source, size, at) for at in places]))
                for fd, size, pieces in begun:
                    chunks = []
                    for piece in pieces:
                        if (found := piece.result()) is not None:
                            chunks.append(found[0])
                            self.stored_bytes += found[1]
                    if os.fstat(fd).st_size < size:  # what is gone at its end looks like a hole
                        raise _shorter()
                    yield Content(bytes=size, chunks=tuple(chunks))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def put(self, content: Bytes, source: Source, at: int) -> tuple[str, int]:
        """Its hash, and the bytes that it took on the disk. Raises OSError: no room."""
        return self._chunks.put(content, self._kept, source.slab, at)

    def retain(self, memory: Fd, owner: int | None) -> tuple[Fd, Slab | None]:
        """As `MemoryTier.retain`."""
        return (memory, None) if self._kept is None else self._chunks.memory.retain(self._kept, memory, owner)

    def has(self, names: Iterable[str]) -> bool:
        """All of these, written or read by this daemon, or in host memory if it goes there? Then they stay until this
        ends. Empty ones are nobody's."""
        wanted = {name for name in names if name}
        if self._kept is not None and self._kept.whole:
            return self._chunks.memory.adopt(self._kept, wanted)
        return self._chunks._sound.issuperset(wanted)

    def bytes_on_disk(self, names: Iterable[str]) -> int | None:
        """That these take, after `sync`; None: they are in host memory only. Raises OSError."""
        return sum(self._chunks.path(name).stat().st_size for name in names) if self.on_disk else None

    def take(self, name: str, size: int, piece: Bytes) -> int:
        """Keep a piece as another node has encoded it, if it has this hash. Returns the bytes that it took on disk.
        Raises Damaged; OSError: no room."""
        checked(piece, name, size)
        return self._chunks.keep(name, size, lambda: (piece,))

    def lacks(self, name: str) -> bool:
        """Would another node have to send it?"""
        return not self._chunks.path(name).exists()

    def encoded(self, name: str, size: int, buffer: bytearray) -> tuple[Bytes, ...]:
        """As `Chunks.encoded`, in parts, of which some may be in this buffer, which has room for a piece."""
        return (self._chunks.encoded(name, size),)

    def sent(self) -> None:
        """Another node has all that was stored so far."""

    def _settle(self, name: str, size: int) -> int:
        """Bytes that it took on the disk. Any thread's."""
        return self._chunks.keep(name, size, lambda: (self._chunks.encoded(name, size),))

    def settle_all(self, pieces: dict[str, int], enough: Callable[[], bool] = lambda: False) -> bool:
        """These pieces, with their bytes, go from host memory to the disk. False: there was `enough` of it before all
        was there. Raises Damaged: one is nowhere; OSError: no room."""
        missing = ((name, size) for name, size in pieces.items() if name not in self._chunks._sound)
        with ThreadPoolExecutor(THREADS) as pool:
            while begun := [pool.submit(self._settle, name, size) for name, size in islice(missing, 8 * THREADS)]:
                for each in begun:
                    self.stored_bytes += each.result()
                if enough():
                    return False
        return True

    def finish(self, checkpoint: str, names: dict[str, int]) -> None:
        """These are the pieces of the checkpoint, with their bytes: it stays in host memory, if all of it is there.
        Raises Damaged, OSError."""
        kept = self._kept
        if kept is None:
            return
        if not self._chunks.memory.finish(kept, checkpoint, names, on_disk=self.on_disk) and not self.on_disk:
            raise OSError(errno.ENOMEM, "host memory has lost a part of it")

    def sync(self) -> None:
        """Everything that was stored is on the disk when this returns, or, if it need not be `durable`, in host memory.
        Raises OSError."""
        kept = self._kept
        if kept is not None:
            self.on_disk = self._durable or not kept.whole
            if not self.on_disk:
                return
            self.settle_all(self._chunks.memory.pieces(kept))
        self._chunks.sync(self._folder, self._failed)


def _places(fd: int, size: int) -> Iterator[int]:
    """Where pieces begin that are not wholly in a hole."""
    at = 0
    while at < size:
        try:
            data = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # the rest is a hole
                return
            raise
        at = data - data % PIECE
        if at >= size:  # it has grown
            return
        yield at
        at += PIECE


def check_places(content: Content) -> None:
    """Raises Damaged: pieces overlap, or lie outside."""
    end = 0
    for chunk in content.chunks:
        if chunk.at < end or chunk.at + chunk.bytes > content.bytes:
            raise Damaged(f"piece {chunk.hash[:12]} is not in its place")
        end = chunk.at + chunk.bytes


def decode(piece: bytes, name: str, size: int) -> bytes:
    """The content of a piece that has this hash and size. Raises Damaged, before it takes more memory than the size."""
    return bytes(checked(piece, name, size))


def encode(content: Bytes) -> tuple[bytes, Bytes]:
    """A piece's header and payload."""
    encoding = _choose(bytes(content[:SAMPLE]))
    payload = content if encoding == RAW else _packed(content, encoding)
    if len(payload) > WORTHWHILE * len(content):  # what follows the sample is of another kind
        encoding, payload = RAW, content
    return HEADER.pack(MAGIC, encoding, RESERVED, zlib.crc32(payload), len(content)), payload


def _choose(sample: bytes) -> int:
    # Each plane by itself: of a whole piece they lie in different blocks. The sample would be one block, with one code
    # for the bytes of all planes, in which their order makes no difference.
    sizes = {n: sum(len(_own.compressor.compress(plane)) for plane in _planes(sample, n)) for n in (ZSTD, *PLANES)}
    best = min(sizes, key=lambda encoding: sizes[encoding])
    if sizes[best] > WORTHWHILE * len(sample):
        return RAW
    return ZSTD if sizes[best] > WORTHWHILE * sizes[ZSTD] else best


def _planes(content: bytes, width: int) -> Iterator[memoryview]:
    """One after the other."""
    planes = memoryview(content) if width == 1 else split(content, width, _own.planes)
    each = len(planes) // width  # of an incomplete number they have a byte more or less, which makes no difference
    for first in range(width):
        yield planes[first * each : (first + 1) * each if first + 1 < width else None]


def _packed(content: Bytes, encoding: int) -> bytes:
    return _own.compressor.compress(content if encoding == ZSTD else split(content, encoding, _own.planes))


def checked(piece: Bytes, name: str, size: int) -> Bytes:
    """As `decode`; it may be a part of `piece`, or of memory that this thread uses for the next one."""
    piece = memoryview(piece)
    content = _decoded(piece[: HEADER.size], piece[HEADER.size :], size)
    if content is None or hashlib.sha256(content).hexdigest() != name:
        raise Damaged(f"piece {name[:12]} is not what was kept under this hash")
    return content


def _decoded(header: Bytes, payload: Bytes, size: int) -> Bytes | None:
    """None: that is no piece of this size."""
    if len(header) != HEADER.size:
        return None
    magic, encoding, reserved, checksum, stated = HEADER.unpack(header)
    if (magic, reserved, stated) != (MAGIC, RESERVED, size) or encoding not in (RAW, ZSTD, *PLANES):
        return None
    if checksum != zlib.crc32(payload):
        return None
    if encoding == RAW:
        return payload if len(payload) == size else None
    if len(payload) >= size:
        return None
    try:
        # What the frame states is what the decompressor takes, whatever maximum it is given.
        if zstandard.get_frame_parameters(payload).content_size != size:
            return None
        found = _own.decompressor.decompress(payload, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError:
        return None
    if len(found) != size:
        return None
    return found if encoding == ZSTD else join(found, encoding, _own.planes)


def _open_folder(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _syncfs(folder: int) -> None:
    """Raises OSError."""
    if _LIBC.syncfs(folder) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class _Own(threading.local):
    """Of each thread. To be given new memory for each piece takes as long as to read it, and all threads wait for the
    same lock of the kernel then; compressors have a megabyte of their own, and are not to be shared."""

    def __init__(self) -> None:
        self.piece = bytearray(HEADER.size + PIECE + 1)
        self.planes = bytearray(PIECE)
        self.compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False)
        self.decompressor = zstandard.ZstdDecompressor()


_own = _Own()


def read_all(fd: int, into: memoryview, at: int) -> None:
    """Raises OSError: also if it ends before."""
    while into:
        count = os.preadv(fd, [into], at)
        if count == 0:
            raise _shorter()
        into, at = into[count:], at + count


def _shorter() -> OSError:
    return OSError(errno.EIO, "it became shorter while it was read")
