"""What a supervised process is and has: shared by everything that works on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from xmigd.devices.names import devices_of
from xmigd.ipc import messages as m
from xmigd.ipc.fds import Fd
from xmigd.memory.backlog import Backlog
from xmigd.memory.fd_store import FdStore
from xmigd.memory.handles import Handle, JobMemory
from xmigd.memory.host_pool import HostPool
from xmigd.memory.quota import QuotaPage, Quotas, Slots
from xmigd.process import migration_events as v
from xmigd.process.machine import Machine
from xmigd.records import JobRow, ProcessRow, Records
from xmigd.servers.server import Server, ServerProgram


@dataclass(slots=True)
class NeighbourCopy:
    """Of what only one device has of the last round, at the next of the job's nodes. Bytes of device memory."""

    node: str
    snapshot: int = 0  # the last that was whole there; 0: none that this daemon knows of
    bytes: int = 0  # that are there
    behind_bytes: int = 0  # that are to follow
    sent_bytes: int = 0  # by this daemon, of all snapshots
    why: str = ""  # nothing gets there
    reached: bool = True  # its daemon is there, as far as this one knows


class ProcessState:
    """Of one program and its servers."""

    def __init__(
        self,
        *,
        row: ProcessRow,
        job: JobRow,
        machine: Machine,
        pidfd: Fd,
        memory: JobMemory,
        program: ServerProgram,
        stall_bound: float,
        snapshot_cost: float,
        records: Records,
        fd_store: FdStore,
        host_pool: HostPool,
        quotas: Quotas,
    ) -> None:
        self.row = row
        self.job = job
        self.machine = machine
        self.memory: JobMemory | None = memory
        self.handles: dict[int, Handle] = {}
        self.servers: dict[int, Server] = {}
        self.generation = 0
        self.last_snapshot: m.Snapshot | None = None
        self.copies: m.CopiesMade | None = None
        self.neighbour_copy: NeighbourCopy | None = None  # None: nothing is sent to another node
        self.paused = False  # its server waits, and its program may be dumped and restored elsewhere
        self.paused_snapshot = 0  # that was taken for that; 0: none
        self.program = program
        self.stall_bound, self.snapshot_cost = stall_bound, snapshot_cost  # of servers that it gets from now on
        self.records = records
        self.fd_store = fd_store
        self.host_pool = host_pool
        self._quotas = quotas
        self.quota: QuotaPage | None = None  # of its job; None: it has none, or does not take part in it
        self.quota_slots: Slots = ()  # what it has on its devices. Empty: it is suspended, or there is no quota
        self._slots_given: set[Slots] = set()  # those that servers may still write
        self._pidfd: Fd | None = pidfd

    @property
    def state(self) -> str:
        return self.machine.state

    @property
    def location(self) -> v.Location:
        """Where its state is."""
        if self.state in ("losing", "lost"):
            return "lost"
        if self.state == "suspended":
            return "file" if self.machine.where == "file" else "host"
        move = self.machine.move
        return "moving" if move is not None and move.target_took else "device"

    @property
    def program_bytes(self) -> int:
        """Device memory that its program has."""
        return sum(handle.size for handle in self.handles.values() if handle.kind == "device")

    @property
    def device_bytes(self) -> int:
        """Device memory that its servers' contexts take, the standby's among them; as far as they could tell."""
        return sum(
            server.device_bytes + server.preloaded_bytes + server.communicator_bytes for server in self.servers.values()
        )

    @property
    def communicator_bytes(self) -> int:
        """Of these, what communicators take that were made ahead."""
        return sum(server.communicator_bytes for server in self.servers.values())

    @property
    def survives_device_loss(self) -> bool | None:
        """Has another device, or host memory of this node or the next one, all that its last snapshot has? None: nobody
        looks."""
        why = self.device_loss_why
        return None if why is None else not why

    @property
    def device_loss_why(self) -> str | None:
        """Why it does not survive that; empty: it does. None: nobody looks."""
        copies, last, neighbour = self.copies, self.last_snapshot, self.neighbour_copy
        if copies is None or last is None or not self.machine.grouped:
            return None
        if copies.snapshot != last.number:
            return f"the last look was at snapshot {copies.snapshot}, and the last one is {last.number} ({last.reason})"
        if not copies.missing_bytes:
            return ""
        if copies.brought_bytes:
            return f"{copies.brought_bytes} bytes of copies from page-locked memory are on its device only"
        if neighbour is None:
            return f"{copies.missing_bytes} bytes are on its device only"
        if not neighbour.reached:
            return f"{neighbour.node}, which retains what it lacks, is not in reach"
        if neighbour.snapshot != last.number:
            there = f"what it lacks of snapshot {neighbour.snapshot}"
            return f"{neighbour.node} has {there}, and the last one is {last.number}"
        return ""

    @property
    def shadow_bytes(self) -> int:
        """Device memory that holds the last snapshot. What of it the program needs goes to host memory."""
        return sum(h.size for h in self.handles.values() if h.kind == "shadow" and not h.on_host)

    # --- its part of the job's memory quota ---------------------------------------------------------------------------

    def take_slots(self, devices: Sequence[str]) -> Slots:
        """For a server that is to bring it to these devices. Empty: there is no quota. Raises OSError, Unavailable."""
        if self.job.memory_quota is None or self.memory is None:
            return ()
        if self.quota is None:
            self.quota = self._quotas.of_or_new(self.job.id)
        if self.memory.quota is None:
            self.memory = replace(self.memory, quota=self.quota.again())
        slots = self.quota.take(self.row.id, devices)
        self._slots_given.add(slots)
        return slots

    def has_slots(self, slots: Slots) -> None:
        """It is there: what it has claimed elsewhere is given back once no server can change it."""
        before, self.quota_slots = self.quota_slots, slots
        if self.quota is not None:
            self.quota.arrived(slots)  # first: at no moment the process is nowhere
            self.quota.left(before)
            self._slots_given |= {before, slots} - {()}
        self.free_slots()

    def free_slots(self) -> None:
        """Those that are not the process's, and that no server has any more."""
        if self.quota is None:
            return
        in_use = {self.quota_slots, *(server.quota_slots for server in self.servers.values())}
        for slots in self._slots_given - in_use:
            self.quota.free(slots)
        self._slots_given &= in_use

    def give_quota(self, server: Server, slots: Slots) -> tuple[dict[str, object], tuple[Fd, ...]]:
        """What the server's assignment says of the quota, and the files that come with it."""
        assert self.memory is not None
        server.quota_slots = slots
        if not slots or self.job.memory_quota is None:
            return {}, self.memory.own
        return m.pack_quota(self.job.memory_quota, slots), self.memory.all

    def lacks_quota(self, device: str, needed: int) -> int | None:
        """Bytes that the job's quota has left on a device, if this process needs more there. None: it does not."""
        quota, page = self.job.memory_quota, self._quotas.of(self.job.id)
        if quota is None:
            return None
        left = max(0, quota - (0 if page is None else page.used(device)))
        return left if needed > left else None

    def quota_used(self, device: str) -> int:
        """Bytes of the quota that its job has on a device."""
        return 0 if self.quota is None else self.quota.used(device)

    def claimed(self, ordinal: int) -> int:
        """Bytes of the quota that it has on one of its devices."""
        if self.quota is None or ordinal >= len(self.quota_slots):
            return 0
        return self.quota.claimed((self.quota_slots[ordinal],))

    def move_claims(self, device: str, instead: str) -> bool:
        """What it has on a device that is lost counts on the other one. False: the quota has no room for it there."""
        quota = self.job.memory_quota
        if self.quota is None or quota is None or instead == device:
            return True
        page, names = self.quota, devices_of(self.row.device)
        concerned = [slot for slot, name in zip(self.quota_slots, names, strict=False) if name == device]
        return all(page.move(slot, instead, quota) for slot in concerned)

    # --- its servers --------------------------------------------------------------------------------------------------

    def server(self, number: int | None) -> Server | None:
        return None if number is None else self.servers.get(number)

    def moved_to(self, device: str) -> None:
        """Its server is on that device now."""
        self.row = replace(self.row, device=device)

    def keep_all(self, changes: int) -> None:
        """Let everything that its server holds outlive this daemon, in the place of what was kept before."""
        if self.memory is not None:
            self.fd_store.all(self.row.id, self.memory, self.handles.values(), changes)
            if self._pidfd is not None:
                self.fd_store.watch(self.row.id, self._pidfd)

    def give_room(self, server: Server, room: Sequence[Fd]) -> None:
        """Host memory, for what it will be requested next."""
        for first in range(0, len(room), m.MAX_ROOM_FDS):
            server.send(m.pack("room"), room[first : first + m.MAX_ROOM_FDS])

    def give_backlog(self, server: Server, keep: Callable[[Backlog], None]) -> None:
        """It says its changes there, too, from its next message on. ``keep`` has the other end before: what is reported
        where nobody keeps it is lost with this daemon."""
        if (made := self.fd_store.make_backlog()) is not None:
            backlog, theirs = made
            keep(backlog)
            server.send(m.pack("backlog"), (theirs,))

    def follow_backlog(self, server: Server) -> None:
        """Of the server that has the process."""
        self.give_backlog(server, lambda backlog: self.fd_store.follow(self.row.id, backlog))

    def recount(self) -> None:
        """Its server stands still, and everything that it has reported was heard."""
        if self.memory is not None:
            self.fd_store.recount(self.row.id, self.fd_store.next_change(self.memory) - 1)


def now() -> int:
    return time.monotonic_ns()
