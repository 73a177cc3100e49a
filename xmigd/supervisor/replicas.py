"""Compares what the ranks of a group hold, as their snapshots of one round say (xmigd.groups.replicas).

Reading and comparing is a thread's, one group's at a time. Snapshot files are written by servers that belong to users:
everything in them is checked (xmigd.store.memory), and what has been overwritten meanwhile is looked at in a later
round.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from xmigd import log
from xmigd.groups.replicas import MOST_CHUNKS, Content, Replicas, Seen
from xmigd.ipc.fds import Fd, close_all
from xmigd.store.memory import Unreadable, read_chunks
from xmigd.supervisor.process import Process

logger = log.get("replicas")

SHARE = 0.02  # of a core, that comparisons may take
MOST = 1 << 20  # addresses, of all groups; a group that would exceed that is not watched
MOST_RESTORED = 256  # chunks, in one recovery: one message names them
MOST_ROUNDS = 8  # of a process, whose figures are remembered


@dataclass(frozen=True, slots=True)
class Compared:
    """At a round."""

    round: int
    at: int  # ns
    snapshots: Mapping[str, int]  # by process
    seen: Seen


@dataclass(slots=True)
class _Work:
    """Records that a process has executed which change memory, over all of its servers: each goes on from the round
    that was decided last."""

    server: int = -1
    before: int | None = 0  # that server; None: not known
    decided: int | None = 0
    at: dict[int, int | None] = field(default_factory=dict)  # by round

    def stopped(self, server: int, round: int, work: int | None) -> None:
        if server != self.server:
            self.server, self.before = server, self.decided
        self.at[round] = None if work is None or self.before is None else self.before + work
        if len(self.at) > MOST_ROUNDS:
            del self.at[next(iter(self.at))]

    def takes(self, round: int) -> None:
        self.decided = self.at.get(round)


@dataclass(slots=True, eq=False)
class _Group:
    replicas: Replicas
    not_before: float = 0.0


class Comparisons:
    """Of all groups."""

    def __init__(self, interval: float, found: Callable[[Compared, Sequence[str]], None]) -> None:
        """`interval`: seconds between two of a group; 0: none. `found` is called after each, with the members."""
        self._interval = interval
        self._found = found
        self._groups: dict[frozenset[str], _Group] = {}
        self._work: dict[str, _Work] = {}
        self._same: dict[int, bool] = {}  # rounds: do all stand at the same place?
        self._task: asyncio.Task[None] | None = None

    # --- what happens ------------------------------------------------------------------------------------------------

    def stopped(self, process: str, server: int, round: int, work: int | None) -> None:
        self._work.setdefault(process, _Work()).stopped(server, round, work)

    def holds(self, round: int, same_place: bool) -> None:
        self._same[round] = same_place
        while len(self._same) > 1024:
            del self._same[next(iter(self._same))]

    def takes(self, process: str, round: int) -> None:
        self._work.setdefault(process, _Work()).takes(round)

    def gone(self, process: str) -> None:
        self._work.pop(process, None)
        self._groups = {members: group for members, group in self._groups.items() if process not in members}

    def watched(self, process: str) -> list[int]:
        """Addresses at which its memory is compared with what others hold."""
        for members, group in self._groups.items():
            if process in members:
                return group.replicas.watched(process)
        return []

    def settled(self, members: Sequence[Process]) -> None:
        """All have the snapshots of a round. It is compared if it is time to."""
        rounds = {0 if one.last_snapshot is None else one.last_snapshot.round for one in members}
        if self._interval == 0 or len(members) < 2 or len(rounds) != 1 or not self._same.get(round := rounds.pop()):
            return
        group = self._group(members)
        if self._task is not None or time.monotonic() < group.not_before:
            return
        names = group.replicas.members
        by_name = {one.row.id: one for one in members}
        snapshots = {one.row.id: one.last_snapshot.number for one in members if one.last_snapshot is not None}
        work = [self._work[name].at.get(round) if name in self._work else None for name in names]
        if (files := _files([by_name[name] for name in names])) is not None:
            self._task = asyncio.get_running_loop().create_task(self._compare(group, round, snapshots, files, work))

    def _group(self, members: Iterable[Process]) -> _Group:
        names = frozenset(one.row.id for one in members)
        if names not in self._groups:
            self._groups = {others: group for others, group in self._groups.items() if not names & others}
            self._groups[names] = _Group(Replicas(sorted(names)))
        return self._groups[names]

    def right(self, process: Process, equal: Sequence[Process], addresses: Sequence[int]) -> dict[int, int]:
        """By address, the hash of what `equal` hold, all of them the same, and this process does not: at the round of
        which all have the snapshot."""
        members = [process, *equal]
        rounds = {0 if one.last_snapshot is None else one.last_snapshot.round for one in members}
        if not equal or len(rounds) != 1 or not self._same.get(rounds.pop()) or (files := _files(members)) is None:
            return {}
        try:
            tables = []
            for (first, second), one in zip(files, members, strict=True):
                number = 0 if one.last_snapshot is None else one.last_snapshot.number
                found = read_chunks((first.fileno(), second.fileno()), number, MOST_CHUNKS)
                tables.append(dict(zip(found.addresses, found.hashes, strict=True)))
        except (Unreadable, OSError) as error:
            logger.warning("what replicas hold cannot be read", why=str(error))
            return {}
        finally:
            close_all([fd for pair in files for fd in pair])
        mine, *others = tables
        found_right = {}
        for address in addresses[:MOST_RESTORED]:
            held = {table.get(address) for table in others}
            if len(held) == 1 and (right := held.pop()) is not None and mine.get(address, right) != right:
                found_right[address] = right
        return found_right

    # --- what is done ------------------------------------------------------------------------------------------------

    async def _compare(
        self, group: _Group, round: int, snapshots: Mapping[str, int], files: list[tuple[Fd, Fd]],
        work: list[int | None],
    ) -> None:  # fmt: skip
        replicas = group.replicas
        room = MOST - sum(len(other.replicas) for other in self._groups.values() if other is not group)
        try:
            numbers = [snapshots[name] for name in replicas.members]
            looking = asyncio.to_thread(_look, replicas, files, numbers, work, room)
            seen, cost = await looking
        except Unreadable as error:
            logger.debug("ranks are not compared", round=round, why=str(error))
            return
        except OSError as error:
            logger.warning("ranks cannot be compared", round=round, why=error.strerror)
            return
        finally:
            self._task = None
        # Who is suspected is looked at again at the next round, so that a program has no time to make it so.
        pause = 0.0 if seen.suspected else self._interval
        group.not_before = time.monotonic() + max(pause, cost / SHARE)
        self._found(Compared(round, time.monotonic_ns(), snapshots, seen), replicas.members)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()


def _files(members: Iterable[Process]) -> list[tuple[Fd, Fd]] | None:
    """Of snapshots, as long as they are read."""
    taken: list[Fd] = []
    try:
        for one in members:
            if one.memory is None:
                close_all(taken)
                return None
            for fd in (one.memory.snapshot0, one.memory.snapshot1):
                taken.append(Fd(os.dup(fd.fileno())))
    except OSError as error:
        close_all(taken)
        logger.warning("ranks cannot be compared", why=error.strerror)
        return None
    return list(zip(taken[0::2], taken[1::2], strict=True))


def _look(
    replicas: Replicas, files: list[tuple[Fd, Fd]], numbers: list[int], work: list[int | None], room: int
) -> tuple[Seen, float]:
    """And the seconds of a core that it took. Raises Unreadable, OSError."""
    began = time.thread_time()
    try:
        contents = []
        for (first, second), number, done in zip(files, numbers, work, strict=True):
            one = read_chunks((first.fileno(), second.fileno()), number, MOST_CHUNKS)
            contents.append(Content(one.addresses, one.hashes, one.zeros, one.live, done))
        if max(len(one.addresses) for one in contents) > room:
            raise Unreadable("there are too many chunks to remember")
        return replicas.look(contents), time.thread_time() - began
    finally:
        close_all([fd for pair in files for fd in pair])
