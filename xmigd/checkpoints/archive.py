"""A checkpoint in one file, for another node: the manifest, every piece that it names, an index, and a trailer.

docs/formats.md has the layout. Invariants:

- Every byte is covered: each section by a checksum, which says where a file is damaged, and all of it by the SHA-256 in
  the trailer. Sections follow each other without gaps; the index has all pieces, exactly those that the manifest names.
- The file may come from anybody. A size is compared with its limit, and with what is left of the file, before anything
  is read by it. A piece never becomes larger than the manifest says, and is used only if it has its hash.
- In an encrypted file each section is sealed for its place in this file. So sections cannot be exchanged, left out or
  taken from another file without the key. Only versions, the salt and sizes are in clear.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import stat
import struct
import tempfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self, TypeVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import ValidationError

from xmigd.checkpoints import content as pieces
from xmigd.checkpoints.content import THREADS, Chunks, Writing
from xmigd.checkpoints.manifest import Manifest, contents
from xmigd.errors import Conflict, Invalid
from xmigd.store.objects import TEMPORARY, Damaged, sync_folder
from xmigd.text import harmless

MAGIC = b"xMIG checkpoint\0"
VERSION = 1  # that this reads and writes
# All numbers are little endian. The first part is the same in every version: by it a reader knows that it is too old.
PREFIX = struct.Struct("<16sBBBBI")  # magic, version of the writer, of readers, encryption, zero, CRC-32
KEYING = struct.Struct("<32s16sI")  # salt, check of the key, CRC-32
SECTION = struct.Struct("<4sIQ12sII")  # kind, number, bytes, nonce, CRC-32 of the bytes, CRC-32
ENTRY = struct.Struct("<32sQQI")  # SHA-256 of a piece, place of its section, bytes of that, bytes of the content
TRAILER = struct.Struct(
    "<8sQQQII32s"
)  # magic, place of the index, bytes of file and contents, sections, CRC-32, SHA-256
TRAILER_MAGIC = b"xMIGend\0"
MANIFEST, PIECE, INDEX = b"MANI", b"PIEC", b"INDX"
HEADER_BYTES = PREFIX.size + KEYING.size
CHECKED = TRAILER.size - 36  # bytes of the trailer before its checksum

PLAIN, AES_256_GCM = 0, 1
KEY, NONCE, TAG = 32, 12, 16  # bytes
MANIFEST_LIMIT = 128 << 20  # bytes; about 1 TiB of content in pieces of 2 MiB
INDEX_LIMIT = 64 << 20
PIECE_LIMIT = (1 << 30) + pieces.HEADER.size
READ = 1 << 20  # bytes at a time

Progress = Callable[[int], None]  # bytes of content that are done

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def key_of(path: Path) -> bytes:
    """The key in a file: 32 bytes, or 64 hexadecimal digits. Raises Invalid, OSError."""
    with path.open("rb") as file:
        return parse_key(file.read(4 * KEY), path)


def parse_key(found: bytes, path: Path) -> bytes:
    """The key that is what `path` contains. Raises Invalid."""
    if len(found) == KEY:
        return found
    with contextlib.suppress(ValueError):
        key = bytes.fromhex(found.decode("ascii").strip())
        if len(key) == KEY:
            return key
    raise Invalid(
        f"{path} is not a key: it has neither 32 bytes nor 64 hexadecimal digits", code="bad_key",
        hint="openssl rand -hex 32 makes one",
    )  # fmt: skip


def write(
    manifest: Manifest, chunks: Chunks, path: Path, *, key: bytes | None = None, threads: int = THREADS,
    progress: Progress | None = None,
) -> int:  # fmt: skip
    """Export a checkpoint into a file of mode 0600. It replaces one of this name when it is complete and on the disk.
    Returns its bytes. `key`: 32 bytes, with which it is encrypted. Raises Damaged: a piece is, so nothing is exported;
    Invalid: the checkpoint is too large for the format; OSError: no room."""
    number, temporary = tempfile.mkstemp(suffix=TEMPORARY, dir=path.parent)
    try:
        with chunks.writing(), open(number, "wb") as file:
            size = _Writer(file, key).write(manifest, chunks, threads, progress or _ignore)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
        sync_folder(path.parent)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return size


@dataclass(frozen=True, slots=True)
class Entry:
    """A section that is a piece."""

    hash: str
    at: int  # offset of its header in the file
    bytes: int  # behind the header
    content_bytes: int
    number: int


class Archive:
    """An exported checkpoint. What is in it was checked when it is returned; `verify` checks all of it."""

    def __init__(self, path: Path, fd: int, key: bytes | None) -> None:
        self.path = path
        self._fd = fd
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise Damaged(f"{path} is not a regular file")
        self.bytes = status.st_size
        self._header = self._read_header()
        self._cipher = self._cipher_of(key)
        self._index_at, self.content_bytes, self._sections, self._digest = self._read_trailer()
        self.encrypted = self._cipher is not None
        manifest, end = self._section(HEADER_BYTES, MANIFEST, 0, MANIFEST_LIMIT)
        self.manifest = self._parse(manifest)
        self._needed = self._pieces_needed()
        self._entries = {entry.hash: entry for entry in self._read_index(end)}
        self._compare()

    @classmethod
    def open(cls, path: Path, *, key: bytes | None = None) -> Self:
        """Reads and checks all but the pieces. Raises Damaged: it is not a checkpoint, or not whole; Conflict: it was
        written by a later version; Invalid: the key is missing, or not the one; OSError."""
        # Without O_NONBLOCK, a pipe of this name would block until somebody writes.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return cls(path, fd, key)
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, name: str) -> bytes:
        """The piece of this hash. Raises Damaged; KeyError: the manifest does not name it."""
        entry = self._entries[name]
        return self._decoded(entry, self._piece(entry)[0])

    def verify(self, *, threads: int = THREADS, progress: Progress | None = None) -> None:
        """Read every byte, and compare all of it with its checksums and hashes. Raises Damaged, OSError."""
        self._walk(self._decoded, threads, progress)

    def import_into(
        self, writing: Writing, *, threads: int = THREADS, progress: Progress | None = None
    ) -> Manifest:  # fmt: skip
        """Store every piece, and verify the file on the way. Sync `writing`, and write the manifest down, before that
        ends. If this fails, nothing names what was stored: it is removed with what is not needed. Raises Damaged;
        OSError: no room."""

        def take(entry: Entry, piece: bytes) -> None:
            with self._located(entry.at + SECTION.size):
                writing.take(entry.hash, entry.content_bytes, piece)

        self._walk(take, threads, progress)
        return self.manifest

    def damages(self, *, progress: Progress | None = None) -> Iterator[str]:
        """Each place that is not what was written, as a sentence with its offset; none: it is whole. Raises OSError."""
        done = 0
        for entry in self._entries.values():
            try:
                self.read(entry.hash)
            except Damaged as error:
                yield f"piece {entry.hash[:12]}: {error.message}"
            done += entry.content_bytes
            if progress is not None:
                progress(done)
        digest = hashlib.sha256()
        self._digest_range(digest, 0, self.bytes - 32)
        if not hmac.compare_digest(digest.digest(), self._digest):
            yield self._damaged("the SHA-256 of the file is not the one", self.bytes - 32).message

    # --- sections -----------------------------------------------------------------------------------------------------

    def _walk(self, use: Callable[[Entry, bytes], object], threads: int, progress: Progress | None) -> None:
        digest = hashlib.sha256()
        # There is nothing but these between the beginning, the pieces and the index: _read_index has checked it.
        first = min((entry.at for entry in self._entries.values()), default=self._index_at)
        self._digest_range(digest, 0, first)

        def one(entry: Entry) -> tuple[bytes, int]:
            piece, raw = self._piece(entry)
            use(entry, piece)
            return raw, entry.content_bytes

        done = 0
        for raw, size in _in_threads(one, self._entries.values(), threads):
            digest.update(raw)
            done += size
            if progress is not None:
                progress(done)
        self._digest_range(digest, self._index_at, self.bytes - 32)
        if not hmac.compare_digest(digest.digest(), self._digest):
            raise self._damaged("the SHA-256 of the file is not the one", self.bytes - 32)

    def _digest_range(self, digest: hashlib._Hash, at: int, end: int) -> None:
        while at < end:
            piece = self._bytes(at, min(READ, end - at))
            digest.update(piece)
            at += len(piece)

    def _piece(self, entry: Entry) -> tuple[bytes, bytes]:
        """The piece, and its section as the file has it."""
        raw = self._bytes(entry.at, SECTION.size + entry.bytes)
        return self._opened(raw, entry.at, PIECE, entry.number), raw

    def _decoded(self, entry: Entry, piece: bytes) -> bytes:
        with self._located(entry.at + SECTION.size):
            return pieces.decode(piece, entry.hash, entry.content_bytes)

    @contextlib.contextmanager
    def _located(self, at: int) -> Iterator[None]:
        try:
            yield
        except Damaged as error:
            raise self._damaged(error.message, at) from None

    def _section(self, at: int, kind: bytes, number: int, limit: int) -> tuple[bytes, int]:
        """What is in it, and where it ends."""
        size = self._size_of(at, kind, limit)
        raw = self._bytes(at, SECTION.size + size)
        return self._opened(raw, at, kind, number), at + len(raw)

    def _size_of(self, at: int, kind: bytes, limit: int) -> int:
        """Of a section, before it is read."""
        end = self.bytes - TRAILER.size
        if at + SECTION.size > end:
            raise self._damaged(f"there is no room for section {kind.decode()}", at)
        size: int = self._section_header(self._bytes(at, SECTION.size), at, kind)[1]
        if size > limit + (TAG if self._cipher else 0):
            raise self._damaged(f"section {kind.decode()} has {size} bytes, more than {limit} that it may have", at)
        if size > end - at - SECTION.size:
            raise self._damaged(f"section {kind.decode()} of {size} bytes ends behind the end of the file", at)
        return size

    def _section_header(self, raw: bytes, at: int, kind: bytes) -> tuple[int, int, bytes, int]:
        found, number, size, nonce, checksum, header_checksum = SECTION.unpack_from(raw)
        if zlib.crc32(raw[: SECTION.size - 4]) != header_checksum:
            raise self._damaged(f"the header of section {kind.decode()} is damaged", at)
        if found != kind:
            raise self._damaged(f"there is section {found!r}, not {kind.decode()}", at)
        return number, size, nonce, checksum

    def _opened(self, raw: bytes, at: int, kind: bytes, number: int) -> bytes:
        """What is in a section, of which these are all bytes."""
        found, size, nonce, checksum = self._section_header(raw, at, kind)
        if found != number:
            raise self._damaged(f"section {kind.decode()} has number {found}, not {number}", at)
        if size != len(raw) - SECTION.size:
            raise self._damaged(f"section {kind.decode()} has {size} bytes, not {len(raw) - SECTION.size}", at)
        payload = memoryview(raw)[SECTION.size :]
        if zlib.crc32(payload) != checksum:
            raise self._damaged(f"section {kind.decode()} is damaged", at + SECTION.size)
        if self._cipher is None:
            if any(nonce):
                raise self._damaged(f"section {kind.decode()} has a nonce, and the file is not encrypted", at)
            return bytes(payload)
        try:
            return self._cipher.decrypt(nonce, payload, _bound_to(self._header, raw))
        except InvalidTag:
            raise self._damaged(f"section {kind.decode()} was changed by somebody without the key", at) from None

    # --- what is read first -------------------------------------------------------------------------------------------

    def _read_header(self) -> bytes:
        if self.bytes < PREFIX.size:
            raise self._damaged("it is too short for a checkpoint", self.bytes)
        prefix = self._bytes(0, PREFIX.size)
        magic, writer, reader, encryption, zero, checksum = PREFIX.unpack(prefix)
        if magic != MAGIC:
            raise Damaged(f"{self.path} is not an exported checkpoint: it begins in another way, at offset 0")
        if zlib.crc32(prefix[:-4]) != checksum:
            raise self._damaged("the header is damaged", 0)
        if reader > VERSION:
            raise Conflict(
                f"{self.path} was written in version {writer} of the format, which needs a reader of version {reader}; "
                f"this is one of version {VERSION}", code="other_version", hint="import it with a later xMIG",
            )  # fmt: skip
        if not 1 <= reader <= writer or encryption not in (PLAIN, AES_256_GCM) or zero:
            raise self._damaged("the header has values that no version has", 16)
        if self.bytes < HEADER_BYTES + TRAILER.size:
            raise self._damaged("it is truncated", self.bytes)
        header = self._bytes(0, HEADER_BYTES)
        keying = header[PREFIX.size :]
        if zlib.crc32(keying[:-4]) != KEYING.unpack(keying)[2]:
            raise self._damaged("the header is damaged", PREFIX.size)
        if encryption == PLAIN and any(keying[:-4]):
            raise self._damaged("it has a salt, and is not encrypted", PREFIX.size)
        return header

    def _cipher_of(self, key: bytes | None) -> AESGCM | None:
        encrypted = self._header[18] == AES_256_GCM
        if not encrypted:
            if key is not None:
                # Otherwise somebody could put a file of his own in the place of an encrypted one.
                raise Invalid(f"{self.path} is not encrypted, and a key was given", code="bad_key",
                              hint="leave out the key if you trust the file")  # fmt: skip
            return None
        if key is None:
            raise Invalid(f"{self.path} is encrypted", code="bad_key", hint="name the file of its key")
        salt, check, _ = KEYING.unpack_from(self._header, PREFIX.size)
        cipher, expected = _derived(key, salt)
        if not hmac.compare_digest(check, expected):
            raise Invalid(f"{self.path} was encrypted with another key", code="bad_key",
                          hint="name the file of the key that it was exported with")  # fmt: skip
        return cipher

    def _read_trailer(self) -> tuple[int, int, int, bytes]:
        at = self.bytes - TRAILER.size
        raw = self._bytes(at, TRAILER.size)
        magic, index_at, size, content, sections, checksum, digest = TRAILER.unpack(raw)
        if magic != TRAILER_MAGIC:
            raise self._damaged("there is no trailer: it is truncated, or something was appended", at)
        if zlib.crc32(raw[:CHECKED]) != checksum:
            raise self._damaged("the trailer is damaged", at)
        if size != self.bytes:
            raise self._damaged(f"it has {self.bytes} bytes, and had {size} when it was written", at)
        if not HEADER_BYTES <= index_at <= at - SECTION.size:
            raise self._damaged(f"the index is to be at {index_at}, outside of the file", at)
        return index_at, content, sections, digest

    def _parse(self, document: bytes) -> Manifest:
        at = HEADER_BYTES + SECTION.size
        try:
            return Manifest.model_validate_json(document)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise self._damaged(f"the manifest is not valid: {harmless(where, 200)}: {first['msg']}", at) from None

    def _pieces_needed(self) -> dict[str, int]:
        with self._located(HEADER_BYTES + SECTION.size):
            for content in contents(self.manifest):
                pieces.check_places(content)
            return pieces_of(self.manifest)

    def _read_index(self, at: int) -> list[Entry]:
        """All pieces, in the order of the file. `at`: where the first one is to begin."""
        document, end = self._section(self._index_at, INDEX, self._sections - 1, INDEX_LIMIT)
        where = self._index_at + SECTION.size
        if end != self.bytes - TRAILER.size:
            raise self._damaged("there is something between index and trailer", end)
        if len(document) % ENTRY.size or len(document) // ENTRY.size != self._sections - 2:
            raise self._damaged(f"the index has {len(document)} bytes for {self._sections - 2} pieces", where)
        entries = []
        for number, (digest, place, size, content) in enumerate(ENTRY.iter_unpack(document), 1):
            if place != at or size > min(PIECE_LIMIT + TAG, self._index_at - at - SECTION.size):
                raise self._damaged(f"piece {number} is not where it has to be, at {at}", where)
            entries.append(Entry(digest.hex(), at, size, content, number))
            at += SECTION.size + size
        if at != self._index_at:
            raise self._damaged("there is something between the pieces and the index", at)
        return entries

    def _compare(self) -> None:
        """Of index, manifest and trailer."""
        where = self._index_at + SECTION.size
        if len(self._entries) != self._sections - 2:
            raise self._damaged("the index has a piece twice", where)
        if {entry.hash: entry.content_bytes for entry in self._entries.values()} != self._needed:
            raise self._damaged("the index has other pieces than the manifest", where)
        if sum(entry.content_bytes for entry in self._entries.values()) != self.content_bytes:
            raise self._damaged("the trailer has another sum of the contents", self.bytes - TRAILER.size)

    def _bytes(self, at: int, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            part = os.pread(self._fd, size - len(found), at + len(found))
            if not part:
                raise self._damaged("it is truncated", at + len(found))
            if len(part) == size:
                return part
            found += part
        return bytes(found)

    def _damaged(self, what: str, at: int) -> Damaged:
        return Damaged(f"{self.path}: {what}, at offset {at}", hint="copy the file again, or export it again")


class _Writer:
    def __init__(self, file: IO[bytes], key: bytes | None) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._at = 0
        self._number = 0
        self._cipher: AESGCM | None = None
        salt, check = bytes(32), bytes(16)
        if key is not None:
            salt = os.urandom(32)
            self._cipher, check = _derived(key, salt)
        encryption = PLAIN if key is None else AES_256_GCM
        prefix = PREFIX.pack(MAGIC, VERSION, VERSION, encryption, 0, 0)[:-4]
        self._header = _with_checksum(prefix) + _with_checksum(salt + check)

    def write(self, manifest: Manifest, chunks: Chunks, threads: int, progress: Progress) -> int:
        self._append(self._header)
        document = manifest.model_dump_json().encode()
        named = pieces_of(manifest)
        if len(document) > MANIFEST_LIMIT or len(named) * ENTRY.size > INDEX_LIMIT:
            raise Invalid(
                f"the checkpoint is too large for one file: {len(named)} pieces, a manifest of {len(document)} bytes"
            )
        self._section(MANIFEST, document)
        index, done = bytearray(), 0

        def one(piece: tuple[str, int]) -> tuple[str, int, bytes]:
            return *piece, chunks.from_anywhere(*piece)

        for name, size, piece in _in_threads(one, named.items(), threads):
            at, stored = self._at, self._section(PIECE, piece)
            index += ENTRY.pack(bytes.fromhex(name), at, stored, size)
            done += size
            progress(done)
        index_at = self._at
        self._section(INDEX, bytes(index))
        size = self._at + TRAILER.size
        trailer = TRAILER.pack(TRAILER_MAGIC, index_at, size, done, self._number, 0, b"")[:CHECKED]
        self._append(_with_checksum(trailer))
        self._append(self._digest.digest())
        return size

    def _section(self, kind: bytes, payload: bytes) -> int:
        """Returns the bytes behind its header."""
        nonce, size = bytes(NONCE), len(payload)
        if self._cipher is not None:
            nonce, size = os.urandom(NONCE), size + TAG
        header = SECTION.pack(kind, self._number, size, nonce, 0, 0)
        if self._cipher is not None:
            payload = self._cipher.encrypt(nonce, payload, _bound_to(self._header, header))
        self._append(_with_checksum(SECTION.pack(kind, self._number, size, nonce, zlib.crc32(payload), 0)[:-4]))
        self._append(payload)
        self._number += 1
        return size

    def _append(self, content: bytes) -> None:
        self._digest.update(content)
        self._file.write(content)
        self._at += len(content)


def _derived(key: bytes, salt: bytes) -> tuple[AESGCM, bytes]:
    """The cipher of one file, and what says whether a key is the right one. Each file has a key of its own, so that
    random nonces of one key never become too many."""
    found = HKDF(algorithm=SHA256(), length=KEY + 16, salt=salt, info=b"xMIG checkpoint 1").derive(key)
    return AESGCM(found[:KEY]), found[KEY:]


def _bound_to(header: bytes, section: bytes) -> bytes:
    """The data with which a section is authenticated: the file, its kind, number, size and nonce."""
    return header + section[: SECTION.size - 8]


def pieces_of(manifest: Manifest) -> dict[str, int]:
    """Bytes of each piece by its hash, in the order in which they are named first. Raises Damaged: it has two sizes."""
    found: dict[str, int] = {}
    for content in contents(manifest):
        for chunk in content.chunks:
            if found.setdefault(chunk.hash, chunk.bytes) != chunk.bytes:
                raise Damaged(f"piece {chunk.hash[:12]} has {found[chunk.hash]} and {chunk.bytes} bytes")
    return found


def _in_threads(work: Callable[[_Item], _Result], items: Iterable[_Item], threads: int) -> Iterator[_Result]:
    """The results in the order of the items. Few are begun ahead, so that few pieces are in memory at a time."""
    begun: deque[Future[_Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                begun.append(pool.submit(work, item))
                if len(begun) >= 2 * threads:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        finally:
            for future in begun:
                future.cancel()


def _with_checksum(header: bytes) -> bytes:
    return header + zlib.crc32(header).to_bytes(4, "little")


def _ignore(_: int) -> None:
    pass
