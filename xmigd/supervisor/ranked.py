"""A process as a member of a group (member.py)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from xmigd.devices import header
from xmigd.devices.names import as_one, devices_of
from xmigd.errors import Conflict, Unavailable
from xmigd.groups.meetings import Answer
from xmigd.ipc import messages as m
from xmigd.ipc.fds import Fd, read_only
from xmigd.process import events as e
from xmigd.process import migration_events as v
from xmigd.servers.server import Server
from xmigd.supervisor.far_chunks import FarRank, Found
from xmigd.supervisor.member import Member
from xmigd.supervisor.requested import Requested
from xmigd.supervisor.state import now


class Ranked(Requested):
    """Callers coordinate the ranks."""

    node = ""  # this one

    def met(self, answer: Answer) -> None:
        """To a server whose rank of a communicator looks for the others."""
        server = self.server(answer.server)
        if server is None:
            return
        fields: dict[str, Any] = {"meeting": answer.meeting, "rank": answer.rank}
        if answer.offers:
            fields |= {"offers": list(answer.offers), "answer": answer.answer}
        elif answer.over:
            fields["over"] = True
        elif answer.refused:
            fields["refused"] = answer.refused
        else:
            fields["missing"] = answer.missing
        server.send(m.pack("met", **fields))

    @property
    def standby_communicators(self) -> int:
        """That its standby has made with those of the other ranks."""
        server = self.server(self.warm_standby)
        return 0 if server is None else server.communicators

    @property
    def warm_standby(self) -> int | None:
        number = self.machine.standby
        return number if number is not None and self.machine.servers[number] == "warm" else None

    @property
    def active(self) -> int | None:
        return self.machine.active

    @property
    def target(self) -> int | None:
        move = self.machine.move
        return move.target if move is not None and move.feeding else None

    @property
    def grouped(self) -> bool:
        return self.machine.grouped

    @property
    def standing(self) -> bool:
        machine = self.machine
        if machine.active is None or machine.servers[machine.active] != "assigned":
            return False
        return machine.recovery is None or machine.recovery.restored is not None

    def rounds(self) -> tuple[int, int]:
        if self.memory is None:
            return 0, 0
        try:
            return header.rounds(self.memory.journal.fileno(), self._layout.group_at)
        except OSError:
            return 0, 0

    @property
    def at_round(self) -> int:
        """Of its group, that its last snapshot is of, or was taken alone after: with no collective in between the two
        fit the same snapshots of the others. 0: none."""
        last = self.last_snapshot
        return 0 if last is None else last.round or self.rounds()[1]

    def forsaken(self) -> bool:
        return self.memory is not None and header.forsaken(self.memory.journal.fileno(), self._layout.group_at)

    def renewed(self) -> int:
        return 0 if self.memory is None else header.renewed(self.memory.journal.fileno(), self._layout.group_at)

    def suspended_at(self) -> int:
        return 0 if self.memory is None else header.suspended(self.memory.journal.fileno(), self._layout.group_at)

    @property
    def leaving(self) -> v.Leaving:
        move = self.machine.move
        return "" if move is None else move.leaving

    @property
    def resumes(self) -> bool:
        move = self.machine.move
        return move is not None and move.kind == "resume"

    def wake(self, reason: str) -> None:
        """It is suspended, and is recovered with others that are not."""
        if self.memory is not None:
            self.keep_all(self.fd_store.next_change(self.memory))
        self.tell(e.Grouped(t=now(), on=True))
        self.tell(e.GroupWoken(t=now(), reason=reason))

    def count_standby_bytes(self, counted: Sequence[int]) -> None:
        if self.memory is not None:
            header.count_standby_bytes(self.memory.journal.fileno(), self._layout.standby_bytes_at, counted)

    def server_devices(self) -> dict[int, str]:
        return {number: server.device for number, server in self.servers.items()}

    def note_made(self, number: int, communicators: int, device_bytes: int) -> None:
        if (server := self.server(number)) is not None:
            server.communicators, server.communicator_bytes = communicators, device_bytes

    def prepare_communicator(self, number: int, attempt: int, name: str) -> None:
        """One of its servers makes it, beside all others."""
        server, memory = self.server(number), self.memory
        if server is not None and memory is not None:
            message = m.pack("prepare_communicator", attempt=attempt, name=name)
            server.send(message, (memory.snapshot0, memory.snapshot1))

    def forget_communicator(self, number: int, attempt: int) -> None:
        if (server := self.server(number)) is not None:
            server.send(m.pack("forget_communicator", attempt=attempt))

    def leaves_with(self, communicators: Sequence[int]) -> None:
        self.moving.communicators = tuple(communicators)

    def device_lost(self, device: str, instead: str, why: str) -> None:
        """With its memory. What of this process lay there is gone, and its next servers get the other device."""
        names = devices_of(self.row.device)
        for server in list(self.servers.values()):
            if device in devices_of(server.device) and self.moving.is_target(server.number):
                server.kill()
        if device not in names or self.state == "suspended":
            return
        self._lost_ordinals |= {ordinal for ordinal, name in enumerate(names) if name == device}
        self._drop_lost_memory()
        self.moved_to(as_one([instead if name == device else name for name in names]))
        self.records.process_device(self.row.id, self.row.device)
        self._note(why, level="warning")
        self.tell(e.DeviceLost(t=now(), reason=why))
        if self.server(self.machine.active) is None:
            self._lost_ordinals.clear()  # nobody reports any more of it

    def look(self) -> None:
        """How it stands is known at once."""

    def name_replicas(self, number: int, others: Iterable[Member]) -> None:
        near, far = [], []
        for other in others:
            if isinstance(other, Ranked):
                near.append(other)
            else:
                far.append(FarRank(other.node, other.row.id))
        self.name_ranks(number, near, far)

    def name_ranks(self, number: int, near: Iterable[Ranked], far: Sequence[FarRank]) -> None:
        """To a server of this process that has lost memory: the ranks that are at the same round, of this node and of
        others."""
        server = self.server(number)
        if server is None:
            return
        for other in near:
            if self._name_rank(server, other):
                for handle in other.handles.values():
                    if handle.kind == "shadow":
                        server.send(m.pack_replica(handle.message), (handle.fd,))
        if self.neighbour_copy is not None:  # first: it may have all that is missing
            far = [FarRank(self.neighbour_copy.node, self.row.id, retained=True), *far]
        self.far_chunks.named(number, far)
        server.send(m.pack("replicas_named", far=len(far)))

    async def read_chunks(self, chunks: Sequence[m.ChunkHash]) -> Found:
        """What of these its last snapshot has, for a rank of another node. Raises Unavailable: not now; Conflict."""
        return await self.far_chunks.read(chunks, self._standing_server)

    def _standing_server(self) -> Server:
        """Raises Unavailable, Conflict."""
        if self.state in ("losing", "lost", "ended"):
            raise Conflict("the rank is lost, or has ended")
        server = self.server(self.machine.active)
        if server is None or not self.standing or self.rounds()[0] != 0:
            raise Unavailable("the rank has not restored its memory yet")
        return server

    def copy_unique(self, others: Iterable[Ranked], most: int, elsewhere: Fd | None) -> None:
        """To host memory, at most so many bytes: what of its last snapshot these ranks, on other devices, do not have,
        nor ranks of other nodes, of whose content these are the hashes."""
        server = self.server(self.machine.active)
        if server is None or self.last_snapshot is None:
            return
        for other in others:
            self._name_rank(server, other)
        request = m.pack("copy_unique", snapshot=self.last_snapshot.number, bytes=most)
        server.send(request, () if elsewhere is None else (elsewhere,))

    def _name_rank(self, server: Server, other: Ranked) -> bool:
        if other.memory is None:
            return False
        try:
            files = [read_only(fd) for fd in (other.memory.snapshot0, other.memory.snapshot1)]
        except OSError as error:
            self._log.warning("a rank's memory is not looked at", other=other.row.id[:12], why=error.strerror)
            return False
        server.send(m.pack("replica_rank"), files)
        return True
