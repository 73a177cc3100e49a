"""A second place for finished checkpoints: a bucket of an S3-compatible store. The layout is that of a directory
(mirror.py), with `PREFIX/NODE/` for the folder of this node.

The same invariants hold. A store writes an object as a whole or not at all, so nothing has a temporary name. Whatever
the store answers is checked: what was written is read again, and a piece counts only if it has its hash.
Everything here blocks. A request that fails is repeated with growing pauses for up to PATIENCE; mirroring.py repeats
what fails after that.
"""

from __future__ import annotations

import errno
import hashlib
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError

from xmigd import failpoints, log
from xmigd.checkpoints.archive import pieces_of
from xmigd.checkpoints.content import HEADER, Chunks, decode
from xmigd.checkpoints.keys import credentials_of
from xmigd.checkpoints.manifest import Manifest
from xmigd.checkpoints.mirror import Mirror, SecondPlace
from xmigd.errors import Invalid, XmigError
from xmigd.settings import Settings
from xmigd.store.objects import Damaged
from xmigd.text import harmless

logger = log.get("mirror")

SCHEME = "s3://"
PAGE = 1000  # names in one answer
TRIES = 3
AT_ONCE = 8  # requests
PATIENCE = timedelta(seconds=30)  # of one request with its repetitions
ATTEMPT = timedelta(seconds=20)  # of one attempt
MARKER = "mirror.txt"  # says that this node has written here before
LONGEST_MANIFEST = 1 << 30  # bytes
# What a store's codes mean for operators. Others are shown as they are.
MEANINGS = {
    "NoSuchBucket": "the bucket is not there",
    "AccessDenied": "the credentials do not allow it",
    "InvalidAccessKeyId": "the store does not know the access key",
    "SignatureDoesNotMatch": "the secret key is wrong",
    "ExpiredToken": "the credentials have expired",
    "RequestTimeTooSkewed": "the clocks of this machine and of the store differ",
    "QuotaExceeded": "the quota is full",
    "XMinioStorageFull": "the store is full",
    "XMinioAdminBucketQuotaExceeded": "the bucket's quota is full",
    "SlowDown": "it receives too many requests",
}
FULL = {"QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded"}
DENIED = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"}


class Bucket:
    """Every thread may call it; copies and removals come from one thread."""

    def __init__(self, address: str, node: str, *, endpoint: str, region: str, credentials: Path | None) -> None:
        """`address`: s3://BUCKET/PREFIX. `credentials`: a private file, read now and before each copy. Raises Invalid:
        one of these cannot be right."""
        if credentials is None:
            raise Invalid(f"{address} needs credentials", code="bad_key",
                          hint="name their file with the setting checkpoint_mirror_credentials")  # fmt: skip
        if find_spec("obstore") is None:
            raise Invalid(f"obstore is not installed, which copies checkpoints to {address}",
                          hint="pip install 'xmig[s3]'")  # fmt: skip
        self._obstore: Any = import_module("obstore")
        self._address = address
        parts = urlsplit(address)
        self._bucket = parts.netloc
        self._prefix = "/".join(part for part in (*parts.path.split("/"), node) if part)
        self._endpoint, self._region, self._credentials = endpoint, region, credentials
        self.name = address + (f" at {endpoint}" if endpoint else "")
        self.place = f"{SCHEME}{self._bucket}/{self._prefix}" + (f" at {endpoint}" if endpoint else "")
        self._sound: set[str] = set()  # that this daemon has written or read there
        self._there: set[str] | None = None  # pieces, by the list of the store; None: it was not read yet
        self._known = credentials_of(credentials)
        self._store = self._connected()

    def _connected(self) -> Any:
        store: Any = import_module("obstore.store")
        config = {**self._known, "region": self._region} | ({"endpoint": self._endpoint} if self._endpoint else {})
        return store.S3Store(
            self._bucket, config=config,
            client_options={
                "allow_http": self._endpoint.startswith("http://"), "timeout": ATTEMPT,
                "connect_timeout": timedelta(seconds=5),
            },
            retry_config={
                "max_retries": 5, "retry_timeout": PATIENCE,
                "backoff": {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=5), "base": 2},
            },
        )  # fmt: skip

    def prepare(self, *, new: bool) -> None:
        """`new`: nothing of this node is there yet. Raises OSError: the bucket is not there, or not what it was."""
        try:
            known = credentials_of(self._credentials)
        except XmigError as error:
            raise OSError(errno.EACCES, error.message, self.name) from None
        if known != self._known:  # they were replaced
            self._known = known
            self._store = self._connected()
        if new:
            self._there = None
            self._put(MARKER, b"Checkpoints of xMIG. Do not change anything in here.\n")
        elif self._get(MARKER, 1 << 16) is None:
            raise FileNotFoundError(errno.ENOENT, "what this node has copied there is gone", self.place)

    def copy(self, document: bytes, chunks: Chunks, stopping: Callable[[], bool]) -> bool:
        """As of a directory."""
        manifest = Manifest.model_validate_json(document)
        if self._there is None:
            self._there = {name.rpartition("/")[2] for name, _ in self._list("objects")}
        there = self._there
        wanted = [item for item in pieces_of(manifest).items() if item[0] not in self._sound]

        def one(item: tuple[str, int]) -> None:
            if not stopping():
                self._copy_piece(*item, chunks, there)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                for _ in pool.map(one, wanted):
                    pass
            except BaseException:
                pool.shutdown(cancel_futures=True)
                self._there = None  # it may have changed without us
                raise
        if stopping():
            return False
        failpoints.hit("mirror.objects")
        self._put(_manifest_name(manifest.id), document)
        failpoints.hit("mirror.manifest")
        return True

    def _copy_piece(self, name: str, size: int, chunks: Chunks, there: set[str]) -> None:
        if name not in there or self.piece(name, size) is None:
            self._put(_piece_name(name), chunks.encoded(name, size))
        self._sound.add(name)

    def piece(self, name: str, size: int) -> bytes | None:
        """A piece as its object has it; None: it is not there, or damaged."""
        for _ in range(TRIES):  # what was damaged on its way may arrive the next time
            try:
                piece = self._get(_piece_name(name), HEADER.size + size)
                if piece is None:
                    return None
                decode(piece, name, size)
                return piece
            except Damaged as error:
                logger.warning("the mirror has other content", piece=name, why=error.message)
            except OSError as error:
                logger.warning("the mirror does not answer", piece=name, why=error.strerror)
                return None
        return None

    def manifest(self, checkpoint: str, expected: str) -> bytes | None:
        """The document that has this hash; None: it is not there."""
        document = self.document(checkpoint)
        return document if document is not None and hashlib.sha256(document).hexdigest() == expected else None

    def document(self, checkpoint: str) -> bytes | None:
        """A manifest, as it is there."""
        try:
            return self._get(_manifest_name(checkpoint), LONGEST_MANIFEST)
        except (OSError, Damaged) as error:
            logger.warning("the mirror does not answer", checkpoint=checkpoint, why=str(error))
            return None

    def of(self, node: str) -> Bucket:
        return Bucket(self._address, node, endpoint=self._endpoint, region=self._region, credentials=self._credentials)

    def remove(self, checkpoints: list[str]) -> None:
        """With the pieces that no other checkpoint there has. Raises OSError."""
        self._delete(_manifest_name(checkpoint) for checkpoint in checkpoints)
        needed: set[str] = set()
        for name, size in self._list(""):
            if "/" in name or not name.endswith(".json"):
                continue
            try:
                needed |= pieces_of(Manifest.model_validate_json(self._get(name, size) or b"")).keys()
            except (ValidationError, Damaged) as error:  # what it needs is not known
                logger.error("nothing is removed from the mirror's content", manifest=name, why=str(error))
                return
        unneeded = [name for name, _ in self._list("objects") if name.rpartition("/")[2] not in needed]
        gone = {name.rpartition("/")[2] for name in unneeded}
        self._sound -= gone
        if self._there is not None:
            self._there -= gone
        self._delete(unneeded)

    # --- requests -----------------------------------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _put(self, name: str, content: bytes) -> None:
        """It is there, and is what was written, when this returns. Raises OSError."""
        path = self._path(name)
        try:
            self._obstore.put(self._store, path, content, use_multipart=False)
        except Exception as error:
            raise self._failed(error, path) from None
        try:
            written = self._get(name, len(content))
        except Damaged:
            written = None
        if written != content:
            raise OSError(errno.EIO, "it has other content than was written", path)

    def _get(self, name: str, limit: int) -> bytes | None:
        """None: it is not there. Raises Damaged: it is longer than `limit` bytes; OSError."""
        path = self._path(name)
        try:
            answer = self._obstore.get(self._store, path)
            if answer.meta["size"] > limit:
                raise Damaged(f"{name} is longer than it was")
            return bytes(answer.bytes())
        except Damaged:
            raise
        except Exception as error:
            failure = self._failed(error, path)
            if isinstance(failure, FileNotFoundError) and _code(error) in ("", "NoSuchKey"):
                return None
            raise failure from None

    def _list(self, folder: str) -> list[tuple[str, int]]:
        """Names below this node's folder and their bytes, page after page. Raises OSError."""
        prefix = f"{self._prefix}/{folder}".rstrip("/")
        for left in reversed(range(TRIES)):  # obstore repeats the request only, not the answer that ends in the middle
            try:
                pages = list(self._obstore.list(self._store, prefix=prefix, chunk_size=PAGE))
                break
            except Exception as error:
                if not left or _code(error):
                    raise self._failed(error, prefix) from None
        start = len(f"{self._prefix}/")
        return [(entry["path"][start:], entry["size"]) for page in pages for entry in page]

    def _delete(self, names: Iterable[str]) -> None:
        """What is not there is no error. Raises OSError."""
        paths = [self._path(name) for name in names]
        try:
            for first in range(0, len(paths), PAGE):
                self._obstore.delete(self._store, paths[first : first + PAGE])
        except Exception as error:
            raise self._failed(error, paths[0]) from None

    def _failed(self, error: Exception, path: str) -> OSError:
        """In an operator's words, without anything of the credentials."""
        code, place = _code(error), f"{SCHEME}{self._bucket}/{path}"
        if code in MEANINGS:
            number = errno.ENOSPC if code in FULL else errno.EACCES if code in DENIED else errno.EIO
            return OSError(number, f"{MEANINGS[code]} ({code})", place)
        if isinstance(error, FileNotFoundError):
            return FileNotFoundError(errno.ENOENT, "it is not there", place)
        status = re.search(r"status code: (\d{3})", str(error))
        if status is not None and status[1] == "507":
            return OSError(errno.ENOSPC, "the store is full (status 507)", place)
        what = code or (f"status {status[1]}" if status is not None else str(error).partition("\n")[0])
        for secret in self._known.values():
            what = what.replace(secret, "…")
        return OSError(errno.EIO, f"the store does not answer as it should: {harmless(what, 300)}", place)


def _code(error: Exception) -> str:
    """What the store says of a failure; empty: nothing."""
    found = re.search(r"<Code>([A-Za-z0-9.]{1,64})</Code>", str(error))
    return "" if found is None else found[1]


def _piece_name(name: str) -> str:
    return f"objects/{name[:2]}/{name}"


def _manifest_name(checkpoint: str) -> str:
    return f"{checkpoint}.json"


def second_place(settings: Settings) -> SecondPlace | None:
    """The one that the settings name. Raises Invalid."""
    if not settings.checkpoint_mirror:
        return None
    if not settings.checkpoint_mirror.startswith(SCHEME):
        return Mirror(Path(settings.checkpoint_mirror), settings.node)
    return Bucket(
        settings.checkpoint_mirror, settings.node, endpoint=settings.checkpoint_mirror_endpoint,
        region=settings.checkpoint_mirror_region, credentials=settings.checkpoint_mirror_credentials,
    )  # fmt: skip
