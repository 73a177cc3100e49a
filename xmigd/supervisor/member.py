"""A process that may share communicators with others, as whoever coordinates them sees it: of this node, or another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from xmigd.groups.meetings import Answer
from xmigd.process import events as e
from xmigd.process import migration_events as v
from xmigd.records import JobRow, ProcessRow


class Sender(Protocol):
    """A server of a member, which has reported something."""

    @property
    def number(self) -> int: ...
    @property
    def device(self) -> str: ...
    def send(self, message: bytes) -> None: ...


class Member(Protocol):
    row: ProcessRow  # its devices have the node's name before them if that is another one
    job: JobRow
    node: str  # empty: this one

    @property
    def state(self) -> str: ...
    @property
    def active(self) -> int | None:
        """The number of the server that has it, or is to get it."""

    @property
    def grouped(self) -> bool:
        """Does its machine wait for others before it recovers?"""

    @property
    def warm_standby(self) -> int | None: ...
    @property
    def target(self) -> int | None:
        """The number of the server that it moves to, from when that gets its memory until it has the process, too."""

    @property
    def standing(self) -> bool:
        """Has its server the memory of the last snapshot?"""

    # What its journal says.
    def rounds(self) -> tuple[int, int]:
        """The last that it has prepared and not taken yet, and the last decided."""
        ...

    def forsaken(self) -> bool:
        """Was its last snapshot taken without the others?"""
        ...

    def renewed(self) -> int:
        """The last round at which a rank of its group left its server for another. 0: none."""
        ...

    def suspended_at(self) -> int:
        """The round at which it was suspended with all others. 0: it is not, or it was alone."""
        ...

    @property
    def leaving(self) -> v.Leaving:
        """Is it being suspended with all others, and how far (process/migration.py)?"""

    @property
    def resumes(self) -> bool:
        """It is suspended, and is being resumed."""

    # What becomes of it.
    def tell(self, event: e.Event) -> None: ...
    def wake(self, reason: str) -> None:
        """It is suspended, and is recovered with others that are not."""

    def send_active(self, message: bytes) -> None: ...
    def met(self, answer: Answer) -> None: ...
    def prepare_communicator(self, number: int, attempt: int, name: str) -> None: ...
    def forget_communicator(self, number: int, attempt: int) -> None: ...
    def leaves_with(self, communicators: Sequence[int]) -> None:
        """It is about to leave its server, and its target has made these with the others."""

    def note_made(self, number: int, communicators: int, device_bytes: int) -> None:
        """What a server of it has made ahead."""

    def look(self) -> None:
        """How it stands is waited for."""

    def name_replicas(self, number: int, others: Iterable[Member]) -> None: ...
