"""The first place of checkpoints: host memory. Pieces as they are, neither compressed nor on a disk, in a folder of a
tmpfs, where they survive the daemon, but not the machine.

`/dev/shm/xmig-UID-…/`: slabs, which are copies of device memory as their servers have made them; pieces by their hash,
of everything else; and a list for each checkpoint that is here as a whole. Invariants:

- A list follows the last of its pieces. What no list names, and nobody writes, is of no use and is removed.
- A checkpoint is removed to make room only when it is on the disk, the oldest first.
- The folder is ours alone: everybody may create one of that name in /dev/shm before us.
- A slab is hashed once nobody has it open for writing, and nobody but us can open it: it never changes.
- A slab as a whole is only for programs of the user whose process it was copied of. Others get single pieces.
- No checkpoint needs a slab of another user. The kernel may hold pages of it for whoever filled it (io_uring, a
  device), and a lease does not see that: who writes through such damages checkpoints of their own only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

from xmigd import log
from xmigd.checkpoints.planes import Bytes
from xmigd.host_memory import RESERVE, available_memory
from xmigd.ids import new_id
from xmigd.ipc.fds import Fd
from xmigd.store.objects import TEMPORARY

logger = log.get("memory_tier")

TMPFS = Path("/dev/shm")
PERIOD = 5.0  # seconds between two looks at whether others need the host's memory
LIST, SLAB, PLACES = ".list", ".slab", ".places"


def default_folder(checkpoints: Path) -> Path:
    """Of the daemon that has its checkpoints in this folder."""
    digest = hashlib.sha256(os.fsencode(checkpoints.absolute())).hexdigest()
    return TMPFS / f"xmig-{os.geteuid()}-{digest[:16]}"


def check_own(folder: Path) -> None:
    """Raises OSError: it is not ours alone."""
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise OSError(errno.EPERM, "somebody else has made it, or may write there: remove it", str(folder))


def read_into(file: FileIO, place: memoryview) -> int:
    """As many bytes as there are, at most those of the place; how many. Raises OSError."""
    done = 0
    while done < len(place) and (count := file.readinto(place[done:])):
        done += count
    return done


@dataclass(eq=False, slots=True)
class Slab:
    """`owner`: user of its process; None: no program gets it as a whole. `places`: hash and bytes of each piece, by
    where it begins; the rest is zero. `names`: their hashes."""

    name: str
    owner: int | None
    bytes: int  # of memory that it takes
    places: dict[int, tuple[str, int]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Whole:
    """What a checkpoint has here."""

    names: frozenset[str]
    slabs: frozenset[Slab]


class Kept:
    """What one checkpoint that is being made has here, of programs of `owner`. `whole`: all of it so far."""

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self.names: set[str] = set()
        self.own: list[Slab] = []
        self.slabs: set[Slab] = set()  # its own, and those of others that it needs
        self.whole = True

    def may_need(self, slab: Slab) -> bool:
        """Nobody else has filled it."""
        return slab.owner is None or slab.owner == self.owner

    def preferred(self) -> list[Slab]:
        """Its own before those of others, which may go then; copies of devices before files of CRIU's."""
        return [*self.own, *sorted(self.slabs.difference(self.own), key=lambda slab: slab.owner is None)]


class MemoryTier:
    """Every thread may call it."""

    def __init__(self, folder: Path, *, limit: int) -> None:
        """`limit`: bytes; 0: nothing new is kept here, and what is here goes away once it is on the disk."""
        self.folder = folder
        self._limit = limit
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}  # of the pieces that have a file of their own
        self._slabs: dict[str, Slab] = {}
        self._places: dict[str, list[tuple[Slab, int]]] = {}  # of pieces in slabs
        self._used = 0  # bytes of all, and of what is being written
        self._lists: dict[str, Whole] = {}  # of whole checkpoints, the oldest first
        self._on_disk: set[str] = set()
        self._making: set[Kept] = set()
        self._open = False
        self.damaged = 0  # slabs that were found to be not what they were, since the start
        self.period = PERIOD if limit else None

    def open(self, on_disk: dict[str, bool], before: Path | None = None) -> None:
        """What an earlier daemon has left of these checkpoints; the rest is removed. `before`: its folder, if it had
        another one: what is there comes here, if it is ours. Raises OSError: this one is not, or has no room."""
        if before is not None and before.exists() and not self._is(before):
            self._take_over(before)
        if not self.folder.exists():
            if self._limit:
                self.folder.mkdir(mode=0o700)
                self._open = True
            return
        check_own(self.folder)
        with self._lock:
            entries = sorted(self.folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
            self._sizes = {path.name: path.stat().st_size for path in entries if len(path.name) == 64}
            for path in entries:
                if path.suffix == PLACES:
                    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                        self._know(_read_slab(path))
            self._used = sum(self._sizes.values()) + sum(slab.bytes for slab in self._slabs.values())
            for path in entries:
                if path.suffix == LIST and path.stem in on_disk:
                    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                        listed = json.loads(path.read_bytes())
                        slabs = frozenset(self._slabs[name] for name in listed["slabs"])
                        whole = Whole(frozenset(listed["pieces"]), slabs)
                        if all(self._is_here(name) for name in whole.names):
                            self._lists[path.stem] = whole
                            if on_disk[path.stem]:
                                self._on_disk.add(path.stem)
                            continue
                if path.suffix in (LIST, TEMPORARY) or (path.suffix in (SLAB, PLACES) and path.stem not in self._slabs):
                    path.unlink(missing_ok=True)
            self._sweep()
        self._open = True
        self._make_room(0)

    def _take_over(self, before: Path) -> None:
        try:
            check_own(before)
        except OSError as error:
            logger.warning("checkpoints stay in the folder of before", before=str(before), why=error.strerror)
            return
        self.folder.mkdir(mode=0o700, exist_ok=True)
        check_own(self.folder)
        logger.info("checkpoints come from the folder of before", before=str(before), folder=str(self.folder))
        _bring(before, self.folder)

    def _is(self, folder: Path) -> bool:
        return self.folder.exists() and self.folder.samefile(folder)

    @property
    def used(self) -> bool:
        """Is something new kept here?"""
        return self._open and self._limit > 0

    def has(self, checkpoint: str) -> bool:
        return checkpoint in self._lists

    def get(self, name: str, size: int) -> bytes | None:
        """The piece of this hash; None: it is not here, or damaged."""
        found = self.read(name, size, bytearray(size + 1)) if self._is_here(name) else None
        return None if found is None else bytes(found)

    def read(self, name: str, size: int, buffer: bytearray) -> memoryview | None:
        """The same, in a buffer that has room for a byte more."""
        with self._lock:
            # The newest slab first: if it is damaged, or is given up just now, another one may have it.
            places = [(self._path(slab), at, size) for slab, at in reversed(self._places.get(name, ()))]
            if name in self._sizes:
                places.insert(0, (self.folder / name, 0, size + 1))
        for path, at, most in places:
            place = memoryview(buffer)[:most]
            try:
                with open(path, "rb", buffering=0) as file:
                    file.seek(at)
                    content = place[: read_into(file, place)]
            except OSError:
                continue
            if hashlib.sha256(content).hexdigest() == name:
                return content
        return None

    def slabs_of(self, checkpoint: str, owner: int) -> list[tuple[Slab, Fd]]:
        """Of those that the checkpoint has, this user's, open for reading. Empty: it is not here. Raises OSError: no
        descriptors."""
        found: list[tuple[Slab, Fd]] = []
        with self._lock:
            whole = self._lists.get(checkpoint)
            for slab in sorted(whole.slabs if whole is not None else (), key=lambda slab: slab.name):
                if slab.owner == owner:
                    found.append((slab, Fd(os.open(self._path(slab), os.O_RDONLY | os.O_CLOEXEC))))
        return found

    def link(self, checkpoint: str, size: int, places: dict[int, tuple[str, int]], path: Path) -> bool:
        """A slab of the checkpoint that has these pieces and no others is a file of this name, too, which is only to be
        read. False: there is none, or it is in another file system."""
        with self._lock:
            whole = self._lists.get(checkpoint)
            for slab in whole.slabs if whole is not None else ():
                if slab.places == places and self._path(slab).stat().st_size == size:
                    with contextlib.suppress(OSError):
                        os.link(self._path(slab), path)
                        return True
        return False

    def place_for(self, needed: int, beside: int = 0) -> Path | None:
        """A folder for so many bytes that may stay here then; None: there is no room for them. `beside`: bytes that
        are written there meanwhile, for which others leave once they are to stay."""
        if not self.used or not self.folder.is_dir():
            return None
        about = os.statvfs(self.folder)
        free = min(about.f_bavail * about.f_frsize, available_memory()) - RESERVE
        with self._lock:
            fits = free >= needed + beside and self._used + needed <= self._limit
        return self.folder if fits else None

    # --- for who makes one --------------------------------------------------------------------------------------------

    def begin(self, owner: int) -> Kept | None:
        """None: nothing is kept here."""
        if not self.used or not self.folder.is_dir():
            return None
        kept = Kept(owner)
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
            if (slab := self._slab_with(name, kept)) is not None:
                kept.slabs.add(slab)
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

    def retain(self, kept: Kept, memory: Fd, owner: int | None) -> tuple[Fd, Slab | None]:
        """Memory that a server or CRIU has filled in a file of this folder's tmpfs stays as it is. It is closed, and
        another descriptor of it takes its place, for reading. None: it is another kind of memory, there is no room, or
        somebody may still write to it; then it is as any other. Raises OSError: no descriptors."""
        if not kept.whole or not self.holds(memory) or (owner is not None and not _is_as_given(memory)):
            return memory, None
        size = os.fstat(memory.fileno()).st_blocks * 512
        if not self._make_room(size):
            return memory, None
        slab = Slab(new_id(), owner, size)
        path, retained = self._path(slab), False
        try:
            os.fchmod(memory.fileno(), 0o600)
            _link(memory, path)
            readable = Fd(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            memory.close()
            retained = _nobody_writes(readable)
        finally:
            with self._lock:
                if retained:
                    self._slabs[slab.name] = slab
                    kept.slabs.add(slab)
                    kept.own.append(slab)
                else:
                    self._used -= size
            if not retained:
                path.unlink(missing_ok=True)
        return readable, slab if retained else None

    def note(self, kept: Kept, slab: Slab, at: int, name: str, size: int) -> None:
        """Its piece of this hash."""
        with self._lock:
            kept.names.add(name)
            slab.places[at] = (name, size)
            slab.names.add(name)
            self._places.setdefault(name, []).append((slab, at))

    def adopt(self, kept: Kept, names: set[str]) -> bool:
        """These are the checkpoint's, too. False: not all of them are here."""
        with self._lock:
            # As a rule they are what a checkpoint has; then nobody has to look at each of tens of thousands.
            ours = (one for one in reversed(self._lists.values()) if all(map(kept.may_need, one.slabs)))
            whole = next((one for one in ours if names <= one.names), None)
            slabs = self._slabs_for(names, kept) if whole is None else whole.slabs
            if slabs is None:
                return False
            kept.names |= names
            kept.slabs |= slabs
            return True

    def pieces(self, kept: Kept) -> dict[str, int]:
        """Those that it has here, with their bytes."""
        with self._lock:
            return {name: size for name in kept.names if (size := self._size(name)) is not None}

    def finish(self, kept: Kept, checkpoint: str, names: Iterable[str], *, on_disk: bool) -> bool:
        """Is it here as a whole? From now on it is kept as one, and otherwise not at all."""
        wanted = frozenset(names)
        with self._lock:
            self._making.discard(kept)
            slabs = self._slabs_for(wanted, kept) if kept.whole else None
            if slabs is not None:
                try:
                    for slab in kept.slabs | slabs:
                        path = self.folder / f"{slab.name}{PLACES}"
                        # Of a slab that another checkpoint is still hashing, that one knows more in the end.
                        if slab in kept.own or not path.exists():
                            _put(path, {"owner": slab.owner, "places": slab.places})
                    listed = {"pieces": sorted(wanted), "slabs": sorted(slab.name for slab in slabs)}
                    _put(self.folder / f"{checkpoint}{LIST}", listed)
                    self._lists[checkpoint] = Whole(wanted, frozenset(slabs))
                    if on_disk:
                        self._on_disk.add(checkpoint)
                except OSError:
                    slabs = None
            self._sweep()
        return slabs is not None

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

    def spare(self) -> int:
        """Bytes that `yield_room` can free at most."""
        with self._lock:
            stays: list[Whole | Kept] = [one for id, one in self._lists.items() if id not in self._on_disk]
            stays += self._making
            names: set[str] = set().union(*(one.names for one in stays))
            slabs: set[Slab] = set().union(*(one.slabs for one in stays))
            files = sum(size for name, size in self._sizes.items() if name not in names)
            return files + sum(slab.bytes for slab in self._slabs.values() if slab not in slabs)

    def yield_room(self, wanted: int) -> None:
        """Somebody else needs so many bytes of host memory: the oldest checkpoints go, of those that are on the disk.
        Blocks."""
        with self._lock:
            enough = self._used - wanted
            while self._used > enough:
                oldest = next((each for each in self._lists if each in self._on_disk), None)
                if oldest is None:
                    return
                logger.info("a checkpoint leaves host memory", checkpoint=oldest[:12], why="others need it")
                self._drop(oldest)
                self._sweep()

    def relieve(self) -> None:
        """So that the host has what everybody leaves to the others."""
        if self.used and (missing := RESERVE - available_memory()) > 0:
            self.yield_room(missing)

    def drop_damaged(self, checkpoint: str, slab: Slab) -> bool:
        """It is not what it was: what is on the disk leaves host memory with it. False: the checkpoint stays, for the
        disk has not all of it, or has left already."""
        with self._lock:
            if slab not in self._slabs.values():
                return False
            self.damaged += 1
            left = [id for id, whole in self._lists.items() if slab in whole.slabs and id in self._on_disk]
            for id in left:
                self._drop(id)
            self._sweep()
        logger.warning(
            "a copy in host memory is damaged", slab=slab.name[:12], checkpoint=checkpoint[:12],
            left=[id[:12] for id in left],
        )  # fmt: skip
        return checkpoint in left

    def _make_room(self, needed: int) -> bool:
        """It is taken then."""
        if needed > self._limit:  # nobody leaves for what does not fit
            return False
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
        users: list[Whole | Kept] = [*self._lists.values(), *self._making]
        names: set[str] = set().union(*(one.names for one in users))
        for name in self._sizes.keys() - names:
            (self.folder / name).unlink(missing_ok=True)
            self._used -= self._sizes.pop(name)
        slabs: set[Slab] = set().union(*(one.slabs for one in users))
        for slab in set(self._slabs.values()) - slabs:
            for suffix in (PLACES, SLAB):
                (self.folder / f"{slab.name}{suffix}").unlink(missing_ok=True)
            self._used -= slab.bytes
            del self._slabs[slab.name]
            for name, _ in slab.places.values():
                left = [(other, at) for other, at in self._places.get(name, ()) if other is not slab]
                if left:
                    self._places[name] = left
                else:
                    self._places.pop(name, None)

    # --- slabs --------------------------------------------------------------------------------------------------------

    def _path(self, slab: Slab) -> Path:
        return self.folder / f"{slab.name}{SLAB}"

    def _is_here(self, name: str) -> bool:
        return name in self._sizes or name in self._places

    def _size(self, name: str) -> int | None:
        if (size := self._sizes.get(name)) is not None:
            return size
        places = self._places.get(name)
        return None if not places else places[-1][0].places[places[-1][1]][1]

    def _slab_with(self, name: str, kept: Kept) -> Slab | None:
        """The newest that may be needed."""
        return next((slab for slab, _ in reversed(self._places.get(name, ())) if kept.may_need(slab)), None)

    def _slabs_for(self, names: Set[str], kept: Kept) -> set[Slab] | None:
        """Those that these need, if possible the first of the preferred ones. None: one of them is nowhere."""
        left = names - self._sizes.keys()
        used: set[Slab] = set()
        for slab in kept.preferred():
            if not slab.names.isdisjoint(left):
                left -= slab.names
                used.add(slab)
        while left:
            if (found := self._slab_with(next(iter(left)), kept)) is None:
                return None
            left -= found.names
            used.add(found)
        return used

    def _know(self, slab: Slab) -> None:
        self._slabs[slab.name] = slab
        for at, (name, _) in slab.places.items():
            self._places.setdefault(name, []).append((slab, at))

    def holds(self, memory: Fd) -> bool:
        """Is it a file of ours, where it can get a name in the folder?"""
        status, folder = os.fstat(memory.fileno()), os.stat(self.folder)
        private = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
        return private and status.st_dev == folder.st_dev


def _is_as_given(memory: Fd) -> bool:
    """Is it as we give it to servers: without a name, and open for both? Else a server could have us take a file of
    ours for its own."""
    flags = fcntl.fcntl(memory.fileno(), fcntl.F_GETFL)
    both = flags & os.O_ACCMODE == os.O_RDWR and not flags & os.O_PATH
    return both and os.fstat(memory.fileno()).st_nlink == 0


def _link(memory: Fd, path: Path) -> None:
    descriptors = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(f"{memory.fileno()}", path, src_dir_fd=descriptors, follow_symlinks=True)
    finally:
        os.close(descriptors)


def _nobody_writes(readable: Fd) -> bool:
    """The kernel gives a read lease of a file only if nobody has it open for writing, or mapped so."""
    try:
        for lease in (fcntl.F_RDLCK, fcntl.F_UNLCK):
            fcntl.fcntl(readable.fileno(), fcntl.F_SETLEASE, lease)
    except OSError:
        return False
    return True


def _bring(before: Path, folder: Path) -> None:
    """The oldest first, as `open` knows them by their age. Lists come last: one that is there names what is there.
    Raises OSError: there is no room; it is tried again at the next start."""
    files = sorted((path for path in before.iterdir() if path.is_file()), key=lambda path: path.stat().st_mtime_ns)
    for path in sorted(files, key=lambda path: (path.suffix == LIST, path.suffix == PLACES)):
        if path.suffix == TEMPORARY:
            path.unlink()
            continue
        with contextlib.suppress(OSError):
            path.rename(folder / path.name)
            continue
        temporary = folder / f"{path.name}{TEMPORARY}"
        try:
            shutil.copy2(path, temporary)
            temporary.rename(folder / path.name)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        path.unlink()
    with contextlib.suppress(OSError):  # CRIU may work there still (working.py)
        before.rmdir()


def _put(path: Path, document: object) -> None:
    temporary = path.with_suffix(TEMPORARY)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(json.dumps(document))  # `dump` encodes it in Python
    temporary.rename(path)


def _read_slab(path: Path) -> Slab:
    """Raises OSError, ValueError, TypeError, KeyError: it is none."""
    document = json.loads(path.read_bytes())
    size = path.with_suffix(SLAB).stat().st_blocks * 512
    places = {int(at): (str(name), int(size)) for at, (name, size) in document["places"].items()}
    owner = None if document["owner"] is None else int(document["owner"])
    return Slab(path.stem, owner, size, places, {name for name, _ in places.values()})
