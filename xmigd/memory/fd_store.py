"""Memory that outlives the daemon: copies of its descriptors in a descriptor store, which is the service manager's, or
a process of xMIG's own where there is no manager (descriptor_store.py).

A server that lives when the daemon has gone announces to the next one what it has. One that dies at the same moment
cannot; then the store has its memory, and the process is recovered from it instead of being lost.

The store takes a name of a few letters with each descriptor, because all names together come back in one environment
variable. What the descriptors are stands in the *index*, a memfd in the store itself: a line for each that was kept or
dropped, written before the manager is informed.

Memory may be used only if it is what the server had when it died. The server counts its changes in the journal's header
(`memory_changes`), the index counts those that the daemon has heard of. What it had not heard of is in the server's
backlog (backlog.py), which the store keeps, too. If something came or went that nobody has, the process is lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from xmigd import log
from xmigd.ipc import messages as m
from xmigd.ipc.fds import Fd, same_file
from xmigd.memory.backlog import Backlog
from xmigd.memory.descriptor_store import Store
from xmigd.memory.handles import MAX_HANDLES, Handle, JobMemory, make_handle
from xmigd.native import Layout

JOB_FDS = ("journal", "staging", "pinned", "snapshot0", "snapshot1")
QUOTA = "quota"  # and, of a job that has one
BACKLOG = "backlog"
INDEX = "index-"
COMPACT_ABOVE = 8 << 20  # bytes of index, most of which covers what is gone
LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"

logger = log.get("fd_store")


@dataclass(slots=True)
class Kept:
    """What the store has of one process."""

    memory: dict[str, str] = field(default_factory=dict)  # journal, ... -> key
    handles: dict[int, tuple[str, dict[str, Any]]] = field(default_factory=dict)  # id -> key, the server's message
    changes: int = 0  # of its handles, as far as the daemon has heard of them
    backlog: str = ""  # -> key; empty: its server has none

    def every_key(self) -> Iterator[str]:
        if self.backlog:
            yield self.backlog
        yield from self.memory.values()
        yield from (key for key, _ in self.handles.values())


@dataclass(frozen=True, slots=True)
class Left:
    """What an earlier daemon left of a process: everything that its server had."""

    memory: JobMemory
    handles: dict[int, Handle]


class FdStore:
    """Keeps descriptors in the store. Without one it does nothing."""

    def __init__(self, store: Store, layout: Layout) -> None:
        self._store = store
        self._layout = layout
        self._processes: dict[str, Kept] = {}
        self._passed: dict[str, Fd] = {}
        self._held: WeakValueDictionary[str, Fd] = WeakValueDictionary()  # what this daemon has of what the store has
        self._programs: WeakValueDictionary[str, Fd] = WeakValueDictionary()
        self._backlogs: dict[str, Backlog] = {}
        self._index: Fd | None = None
        self._generation = 0
        self._next_key = 0
        store.when_renewed(self._again)
        if store.present:
            self._take_over()

    # --- what servers have ------------------------------------------------------------------------------------------

    def watch(self, process: str, program: Fd) -> None:
        """`program`: its pidfd. What is kept of it is of no use when that has exited."""
        self._programs[process] = program
        self._store.watch(process, program)

    def all(self, process: str, memory: JobMemory, handles: Iterable[Handle], changes: int) -> None:
        """Everything that a process has, in the place of what was kept of it before, which counts until then."""
        if self._index is None:
            return
        before = self._processes.get(process, Kept())
        kept = Kept(changes=changes, backlog=before.backlog)
        for name, fd in zip((*JOB_FDS, QUOTA), memory.all, strict=False):
            kept.memory[name] = self._keep(process, fd, before.memory.get(name))
        for handle in handles:
            known, _ = before.handles.get(handle.id, (None, None))
            kept.handles[handle.id] = (self._keep(process, handle.fd, known), json.loads(handle.message))
        self._processes[process] = kept
        self._write(*self._lines(process, kept))
        for key in {*before.every_key()} - {*kept.every_key()}:
            self._drop(key)
        self._passed_on(process)

    def make_backlog(self) -> tuple[Backlog, Fd] | None:
        """For a server that is to get a process, with the end that it is given. None: there is no store, or no
        descriptor left; then what the daemon has not heard of when both die is lost."""
        if self._index is None:
            return None
        try:
            return Backlog.make()
        except OSError as error:
            logger.warning("a server gets no backlog", why=error.strerror)
            return None

    def follow(self, process: str, backlog: Backlog) -> None:
        """The process's server says its changes there from now on."""
        kept = self._processes.get(process)
        if self._index is None or kept is None:
            backlog.close()
            return
        before, kept.backlog = kept.backlog, self._new_key()
        self._write({"k": kept.backlog, "p": process, "what": BACKLOG})
        self._give(process, kept.backlog, backlog.fd)
        self._replace_backlog(process, backlog)
        if before:
            self._drop(before)

    def follow_kept(self, process: str) -> bool:
        """Its server goes on saying its changes into the backlog that an earlier daemon gave it. False: nobody kept
        that."""
        kept = self._processes.get(process)
        if kept is None or kept.backlog not in self._passed:
            return False
        self._replace_backlog(process, Backlog(self._copy(kept.backlog)))
        self._passed_on(process)
        return True

    def add(self, process: str, handle: Handle) -> str:
        """A server has handed over a piece of memory. Returns its key; empty: there is no store."""
        if self._index is None:
            return ""
        kept = self._processes.setdefault(process, Kept())
        kept.changes += 1
        key = self._new_key()
        message = json.loads(handle.message)
        kept.handles[handle.id] = (key, message)
        self._write({"k": key, "p": process, "memory": message})
        self._give(process, key, handle.fd)
        self._passed_on(process)
        return key

    def drop(self, process: str, handle: int) -> None:
        """A server has given up a piece of memory."""
        kept = self._processes.get(process)
        if kept is None:
            return
        kept.changes += 1
        entry: dict[str, Any] = {"p": process, "changes": kept.changes}
        if (found := kept.handles.pop(handle, None)) is not None:
            entry["gone"] = handle
        self._write(entry)
        if found is not None:
            self._drop(found[0])
        self._passed_on(process)

    def lost(self, process: str, handles: Iterable[int]) -> None:
        """Pieces of memory are gone with their device. No server has given them up: it is no change that one counts."""
        kept = self._processes.get(process)
        for handle in handles:
            if kept is not None and (found := kept.handles.pop(handle, None)) is not None:
                self._write({"p": process, "gone": handle})
                self._drop(found[0])

    def recount(self, process: str, changes: int) -> None:
        """From now on so many changes are known."""
        kept = self._processes.get(process)
        if kept is not None:
            kept.changes = changes
            self._write({"p": process, "changes": changes})

    def next_change(self, memory: JobMemory) -> int:
        """How many changes there will be once the next server has the process. The one before is dead, and was heard to
        its end."""
        return self._changes_in(memory.journal) + 1

    def forget(self, process: str) -> None:
        """It has ended, or its server has another account of what it has."""
        kept = self._processes.pop(process, None)
        self._replace_backlog(process, None)
        if kept is not None:
            self._write({"p": process, "ended": True})
            for key in kept.every_key():
                self._drop(key)
            self._compact()

    # --- what an earlier daemon left --------------------------------------------------------------------------------

    def forget_others(self, processes: set[str]) -> None:
        """Nobody will ask for any process but these."""
        for process in self._processes.keys() - processes:
            self.forget(process)
        known = {key for kept in self._processes.values() for key in kept.every_key()}
        for key in self._passed.keys() - known:
            self._drop(key)

    def server_of(self, process: str) -> int | None:
        """The pid of the server that had the process last, by its journal; 0: none. None: nothing is kept of it."""
        kept = self._processes.get(process)
        journal = None if kept is None else self._passed.get(kept.memory.get("journal", ""))
        return None if journal is None else self._word(journal, self._layout.server_pid_at, 4)

    def quota_of(self, process: str) -> Fd | None:
        """The page of its job's memory quota. It stays the store's."""
        kept = self._processes.get(process)
        return None if kept is None else self._passed.get(kept.memory.get(QUOTA, ""))

    def is_open_in(self, process: str, pid: int) -> bool:
        """Has that process the journal? A pid may have been given to another one since. If nobody may look, it has."""
        kept = self._processes.get(process)
        journal = None if kept is None else self._passed.get(kept.memory.get("journal", ""))
        if journal is None:
            return False
        wanted = os.fstat(journal.fileno())
        try:
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(entry.stat(), wanted):
                        return True
        except PermissionError:
            return True
        except FileNotFoundError:
            pass
        return False

    def left(self, process: str) -> Left | str:
        """What its server had, if the store has all of it; otherwise why it has not. Its server must be dead."""
        kept = self._processes.get(process)
        if kept is None or kept.memory.keys() - {QUOTA} != set(JOB_FDS):
            return "nobody kept its memory"
        has = self._changes_in(self._passed[kept.memory["journal"]]) if kept.memory["journal"] in self._passed else 0
        self._catch_up(process, kept, has)
        missing = [key for key in kept.every_key() if key not in self._passed and key != kept.backlog]
        if missing:
            return (
                f"{len(missing)} pieces of its memory were not kept (LimitNOFILE; with systemd: FileDescriptorStoreMax)"
            )
        # One more may be known than is counted: that a server was to take the process, which it did not live to do.
        if has not in (kept.changes, kept.changes - 1):
            return "its memory changed while no daemon was there, and nobody has what came"
        handles = {}
        for number, (key, fields) in kept.handles.items():
            handles[number] = make_handle(m.MemoryAdd.model_validate(fields), self._copy(key))
        names = [name for name in (*JOB_FDS, QUOTA) if name in kept.memory]
        return Left(JobMemory(*(self._copy(kept.memory[name]) for name in names)), handles)

    def _catch_up(self, process: str, kept: Kept, until: int) -> None:
        """What its server has reported, and no daemon has passed on. The index may have some of it, and the store
        not."""
        if kept.backlog not in self._passed:
            return
        backlog = Backlog(self._copy(kept.backlog))
        before = kept.changes
        for change, fds in backlog.take(until):
            if change.change <= kept.changes:
                key, _ = kept.handles.get(change.id, ("", {}))
                if isinstance(change, m.MemoryAdd) and key and key not in self._passed:
                    self._passed[key] = fds[0]
                    self._give(process, key, fds[0])
            elif change.change > kept.changes + 1:
                break
            elif isinstance(change, m.MemoryDrop):
                self.drop(process, change.id)
            elif change.id not in kept.handles and len(kept.handles) < MAX_HANDLES:
                self._passed[self.add(process, make_handle(change, fds[0]))] = fds[0]
        backlog.close()
        if kept.changes != before:
            logger.info("memory that no daemon had heard of", process=process[:12], changes=kept.changes - before)

    def settled(self) -> None:
        """No process of an earlier daemon is left to be queried about: what it left is in use, or of no use."""
        for fd in self._passed.values():
            fd.close()
        self._passed.clear()

    def _again(self) -> None:
        """The store was lost, and there is another one: it gets everything that this daemon has."""
        self._write_anew()
        for process, kept in self._processes.items():
            if (program := self._programs.get(process)) is not None and not program.closed:
                self._store.watch(process, program)
            for key in kept.every_key():
                if (fd := self._held.get(key)) is not None and not fd.closed:
                    self._store.keep(key, fd, process)

    # --- the index --------------------------------------------------------------------------------------------------

    def _take_over(self) -> None:
        indexes: list[tuple[int, Fd]] = []
        for name, fd in self._store.take_kept():
            if name.startswith(INDEX) and name[len(INDEX) :].isdecimal():
                indexes.append((int(name[len(INDEX) :]), fd))
            else:
                self._passed[name] = self._held[name] = fd
        for generation, fd in sorted(indexes, key=lambda index: index[0]):
            self._generation = generation
            self._read(fd)
        if indexes:
            logger.info("memory was kept", processes=len(self._processes), descriptors=len(self._passed))
        self._write_anew()
        for generation, _ in indexes:
            self._store.drop(f"{INDEX}{generation}")

    def _read(self, index: Fd) -> None:
        """An index that is newer than what was read before holds everything that counts."""
        size = os.fstat(index.fileno()).st_size
        lines = os.pread(index.fileno(), size, 0).split(b"\n")
        if b'{"complete":true}' not in lines:
            return  # the daemon died while it wrote it: the one before is still there
        self._processes.clear()
        for line in lines[:-1]:
            self._apply(json.loads(line))

    def _apply(self, entry: dict[str, Any]) -> None:
        if "next" in entry:
            self._next_key = entry["next"]
        if "k" in entry:
            self._next_key = max(self._next_key, int(entry["k"], 36) + 1)
        if "p" not in entry:
            return
        if "anew" in entry:
            self._processes[entry["p"]] = Kept()
        kept = self._processes.setdefault(entry["p"], Kept())
        if entry.get("what") == BACKLOG:
            kept.backlog = entry["k"]
        elif "what" in entry:
            kept.memory[entry["what"]] = entry["k"]
        elif "memory" in entry:
            kept.handles[entry["memory"]["id"]] = (entry["k"], entry["memory"])
            kept.changes += 1
        elif "ended" in entry:
            del self._processes[entry["p"]]
        if "changes" in entry:
            kept.changes = entry["changes"]
        if "gone" in entry:
            kept.handles.pop(entry["gone"], None)

    def _write_anew(self) -> None:
        self._generation += 1
        self._index = Fd(os.memfd_create("xmig-index", os.MFD_CLOEXEC))
        self._write({"next": self._next_key})
        for process, kept in self._processes.items():
            self._write(*self._lines(process, kept))
        self._write({"complete": True})
        self._store.keep(f"{INDEX}{self._generation}", self._index)

    @staticmethod
    def _lines(process: str, kept: Kept) -> Iterator[dict[str, Any]]:
        yield {"p": process, "anew": True}
        if kept.backlog:
            yield {"k": kept.backlog, "p": process, "what": BACKLOG}
        for what, key in kept.memory.items():
            yield {"k": key, "p": process, "what": what}
        for key, message in kept.handles.values():
            yield {"k": key, "p": process, "memory": message}
        yield {"p": process, "changes": kept.changes}

    def _write(self, *entries: dict[str, Any]) -> None:
        """All of them or none."""
        if self._index is None:
            return
        text = "".join(json.dumps(entry, separators=(",", ":")) + "\n" for entry in entries)
        try:
            os.write(self._index.fileno(), text.encode())
        except OSError as error:
            logger.error("memory is not kept any more", why=f"its index cannot be written: {error.strerror}")
            self._index = None

    def _compact(self) -> None:
        """Write the index anew when most of it covers what is gone."""
        if self._index is not None and os.fstat(self._index.fileno()).st_size > COMPACT_ABOVE:
            before = self._generation
            self._write_anew()
            self._store.drop(f"{INDEX}{before}")

    # --- small parts ------------------------------------------------------------------------------------------------

    def _keep(self, process: str, fd: Fd, known: str | None) -> str:
        """Its key: the one that it has already, or a new one. The manager keeps an open file once, under its first
        name: what comes again under a second one is gone when the first is dropped."""
        held = None if known is None else self._held.get(known)
        if known is not None and held is not None and not held.closed and same_file(held.fileno(), fd.fileno()):
            self._held[known] = fd
            return known
        key = self._new_key()
        self._give(process, key, fd)
        return key

    def _give(self, process: str, key: str, fd: Fd) -> None:
        self._held[key] = fd
        self._store.keep(key, fd, process)

    def _passed_on(self, process: str) -> None:
        """The store is sent everything that its server has reported; then the backlog need not have it."""

        def reported() -> None:
            kept, backlog = self._processes.get(process), self._backlogs.get(process)
            if kept is not None and backlog is not None:
                backlog.forget(kept.changes)

        if process in self._backlogs:
            self._store.when_reported(reported)

    def _replace_backlog(self, process: str, backlog: Backlog | None) -> None:
        if (before := self._backlogs.pop(process, None)) is not None:
            before.close()
        if backlog is not None:
            self._backlogs[process] = backlog

    def _new_key(self) -> str:
        number, key = self._next_key, ""
        self._next_key += 1
        while number or not key:
            number, digit = divmod(number, 36)
            key = LETTERS[digit] + key
        return key

    def _drop(self, key: str) -> None:
        self._store.drop(key)
        if (fd := self._passed.pop(key, None)) is not None:
            fd.close()

    def _copy(self, key: str) -> Fd:
        self._held[key] = copy = Fd(os.dup(self._passed[key].fileno()))
        return copy

    def _changes_in(self, journal: Fd) -> int:
        return self._word(journal, self._layout.memory_changes_at, 8)

    @staticmethod
    def _word(journal: Fd, at: int, size: int) -> int:
        data = os.pread(journal.fileno(), size, at)
        return int(struct.unpack("<Q" if size == 8 else "<I", data)[0]) if len(data) == size else 0
