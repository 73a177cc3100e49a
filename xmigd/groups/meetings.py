"""Where the ranks of a communicator meet: each offers a text, and once all have come, each gets what all offer.

No I/O: what servers offer comes in, what they are to be answered goes out. What a meeting is called only its ranks can
know, and ranks of different users do not meet.

Nothing here has to outlive a daemon, which may end when it has answered some ranks and not others. A server repeats
its offer until all ranks are answered, and says with what it was: a name of the offers of all. The next daemon hears
all offers again, so it answers as the one before did. If it would not, as a rank has offered something else since,
those who were not answered are refused: the others wait for what they know (shim/server/channel/meetings.h).

Invariants: a rank belongs to one process; a meeting that is complete never changes; nobody is answered otherwise than
another rank says that it was; a meeting is over once each rank has reported that it was answered; what nobody has
repeated for ``PATIENCE`` is forgotten.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

PATIENCE = 30_000_000_000  # ns; servers repeat what they offer each second
MOST_OF_USER = 4096  # meetings at a time
MOST_NAMED = 16  # missing ranks in one answer
_GONE_ON = "the others have gone on with the server that this one replaces, or with what this one offered before"


@dataclass(frozen=True, slots=True)
class Offer:
    meeting: str
    rank: int
    ranks: int
    text: str
    answer: str = ""  # the name of the offers that it was answered with; empty: it was not


@dataclass(frozen=True, slots=True)
class Answer:
    """To a server of a process. ``offers`` of all, and their name (``answer``); ``missing``: these have not come yet;
    ``refused``: the rank is not let in, and why; ``over``: all ranks are answered."""

    process: str
    server: int
    meeting: str
    rank: int
    offers: tuple[str, ...] = ()
    missing: str = ""
    refused: str = ""
    answer: str = ""
    over: bool = False


@dataclass(slots=True)
class _Came:
    process: str
    server: int
    text: str
    answer: str  # as in Offer


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

    @property
    def offers(self) -> tuple[str, ...]:
        """Of all ranks of a complete one."""
        return tuple(self.came[rank].text for rank in range(self.ranks))


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
        if found.complete and before is not None:
            if before.text != offer.text:
                return [_refusal(process, server, offer, _GONE_ON)]
            before.server = server  # another daemon of its node may have another number for the same
            if not offer.answer:
                return [_all_of(found, offer.meeting, offer.rank)]
            heard_before, before.answer = bool(before.answer), offer.answer
            return self._look_whether_it_is_over(found, offer.meeting, [offer.rank] if heard_before else found.came)
        found.came[offer.rank] = _Came(process, server, offer.text, offer.answer)
        if found.complete:
            return self._complete(found, offer.meeting)
        if offer.answer:
            return []  # it waits for nothing: the others are to hear its offer
        return [Answer(process, server, offer.meeting, offer.rank, missing=_missing(found))]

    def _complete(self, meeting: _Meeting, name: str) -> list[Answer]:
        waiting = [rank for rank, one in sorted(meeting.came.items()) if not one.answer]
        if {one.answer for one in meeting.came.values()} <= {"", name_of(meeting.offers)}:
            answers = [_all_of(meeting, name, rank) for rank in waiting]
            return answers or self._look_whether_it_is_over(meeting, name, meeting.came)
        # Those who were answered otherwise have gone on, and are not to be joined with the new offers.
        refused = [(rank, meeting.came.pop(rank)) for rank in waiting]
        return [Answer(one.process, one.server, name, rank, refused=_GONE_ON) for rank, one in refused]

    def _look_whether_it_is_over(self, meeting: _Meeting, name: str, ranks: Iterable[int]) -> list[Answer]:
        """Then these ranks need not repeat their offers."""
        if not all(one.answer for one in meeting.came.values()):
            return []
        wanted = [(rank, meeting.came[rank]) for rank in sorted(ranks)]
        return [Answer(one.process, one.server, name, rank, over=True) for rank, one in wanted]

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
    one, offers = meeting.came[rank], meeting.offers
    return Answer(one.process, one.server, name, rank, offers=offers, answer=name_of(offers))


def name_of(offers: tuple[str, ...]) -> str:
    """The same from every daemon."""
    return hashlib.sha256("\n".join(offers).encode()).hexdigest()[:32]


def _refusal(process: str, server: int, offer: Offer, why: str) -> Answer:
    return Answer(process, server, offer.meeting, offer.rank, refused=why)


def _missing(meeting: _Meeting) -> str:
    absent = [str(rank) for rank in range(meeting.ranks) if rank not in meeting.came]
    more = f" and {len(absent) - MOST_NAMED} more" if len(absent) > MOST_NAMED else ""
    return ", ".join(absent[:MOST_NAMED]) + more
