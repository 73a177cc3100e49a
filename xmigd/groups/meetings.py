"""Where the ranks of a communicator meet: each offers a text, and once all have come, each gets what all offer.

No I/O: what servers offer comes in, what they are to be answered goes out. A server repeats its offer until it is
answered, so nothing here has to outlive a daemon: the next one hears all offers again. What a meeting is called only
its ranks can know, and ranks of different users do not meet.

Invariants: a rank belongs to one process; a meeting that is complete never changes; what nobody has repeated for
``PATIENCE`` is forgotten.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

PATIENCE = 30_000_000_000  # ns; servers repeat what they offer each second
MOST_OF_USER = 4096  # meetings at a time
MOST_NAMED = 16  # missing ranks in one answer


@dataclass(frozen=True, slots=True)
class Offer:
    meeting: str
    rank: int
    ranks: int
    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    """To a server of a process. ``missing``: nobody else has come yet; ``refused``: the rank is not let in, and why."""

    process: str
    server: int
    meeting: str
    rank: int
    offers: tuple[str, ...] = ()
    missing: str = ""
    refused: str = ""


@dataclass(frozen=True, slots=True)
class _Came:
    process: str
    server: int
    text: str


@dataclass(slots=True)
class _Meeting:
    uid: int
    ranks: int
    heard: int
    came: dict[int, _Came] = field(default_factory=dict)  # by rank
    gone: set[str] = field(default_factory=set)  # processes of a complete one that have ended

    @property
    def complete(self) -> bool:
        return len(self.came) == self.ranks


class Meetings:
    def __init__(self) -> None:
        self._meetings: dict[str, _Meeting] = {}

    def __len__(self) -> int:
        return len(self._meetings)

    def attend(self, t: int, process: str, server: int, uid: int, offer: Offer) -> list[Answer]:
        """What to answer, and to whom."""
        self._forget(t)
        found = self._meetings.get(offer.meeting)
        if found is None:
            if sum(one.uid == uid for one in self._meetings.values()) >= MOST_OF_USER:
                return [_refusal(process, server, offer, f"more than {MOST_OF_USER} communicators are being made")]
            found = self._meetings[offer.meeting] = _Meeting(uid, offer.ranks, t)
        if found.uid != uid:
            return [_refusal(process, server, offer, "the communicator is another user's")]
        if found.ranks != offer.ranks:
            why = f"rank {offer.rank} says that there are {offer.ranks} ranks, others say {found.ranks}"
            return [_refusal(process, server, offer, why)]
        before = found.came.get(offer.rank)
        if before is not None and before.process != process:
            return [_refusal(process, server, offer, f"rank {offer.rank} is another process, {before.process[:12]}")]
        found.heard = t
        if found.complete:
            if before != _Came(process, server, offer.text):
                why = "the others have gone on with the server that this one replaces"
                return [_refusal(process, server, offer, why)]
            return [_all_of(found, offer.meeting, offer.rank)]
        found.came[offer.rank] = _Came(process, server, offer.text)
        if len(found.came) == found.ranks:
            return [_all_of(found, offer.meeting, rank) for rank in sorted(found.came)]
        return [Answer(process, server, offer.meeting, offer.rank, missing=_missing(found))]

    def gone(self, process: str) -> None:
        """A process has ended. Those that wait for it go on waiting: another may come in its place. When all of a
        complete meeting have ended, they may all meet again under its name: restored from a checkpoint."""
        for name, meeting in list(self._meetings.items()):
            if meeting.complete:
                meeting.gone |= {process} & {one.process for one in meeting.came.values()}
                if len(meeting.gone) == len({one.process for one in meeting.came.values()}):
                    del self._meetings[name]
                continue
            for rank in [rank for rank, one in meeting.came.items() if one.process == process]:
                del meeting.came[rank]
            if not meeting.came:
                del self._meetings[name]

    def forget_of(self, processes: Collection[str]) -> None:
        """They make their communicators again, and meet again."""
        for name, meeting in list(self._meetings.items()):
            if any(one.process in processes for one in meeting.came.values()):
                del self._meetings[name]

    def _forget(self, t: int) -> None:
        for name in [name for name, one in self._meetings.items() if t - one.heard > PATIENCE]:
            del self._meetings[name]


def _all_of(meeting: _Meeting, name: str, rank: int) -> Answer:
    offers = tuple(meeting.came[each].text for each in range(meeting.ranks))
    return Answer(meeting.came[rank].process, meeting.came[rank].server, name, rank, offers=offers)


def _refusal(process: str, server: int, offer: Offer, why: str) -> Answer:
    return Answer(process, server, offer.meeting, offer.rank, refused=why)


def _missing(meeting: _Meeting) -> str:
    absent = [str(rank) for rank in range(meeting.ranks) if rank not in meeting.came]
    more = f" and {len(absent) - MOST_NAMED} more" if len(absent) > MOST_NAMED else ""
    return ", ".join(absent[:MOST_NAMED]) + more
