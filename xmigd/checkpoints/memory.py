"""The first place of checkpoints: host memory. Pieces as they are, neither compressed nor on a disk, in a folder of a
tmpfs, where they survive the daemon, but not the machine.

`/dev/shm/xmig-UID-…/`: pieces by their hash, and a list of its pieces for each checkpoint that is here as a whole.
Invariants:

- A list follows the last of its pieces. What no list names, and nobody writes, is of no use and is removed.
- A checkpoint is removed to make room only when it is on the disk, the oldest first.
- The folder is ours alone: everybody may create one of that name in /dev/shm before us.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import tempfile
import threading
from collections.abc import Iterable
from io import FileIO
from pathlib import Path

from xmigd import log
from xmigd.checkpoints.planes import Bytes
from xmigd.host_memory import RESERVE, available_memory
from xmigd.store.objects import TEMPORARY

logger = log.get("memory_tier")

TMPFS = Path("/dev/shm")
LIST = ".list"


def default_folder(checkpoints: Path) -> Path:
    """Of the daemon that has its checkpoints in this folder."""
    digest = hashlib.sha256(os.fsencode(checkpoints.absolute())).hexdigest()
    return TMPFS / f"xmig-{os.geteuid()}-{digest[:16]}"


def read_into(file: FileIO, place: memoryview) -> int:
    """As many bytes as there are, at most those of the place; how many. Raises OSError."""
    done = 0
    while done < len(place) and (count := file.readinto(place[done:])):
        done += count
    return done


class Kept:
    """What one checkpoint that is being made has here. `whole`: all of it so far."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.whole = True


class MemoryTier:
    """Every thread may call it."""

    def __init__(self, folder: Path, *, limit: int) -> None:
        """`limit`: bytes; 0: nothing new is kept here, and what is here goes away once it is on the disk."""
        self.folder = folder
        self._limit = limit
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}  # of the pieces that are here
        self._used = 0  # bytes of these, and of what is being written
        self._lists: dict[str, frozenset[str]] = {}  # of whole checkpoints, the oldest first
        self._on_disk: set[str] = set()
        self._making: set[Kept] = set()

    def open(self, on_disk: dict[str, bool]) -> None:
        """What an earlier daemon has left of these checkpoints; the rest is removed. Raises OSError: the folder is not
        ours."""
        if not self.folder.exists():
            if self._limit:
                self.folder.mkdir(mode=0o700)
            return
        status = os.lstat(self.folder)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise OSError(errno.EPERM, "somebody else has made it, or may write there: remove it", str(self.folder))
        with self._lock:
            entries = sorted(self.folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
            self._sizes = {path.name: path.stat().st_size for path in entries if len(path.name) == 64}
            self._used = sum(self._sizes.values())
            for path in entries:
                if path.suffix == LIST and path.stem in on_disk:
                    with contextlib.suppress(OSError, ValueError):
                        names = frozenset(json.loads(path.read_bytes()))
                        if names <= self._sizes.keys():
                            self._lists[path.stem] = names
                            if on_disk[path.stem]:
                                self._on_disk.add(path.stem)
                            continue
                if path.suffix in (LIST, TEMPORARY):
                    path.unlink(missing_ok=True)
            self._sweep()
        self._make_room(0)

    def has(self, checkpoint: str) -> bool:
        return checkpoint in self._lists

    def get(self, name: str, size: int) -> bytes | None:
        """The piece of this hash; None: it is not here, or damaged."""
        found = self.read(name, size, bytearray(size + 1)) if name in self._sizes else None
        return None if found is None else bytes(found)

    def read(self, name: str, size: int, buffer: bytearray) -> memoryview | None:
        """The same, in a buffer that has room for a byte more."""
        if name not in self._sizes:
            return None
        place = memoryview(buffer)[: size + 1]
        try:
            with open(self.folder / name, "rb", buffering=0) as file:
                content = place[: read_into(file, place)]
        except OSError:
            return None
        return content if hashlib.sha256(content).hexdigest() == name else None

    # --- for who makes one --------------------------------------------------------------------------------------------

    def begin(self) -> Kept | None:
        """None: nothing is kept here."""
        if not self._limit or not self.folder.is_dir():
            return None
        kept = Kept()
        with self._lock:
            self._making.add(kept)
        return kept

    def keep(self, kept: Kept, name: str, content: Bytes) -> bool:
        """False: there is no room, and the checkpoint will not be whole here."""
        if not kept.whole:
            return False
        with self._lock:
            kept.names.add(name)
            if name in self._sizes:
                return True
        if available_memory() - RESERVE < len(content) or not self._make_room(len(content)):
            kept.whole = False
            return False
        try:
            number, temporary = tempfile.mkstemp(suffix=TEMPORARY, dir=self.folder)
            try:
                with open(number, "wb", buffering=0) as file:
                    view = memoryview(content)
                    while view:
                        view = view[file.write(view) :]
                os.rename(temporary, self.folder / name)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
        except OSError as error:
            logger.warning("a checkpoint does not go to host memory", why=error.strerror)
            kept.whole = False
            with self._lock:
                self._used -= len(content)
            return False
        with self._lock:
            if name in self._sizes:  # another thread was faster
                self._used -= len(content)
            self._sizes[name] = len(content)
        return True

    def adopt(self, kept: Kept, names: set[str]) -> bool:
        """These are the checkpoint's, too. False: not all of them are here."""
        with self._lock:
            if not names <= self._sizes.keys():
                return False
            kept.names |= names
            return True

    def sizes(self, kept: Kept) -> dict[str, int]:
        """Of its pieces that are here."""
        with self._lock:
            return {name: self._sizes[name] for name in kept.names if name in self._sizes}

    def finish(self, kept: Kept, checkpoint: str, names: Iterable[str], *, on_disk: bool) -> bool:
        """Is it here as a whole? From now on it is kept as one, and otherwise not at all."""
        wanted = frozenset(names)
        with self._lock:
            self._making.discard(kept)
            whole = kept.whole and wanted <= self._sizes.keys()
            if whole:
                try:
                    path = self.folder / f"{checkpoint}{LIST}"
                    temporary = path.with_suffix(TEMPORARY)
                    temporary.write_text(json.dumps(sorted(wanted)))
                    temporary.rename(path)
                    self._lists[checkpoint] = wanted
                    if on_disk:
                        self._on_disk.add(checkpoint)
                except OSError:
                    whole = False
            self._sweep()
        return whole

    def give_up(self, kept: Kept) -> None:
        """It may be called after `finish`."""
        with self._lock:
            if kept in self._making:
                self._making.discard(kept)
                self._sweep()

    # --- for what is here ---------------------------------------------------------------------------------------------

    def is_on_disk(self, checkpoint: str) -> None:
        with self._lock:
            if checkpoint in self._lists:
                self._on_disk.add(checkpoint)
        self._make_room(0)

    def remove(self, checkpoint: str) -> None:
        with self._lock:
            self._drop(checkpoint)
            self._sweep()

    def _make_room(self, needed: int) -> bool:
        """It is taken then."""
        with self._lock:
            while self._used + needed > self._limit:
                oldest = next((each for each in self._lists if each in self._on_disk), None)
                if oldest is None:
                    return False
                self._drop(oldest)
                self._sweep()
            self._used += needed
            return True

    def _drop(self, checkpoint: str) -> None:
        (self.folder / f"{checkpoint}{LIST}").unlink(missing_ok=True)
        self._lists.pop(checkpoint, None)
        self._on_disk.discard(checkpoint)

    def _sweep(self) -> None:
        needed: set[str] = set().union(*self._lists.values(), *(kept.names for kept in self._making))
        for name in self._sizes.keys() - needed:
            (self.folder / name).unlink(missing_ok=True)
            self._used -= self._sizes.pop(name)
