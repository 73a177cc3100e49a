"""What only one device of a group has goes to host memory, after each round (docs/decisions/0048 and 0081): of its own
node, and, of jobs of several nodes, of the next one.

Nothing waits for it. What is known of other nodes, they say: which of some hashes their ranks have at this round. A
round is looked at until its end, and then the newest; a newer one ends what is being sent of an earlier one. What the
neighbour has already is not sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from array import array
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from xmigd import log
from xmigd.devices.names import devices_of
from xmigd.errors import Unavailable, XmigError
from xmigd.ipc import messages as m
from xmigd.ipc.fds import Fd, close_all, sealed_memory, write_all
from xmigd.records import JobRow
from xmigd.store.memory import Unreadable, read_chunks
from xmigd.supervisor.process import Process
from xmigd.supervisor.state import NeighbourCopy

MOST_CHUNKS = 1 << 19  # 1 TiB: of a node, and of a process
AGAIN, MOST_AGAIN = 0.1, 5.0  # seconds, until what does not work now is tried again: at first, and at most
UNANSWERED = 5.0  # seconds, after which a round is looked at again if a server has reported no copies of it
ANSWERS_WITHIN = 3.0  # seconds; what a node does not say until then is taken for unique

logger = log.get("replicas")


class Others(Protocol):
    """Daemons of other nodes. Each raises Unavailable: not now; XmigError."""

    async def held(self, node: str, nodes: str, round: int, hashes: Sequence[int]) -> bytes:
        """For each, 1 if a rank there has it in its snapshot of this round."""
        ...

    async def retain(self, node: str, nodes: str, process: str, hashes: Sequence[int]) -> bytes:
        """Of a process of this node these chunks are to be kept, and no others. For each, 1 if it is to be sent."""
        ...

    async def send_content(self, node: str, nodes: str, process: str, hashes: Sequence[int], memory: Fd) -> None:
        """Content of these, one behind the other in `memory`."""
        ...


class Budget:
    """So many bytes a second: in any time that many, and one piece."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free = 0.0

    def wait(self, size: int, now: float) -> float:
        """Seconds, until a piece of this size may be sent."""
        begins = max(self._free, now)
        self._free = begins + size / self._rate
        return begins - now


def after(node: str, nodes: str) -> list[str]:
    """The other nodes of a job, the next one first."""
    names = nodes.split(",")
    if node not in names:
        return []
    at = names.index(node)
    return names[at + 1 :] + names[:at]


Table = dict[int, int]  # of a snapshot, addresses by hash


@dataclass(slots=True, eq=False)
class _Sending:
    """Of one process, to its neighbour."""

    due: tuple[int, Table] | None = None  # a snapshot, and what of it is unique
    last: tuple[int, Table] | None = None  # the newest that was due
    task: asyncio.Task[None] | None = None


class UniqueCopies:
    """Of this node's processes."""

    def __init__(self, node: str, processes: Mapping[str, Process], *, most_bytes: int, rate: float) -> None:
        """`most_bytes`: of host memory here, for all. `rate`: bytes a second to neighbours; 0: nothing is sent."""
        self.others: Others | None = None  # None: these are not reached yet
        self._node = node
        self._processes = processes
        self._most = most_bytes
        self._rate = rate
        self._budget = Budget(rate) if rate else None
        self._at_once = max(1, min(m.CHUNKS_AT_ONCE, int(rate) // m.CHUNK))
        self._looking: dict[str, asyncio.Task[None]] = {}  # by the first member
        self._to_look_at: dict[str, tuple[str, Sequence[Process]]] = {}  # by the same: nodes, members
        self._repeating: dict[str, asyncio.TimerHandle] = {}  # by the same
        self._sending: dict[str, _Sending] = {}
        # By nodes: snapshots of a round, by process, and what ranks here have in them.
        self._held: dict[str, tuple[dict[str, int], frozenset[int]]] = {}
        self._reading = asyncio.Lock()  # what is in _held: once, whoever asks
        self._farewells: set[asyncio.Task[None]] = set()

    def neighbour_of(self, job: JobRow) -> NeighbourCopy | None:
        """None: nothing of it is sent anywhere."""
        others = after(self._node, job.nodes or "")
        return NeighbourCopy(others[0]) if others and self._rate else None

    # --- what happens ------------------------------------------------------------------------------------------------

    def settled(self, members: Sequence[Process]) -> None:
        """Of a group on this node alone: all have the snapshots of a round."""
        if self._most:
            for process in members:
                process.copy_unique(_apart(process, members), self._share(), None)

    def settled_here(self, nodes: str, members: Sequence[Process]) -> None:
        """The same, of a group on these nodes: `members` are here."""
        if not members or not (self._most or self._rate):
            return
        members = sorted(members, key=lambda one: one.row.id)
        key = members[0].row.id
        if (repeating := self._repeating.pop(key, None)) is not None:
            repeating.cancel()
        self._to_look_at[key] = nodes, members
        if key not in self._looking:
            self._looking[key] = asyncio.get_running_loop().create_task(self._look_at_all(key))

    def finished(self, process: Process) -> None:
        """Its neighbour forgets what it retains, now if it is in reach, or with the end of its own ranks."""
        sending = self._sending.pop(process.row.id, None)
        if sending is not None and sending.task is not None:
            sending.task.cancel()
        if process.neighbour_copy is None:
            return  # nor has an earlier daemon sent anything
        task = asyncio.get_running_loop().create_task(self._forget(process))
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)

    def close(self) -> None:
        for timer in self._repeating.values():
            timer.cancel()
        for task in [*self._looking.values(), *self._farewells]:
            task.cancel()
        for sending in self._sending.values():
            if sending.task is not None:
                sending.task.cancel()

    def session(self, peer: str) -> None:
        """Its daemon was started, or this one: it has lost what it retained, and gets it again."""
        for process, copy in self._copies_at(peer):
            copy.snapshot = copy.bytes = 0
            sending = self._sending.get(process.row.id)
            if sending is not None and sending.last is not None:
                copy.behind_bytes = len(sending.last[1]) * m.CHUNK
                sending.due = sending.last
                self._begin(process, copy, sending)

    def reaches(self, peer: str, reached: bool) -> None:
        """Whether there is a connection with its daemon: what it retains cannot be had without."""
        for _, copy in self._copies_at(peer):
            copy.reached = reached

    def _copies_at(self, peer: str) -> Iterator[tuple[Process, NeighbourCopy]]:
        for process in list(self._processes.values()):
            if (copy := process.neighbour_copy) is not None and copy.node == peer:
                yield process, copy

    async def held(self, nodes: str, round: int) -> frozenset[int]:
        """For another node: what ranks here have in their snapshots of this round. Raises Unavailable."""
        async with self._reading:
            members = [one for one in self._processes.values() if one.job.nodes == nodes]
            at_it = [one for one in members if one.last_snapshot is not None and one.at_round == round]
            if not at_it:
                return frozenset()
            snapshots = {one.row.id: one.last_snapshot.number for one in at_it if one.last_snapshot is not None}
            known, hashes = self._held.get(nodes, ({}, frozenset()))
            if known == snapshots:
                return hashes
            try:
                tables = await _tables(at_it)
            except (Unreadable, OSError) as error:
                raise Unavailable(f"a snapshot cannot be read: {error}") from None
            hashes = await asyncio.to_thread(frozenset[int]().union, *tables)
            self._held[nodes] = snapshots, hashes
            return hashes

    def forget(self, nodes: str) -> None:
        """There are no processes of such jobs here any more."""
        self._held.pop(nodes, None)

    # --- what of a round is unique -----------------------------------------------------------------------------------

    async def _look_at_all(self, key: str) -> None:
        """One after the other, or a group with many rounds would never be looked at; the newest comes next."""
        try:
            while (due := self._to_look_at.pop(key, None)) is not None:
                await self._look(*due)
                if key not in self._to_look_at:
                    again = asyncio.get_running_loop().call_later(UNANSWERED, self._look_again, key, *due)
                    self._repeating[key] = again
        finally:
            del self._looking[key]  # at once: what comes next begins anew

    def _look_again(self, key: str, nodes: str, members: Sequence[Process]) -> None:
        """A server may not have been able to copy when it was requested to, or a snapshot could not be read."""
        del self._repeating[key]
        members = [one for one in members if one.row.id in self._processes and one.grouped]
        if any(one.last_snapshot is not None and not _answered(one, one.last_snapshot.number) for one in members):
            self.settled_here(nodes, members)

    async def _look(self, nodes: str, members: Sequence[Process]) -> None:
        snapshots = [one.last_snapshot for one in members]
        rounds = {one.at_round for one in members}
        if len(rounds) != 1 or not (round := rounds.pop()):
            return  # one of them is further already, or this daemon does not know it yet
        try:
            tables = await _tables(members)
        except (Unreadable, OSError) as error:
            logger.debug("it is not known what only one device has", round=round, why=str(error))
            return
        by_name = {one.row.id: table for one, table in zip(members, tables, strict=True)}
        apart = [[by_name[other.row.id] for other in _apart(one, members)] for one in members]
        unique = await asyncio.to_thread(lambda: [_without(*each) for each in zip(tables, apart, strict=True)])
        elsewhere = await self._elsewhere(nodes, round, unique)
        memory = await asyncio.to_thread(_as_memory, elsewhere)
        unique = await asyncio.to_thread(lambda: [_without(table, [elsewhere]) for table in unique])
        for process, snapshot, mine in zip(members, snapshots, unique, strict=True):
            if process.last_snapshot is snapshot is not None:
                process.copy_unique(_apart(process, members), self._share(), memory)
                self._send(process, snapshot.number, mine)

    async def _elsewhere(self, nodes: str, round: int, tables: Sequence[Table]) -> set[int]:
        """What of these ranks of other nodes have. A node that does not answer has nothing."""
        found: set[int] = set()
        for node in after(self._node, nodes):
            wanted = await asyncio.to_thread(lambda: list(set[int]().union(*tables) - found))
            for at in range(0, len(wanted), MOST_CHUNKS):
                some = wanted[at : at + MOST_CHUNKS]
                try:
                    async with asyncio.timeout(ANSWERS_WITHIN):
                        bits = await self._reach().held(node, nodes, round, some)
                except TimeoutError:
                    logger.debug("a node does not say what it has", peer=node, why="it takes too long")
                    break
                except XmigError as error:
                    logger.debug("a node does not say what it has", peer=node, why=error.message)
                    break
                found.update(one for one, bit in zip(some, bits, strict=True) if bit)
        return found

    def _share(self) -> int:
        return self._most // max(1, sum(one.grouped for one in self._processes.values()))

    def _reach(self) -> Others:
        if self.others is None:
            raise Unavailable("the daemon is starting")
        return self.others

    # --- to the neighbour --------------------------------------------------------------------------------------------

    def _send(self, process: Process, snapshot: int, unique: Table) -> None:
        copy = process.neighbour_copy
        if copy is None or process.row.id not in self._processes:
            return
        copy.behind_bytes = len(unique) * m.CHUNK
        sending = self._sending.setdefault(process.row.id, _Sending())
        sending.due = sending.last = snapshot, unique
        self._begin(process, copy, sending)

    def _begin(self, process: Process, copy: NeighbourCopy, sending: _Sending) -> None:
        if sending.task is None or sending.task.done():
            sending.task = asyncio.get_running_loop().create_task(self._send_all(process, copy, sending))

    async def _send_all(self, process: Process, copy: NeighbourCopy, sending: _Sending) -> None:
        while sending.due is not None:
            (snapshot, unique), sending.due = sending.due, None
            pause = AGAIN
            while sending.due is None:
                try:
                    await self._bring(process, copy, sending, snapshot, unique)
                    why = ""
                except Unavailable as error:
                    self._note(process, copy, error.message)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, MOST_AGAIN)
                    continue
                except XmigError as error:
                    why = error.message
                self._note(process, copy, why)
                break

    async def _bring(
        self, process: Process, copy: NeighbourCopy, sending: _Sending, snapshot: int, unique: Table
    ) -> None:
        """All that the neighbour lacks, or until there is a newer round. Raises XmigError."""
        node, nodes, name = copy.node, process.job.nodes or "", process.row.id
        hashes = list(unique)
        copy.bytes = 0
        bits = await self._reach().retain(node, nodes, name, hashes)
        lacking = [(unique[one], one) for one, bit in zip(hashes, bits, strict=True) if bit]
        copy.bytes = (len(hashes) - len(lacking)) * m.CHUNK
        missed = 0
        while lacking and sending.due is None:
            copy.behind_bytes = (missed + len(lacking)) * m.CHUNK
            some = lacking[: self._at_once]
            found = await process.read_chunks(some)
            with contextlib.closing(found.memory):
                given = [some[number][1] for number in found.found]
                if given and self._budget is not None:
                    await asyncio.sleep(self._budget.wait(len(given) * m.CHUNK, time.monotonic()))
                    copy.sent_bytes += len(given) * m.CHUNK
                    await self._reach().send_content(node, nodes, name, given, found.memory)
            copy.bytes += len(given) * m.CHUNK
            missed += found.examined - len(given)  # of a snapshot that has been replaced
            lacking = lacking[found.examined :]
        if sending.due is None:
            copy.behind_bytes = missed * m.CHUNK
            if not missed:
                copy.snapshot = snapshot

    async def _forget(self, process: Process) -> None:
        if (copy := process.neighbour_copy) is not None:
            with contextlib.suppress(XmigError):
                await self._reach().retain(copy.node, process.job.nodes or "", process.row.id, ())

    def _note(self, process: Process, copy: NeighbourCopy, why: str) -> None:
        if why and why != copy.why:
            logger.warning("copies do not get to the next node", process=process.row.id[:12], peer=copy.node, why=why)
        copy.why = why


def _answered(process: Process, snapshot: int) -> bool:
    return process.copies is not None and process.copies.snapshot == snapshot


def _apart(process: Process, members: Sequence[Process]) -> list[Process]:
    """Those on other devices: what is on one is lost together."""
    mine = set(devices_of(process.row.device))
    return [one for one in members if one is not process and mine.isdisjoint(devices_of(one.row.device))]


def _without(table: Table, others: Iterable[Container[int]]) -> Table:
    return {one: at for one, at in table.items() if not any(one in other for other in others)}


async def _tables(members: Iterable[Process]) -> list[Table]:
    """Of their last snapshots. Raises Unreadable, OSError."""
    files: list[tuple[Fd, Fd, int]] = []
    for one in members:
        if one.memory is None or one.last_snapshot is None:
            raise Unreadable("it has ended")
        first, second = (Fd(os.dup(fd.fileno())) for fd in (one.memory.snapshot0, one.memory.snapshot1))
        files.append((first, second, one.last_snapshot.number))
    return await asyncio.to_thread(_read, files)


def _read(files: list[tuple[Fd, Fd, int]]) -> list[Table]:
    try:
        return [_table(*one) for one in files]
    finally:
        close_all([fd for first, second, _ in files for fd in (first, second)])


def _table(first: Fd, second: Fd, number: int) -> Table:
    chunks = read_chunks((first.fileno(), second.fileno()), number, MOST_CHUNKS)
    return {one: at for one, at in zip(chunks.hashes, chunks.addresses, strict=True) if one != chunks.zeros}


def _as_memory(hashes: set[int]) -> Fd | None:
    """None: of nothing, or there is no memory for it; then more is copied than needs to be."""
    if not hashes:
        return None
    content = array("Q", hashes).tobytes()
    try:
        memory = sealed_memory("xmig-hashes", len(content))
        write_all(memory.fileno(), content, 0)
    except OSError as error:
        logger.warning("a server does not get to know what other nodes have", why=error.strerror)
        return None
    return memory
