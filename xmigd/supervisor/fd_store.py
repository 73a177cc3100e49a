"""Memory that outlives the daemon: copies of its descriptors in a descriptor store, which is the service manager's, or
a process of xMIG's own where there is no manager (descriptor_store.py).

A server that lives when the daemon has gone announces to the next one what it has. One that dies at the same moment
cannot; then the store has its memory, and the process is recovered from it instead of being lost.

The store takes a name of a few letters with each descriptor, because all names together come back in one environment
variable. What the descriptors are stands in the *index*, a memfd in the store itself: a line for each that was kept or
dropped, written before the manager is told.

Memory may be used only if it is what the server had when it died. The server counts its changes in the journal's header
(`memory_changes`), the index counts those that the daemon has heard of; if they differ, something came or went that
nobody has, and the process is lost.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from xmigd import log
from xmigd.native import Layout
from xmigd.supervisor import messages as m
from xmigd.supervisor.descriptor_store import Store
from xmigd.supervisor.fds import Fd, Handle, JobMemory, same_file
from xmigd.supervisor.moving import make_handle

JOB_FDS = ("journal", "staging", "pinned", "cut0", "cut1")
INDEX = "index-"
COMPACT_ABOVE = 8 << 20  # bytes of index, most of which speaks of what is gone
LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"

logger = log.get("fd_store")


@dataclass(slots=True)
class Kept:
    """What the store has of one process."""

    memory: dict[str, str] = field(default_factory=dict)  # journal, ... -> key
    handles: dict[int, tuple[str, dict[str, Any]]] = field(default_factory=dict)  # id -> key, the server's message
    changes: int = 0  # of its handles, as far as the daemon has heard of them

    def every_key(self) -> Iterator[str]:
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
        self._index: Fd | None = None
        self._generation = 0
        self._next_key = 0
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
        before, kept = self._processes.get(process, Kept()), Kept(changes=changes)
        for name, fd in zip(JOB_FDS, memory.all, strict=True):
            kept.memory[name] = self._keep(process, fd, before.memory.get(name))
        for handle in handles:
            known, _ = before.handles.get(handle.id, (None, None))
            kept.handles[handle.id] = (self._keep(process, handle.fd, known), json.loads(handle.message))
        self._processes[process] = kept
        self._write(*self._lines(process, kept))
        for key in {*before.every_key()} - {*kept.every_key()}:
            self._drop(key)

    def add(self, process: str, handle: Handle) -> None:
        """A server has handed over a piece of memory."""
        if self._index is None:
            return
        kept = self._processes.setdefault(process, Kept())
        kept.changes += 1
        key = self._new_key()
        message = json.loads(handle.message)
        kept.handles[handle.id] = (key, message)
        self._write({"k": key, "p": process, "memory": message})
        self._give(process, key, handle.fd)

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

    def left(self, process: str) -> Left | str:
        """What its server had, if the store has all of it; otherwise why it has not. Its server must be dead."""
        kept = self._processes.get(process)
        if kept is None or kept.memory.keys() != set(JOB_FDS):
            return "nobody kept its memory"
        missing = [key for key in kept.every_key() if key not in self._passed]
        if missing:
            return (
                f"{len(missing)} pieces of its memory were not kept (LimitNOFILE; with systemd: FileDescriptorStoreMax)"
            )
        has = self._changes_in(self._passed[kept.memory["journal"]])
        if has != kept.changes:
            return "its memory changed while no daemon was there, and nobody has what came"
        handles = {}
        for number, (key, fields) in kept.handles.items():
            handles[number] = make_handle(m.MemoryAdd.model_validate(fields), self._copy(key))
        return Left(JobMemory(*(self._copy(kept.memory[name]) for name in JOB_FDS)), handles)

    def settled(self) -> None:
        """No process of an earlier daemon is left to be asked about: what it left is in use, or of no use."""
        for fd in self._passed.values():
            fd.close()
        self._passed.clear()

    def again(self) -> None:
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
        if "what" in entry:
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
        """Write the index anew when most of it speaks of what is gone."""
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
