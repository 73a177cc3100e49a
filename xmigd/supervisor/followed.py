"""Servers of this node make communicators ahead for a group that another node coordinates: its messages about that, and
what they take of this node's devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from xmigd import log
from xmigd.groups.followed import Followed
from xmigd.groups.prepared import Server as Number
from xmigd.groups.prepared import Spare
from xmigd.ipc import messages as m
from xmigd.servers.server import Server
from xmigd.supervisor import node_messages as n
from xmigd.supervisor.process import Process
from xmigd.supervisor.standby_memory import Device, StandbyMemory

logger = log.get("nodes")


class FollowedStandbys:
    def __init__(
        self, nodes: str, memory: StandbyMemory, processes: Mapping[str, Process],
        report: Callable[[Process, int, m.RankMessage], None], send: Callable[[n.Message], None],
    ) -> None:  # fmt: skip
        """`report`: of a server of the process."""
        self._nodes = nodes
        self._memory = memory
        self._processes = processes  # of all jobs
        self._report = report
        self._send = send
        self._followed = Followed(memory.bound)
        memory.add(self)

    @property
    def bound(self) -> int:
        return self._memory.bound

    def close(self) -> None:
        self._memory.remove(self)

    # --- the one who leads -------------------------------------------------------------------------------------------

    def received(self, process: Process, message: n.PrepareCommunicator | n.ForgetCommunicator | n.NoteMade) -> None:
        server = process.row.id, message.server
        match message:
            case n.PrepareCommunicator(attempt=attempt, name=name):
                why = "the server is no warm standby any more, and no rank moves to or from it"
                if message.server == process.warm_standby:
                    why = self._followed.begin(server, attempt)
                elif message.server in (process.active, process.target):
                    why = self._followed.begin(server, attempt, moves=True)
                if why:
                    fields = {"attempt": attempt, "device_bytes": 0, "why": why}
                    refused = m.CommunicatorPrepared.model_validate({"type": "communicator_prepared"} | fields)
                    self._report(process, message.server, refused)
                else:
                    process.prepare_communicator(message.server, attempt, name)
            case n.ForgetCommunicator(attempt=attempt):
                if self._followed.forget(server, attempt):
                    self._forget([(server, attempt)])
            case n.NoteMade():
                self._followed.noted(server, message.communicators, message.device_bytes)
                process.note_made(message.server, *self._followed.made(server))
                self._memory.count()

    def go_on(self, process: Process, communicators: Iterable[int]) -> bool:
        """Its next server gets it, and is to use these. Whatever that one does not use it forgets by itself. False: it
        has not all of them: it is another one since, or memory was needed."""
        name, active = process.row.id, process.active
        has_all = all(active is not None and self._followed.has((name, active), one) for one in communicators)
        self._followed.over(name)
        self._memory.count()
        return has_all

    def use(self, process: Process, server: int | None, communicators: Iterable[int]) -> bool:
        """A rank has moved, and this server goes on with these. False: it has not all of them: memory was needed."""
        has_all = server is not None and self._followed.use((process.row.id, server), communicators)
        self._memory.count()
        return has_all

    def void(self, processes: Iterable[str]) -> None:
        """The one who leads knows nothing of it."""
        self._forget([one for process in processes for one in self._followed.over(process)])

    # --- what happens ------------------------------------------------------------------------------------------------

    def prepared(self, process: Process, server: Server, message: m.CommunicatorPrepared) -> None:
        name, number = process.row.id, server.number
        if message.why:
            logger.info("a communicator cannot be made ahead", process=name[:12], server=number, why=message.why)
        if self._followed.reported((name, number), message.attempt, message.device_bytes, message.why):
            self._report(process, number, message)

    def bytes_on(self, device: Device) -> int:
        return self._followed.bytes_on(device)

    def spare(self, t: int, device: Device) -> Spare:
        return self._followed.spare(t, device)

    def give_up(self, t: int, device: Device) -> None:
        """At once. The one who leads has those of the other ranks forget theirs."""
        self._forget(self._followed.give_up(t, device))
        own = tuple(one for one in device if self._is_own(one[0]))
        if own:
            self._send(n.GaveUp(nodes=self._nodes, servers=own[: n.MOST_PROCESSES]))

    def _is_own(self, name: str) -> bool:
        return name in self._processes and self._processes[name].job.nodes == self._nodes

    def _forget(self, attempts: Iterable[tuple[Number, int]]) -> None:
        """What is given up is no longer counted before it is free: otherwise a program could count it twice."""
        self._memory.count()
        for (name, number), attempt in attempts:
            if (process := self._processes.get(name)) is not None:
                process.forget_communicator(number, attempt)
                process.note_made(number, *self._followed.made((name, number)))
