"""A process of another node, as the daemon that leads the job's nodes sees it.

What it would read of a process of its own node, the other daemon sends with everything that it reports (`Stand`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from xmigd.groups.meetings import Answer
from xmigd.process import events as e
from xmigd.process import migration_events as v
from xmigd.records import JobRow, ProcessRow
from xmigd.supervisor import node_messages as n
from xmigd.supervisor.member import Member

LOOK_AGAIN = 0.05  # seconds

Deliver = Callable[[n.Message], None]


class FarServer:
    """One that has reported something."""

    def __init__(self, number: int, device: str) -> None:
        self.number = number
        self.device = device

    def send(self, message: bytes) -> None:
        """Nothing that is reported across nodes is answered to the server that was not its process's."""


class FarProcess:
    """`node` has it; `deliver` brings that daemon a message."""

    def __init__(self, node: str, nodes: str, stand: n.Stand, job: JobRow, deliver: Deliver) -> None:
        self.node = node
        self.job = job
        self._nodes = nodes
        self._deliver = deliver
        self._looked = 0.0  # monotonic seconds: when how it stands was requested last
        self.update(stand)

    def update(self, stand: n.Stand) -> None:
        self._stand = stand
        self.row = ProcessRow(
            id=stand.process, job=self.job.id, pid=stand.pid, start_time=stand.start_time, uid=stand.uid, gid=0,
            command="", device=f"{self.node}/{stand.device}",
        )  # fmt: skip

    def server(self, number: int) -> FarServer:
        return FarServer(number, self.row.device)

    @property
    def state(self) -> str:
        return self._stand.state

    @property
    def active(self) -> int | None:
        return self._stand.active

    @property
    def grouped(self) -> bool:
        return True

    @property
    def warm_standby(self) -> int | None:
        return self._stand.standby

    @property
    def target(self) -> int | None:
        return self._stand.target

    @property
    def standing(self) -> bool:
        return self._stand.standing

    def rounds(self) -> tuple[int, int]:
        return self._stand.rounds

    def forsaken(self) -> bool:
        return self._stand.forsaken

    def renewed(self) -> int:
        return self._stand.renewed

    def suspended_at(self) -> int:
        return self._stand.suspended_at

    @property
    def leaving(self) -> v.Leaving:
        return self._stand.leaving

    @property
    def resumes(self) -> bool:
        return self._stand.resumes

    def wake(self, reason: str) -> None:
        self.tell(e.GroupWoken(t=0, reason=reason))

    def tell(self, event: e.Event) -> None:
        self._deliver(n.tell(self._nodes, self.row.id, event))

    def send_active(self, message: bytes) -> None:
        if self.active is not None:
            text = message.decode()
            self._deliver(n.Send(nodes=self._nodes, process=self.row.id, server=self.active, text=text))

    def met(self, answer: Answer) -> None:
        self._deliver(
            n.Met(
                nodes=self._nodes, process=answer.process, server=answer.server, meeting=answer.meeting,
                rank=answer.rank, offers=answer.offers, missing=answer.missing, refused=answer.refused,
                answer=answer.answer, over=answer.over,
            )
        )  # fmt: skip

    def look(self) -> None:
        """Nothing is sent when its server has restored its memory."""
        if (t := time.monotonic()) - self._looked > LOOK_AGAIN:
            self._looked = t
            self._deliver(n.Look(nodes=self._nodes, process=self.row.id))

    def name_replicas(self, number: int, others: Iterable[Member]) -> None:
        leader = self._nodes.split(",")[0]
        ranks = tuple((one.node or leader, one.row.id) for one in others)
        self._deliver(n.NameReplicas(nodes=self._nodes, process=self.row.id, server=number, ranks=ranks))

    # What is made ahead. Counted is it where the memory is.

    def prepare_communicator(self, number: int, attempt: int, name: str) -> None:
        about = {"nodes": self._nodes, "process": self.row.id, "server": number}
        self._deliver(n.PrepareCommunicator.model_validate(about | {"attempt": attempt, "name": name}))

    def forget_communicator(self, number: int, attempt: int) -> None:
        about = {"nodes": self._nodes, "process": self.row.id, "server": number}
        self._deliver(n.ForgetCommunicator.model_validate(about | {"attempt": attempt}))

    def leaves_with(self, communicators: Sequence[int]) -> None:
        """Its node reads that from what it passes on."""

    def note_made(self, number: int, communicators: int, device_bytes: int) -> None:
        about = {"nodes": self._nodes, "process": self.row.id, "server": number}
        more = {"communicators": communicators, "device_bytes": device_bytes}
        self._deliver(n.NoteMade.model_validate(about | more))
