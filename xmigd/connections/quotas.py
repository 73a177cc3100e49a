"""How many connections each may have, so that nobody takes the places of all.

Invariants:
  A place is taken before a byte of its connection is read, and given back once, when the connection has ended.
  One user of this machine, or one address of the network, has at most `each` places, and at most `streams` streams of
  events, which count apart.
  Some places nobody gets but root, and some are only there to ask for the daemon's health or to be informed why not
  more.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from dataclasses import dataclass
from typing import Literal, Protocol

from xmigd import log
from xmigd.connections.peers import Who
from xmigd.errors import TooManyRequests, Unavailable, XmigError

RESERVE = 32  # places for root, and as many for health; an eighth of all where there are few
LOBBY_EACH = 2  # places of one user for health: who has none of its own left
LOG_EVERY = 10.0  # seconds between two lines about the same user
MOST_LOGGED = 1000

logger = log.get("connections")
Kind = Literal["ordinary", "reserved", "lobby", "stream", "over"]


class Limits(Protocol):
    """Of the settings of both programs."""

    @property
    def connections(self) -> int: ...
    @property
    def user_connections(self) -> int: ...
    @property
    def user_streams(self) -> int: ...


def within_descriptors(wanted: int, share: int) -> int:
    """`wanted`, or as many as one part in `share` of this process's descriptors: the others are for devices' memory."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return wanted if limit == resource.RLIM_INFINITY else max(8, min(wanted, limit // share))


@dataclass(slots=True, eq=False)
class Place:
    """What one connection has."""

    quotas: Quotas
    who: Who
    kind: Kind
    refusal: XmigError | None = None  # in the lobby: the answer to everything but a question for health
    listens: str = ""  # as whom, of a stream

    def listen(self, who: Who) -> None:
        """It is a stream from now on, of this caller (who may have come through a front). Raises TooManyRequests,
        Unavailable."""
        self.quotas.begin_stream(self, who)

    def listened(self) -> None:
        self.quotas.end_stream(self)

    def leave(self) -> None:
        """Once or more often."""
        self.quotas.leave(self)


class Quotas:
    def __init__(
        self, total: int, each: int, streams: int = 0, *, prefix: str = "XMIG_", what: str = "connections",
        advice: str = "",
    ) -> None:  # fmt: skip
        """`advice`: what to do when there are too many, where no setting says how many there may be."""
        self.reserve = max(2, min(RESERVE, total // 8))
        self.ordinary = total - 2 * self.reserve
        self.each = min(each, self.ordinary)
        self.streams = streams
        self.all_streams = max(1, total // 2)
        self.refused: Counter[str] = Counter()  # by whose limit it was: user, all
        self._prefix, self._what, self._advice = prefix, what, advice
        self._places: Counter[Kind] = Counter()
        self._of: dict[Kind, Counter[str]] = {"ordinary": Counter(), "lobby": Counter(), "stream": Counter()}
        self._logged: dict[str, tuple[float, int]] = {}  # who → when, and how many since

    @classmethod
    def of(cls, settings: Limits, prefix: str) -> Quotas:
        total = within_descriptors(settings.connections, 4)
        return cls(total, settings.user_connections, settings.user_streams, prefix=prefix)

    def open(self, kind: Kind) -> int:
        return self._places[kind]

    def admit(self, who: Who) -> Place:
        """A place, maybe one in the lobby. Raises TooManyRequests, Unavailable: there is not even that."""
        refusal = self._refusal(who)
        if refusal is None:
            return self._take(Place(self, who, "ordinary"))
        if who.root and self._places["reserved"] < self.reserve:
            return self._take(Place(self, who, "reserved"))
        self._tell(who, refusal)
        if self._places["lobby"] < self.reserve and self._of["lobby"][who.name] < LOBBY_EACH:
            return self._take(Place(self, who, "lobby", refusal))
        raise refusal

    def leave(self, place: Place) -> None:
        self.end_stream(place)
        if place.kind != "over":
            self._count(place, -1)
            place.kind = "over"

    def begin_stream(self, place: Place, who: Who) -> None:
        streams = self._places["stream"]
        full = streams >= self.all_streams + (self.reserve if who.root else 0)
        own = self.streams + (self.reserve if who.root else 0)
        if not full and self._of["stream"][who.name] < own:
            if place.kind == "ordinary":
                self._count(place, -1)
                place.kind, place.listens = "stream", who.name
                self._count(place, 1)
            return
        self.refused["all" if full else "user"] += 1
        if full:
            raise Unavailable(f"all {streams} streams of events that there may be are taken", code="too_many_listeners",
                              hint="ask for pages (?after=)")  # fmt: skip
        raise TooManyRequests(
            f"{who.name} listens to events {own} times, as often as one may", code="too_many_streams",
            hint=f"close some, ask for pages (?after=), or raise {self._prefix}USER_STREAMS",
        )  # fmt: skip

    def end_stream(self, place: Place) -> None:
        """It is an ordinary connection again, even if that is one too many for its user."""
        if place.kind == "stream":
            self._count(place, -1)
            place.kind, place.listens = "ordinary", ""
            self._count(place, 1)

    def _refusal(self, who: Who) -> XmigError | None:
        if self._of["ordinary"][who.name] >= self.each:
            return TooManyRequests(
                f"{who.name} has {self.each} {self._what} open, as many as one user or address may have",
                code="too_many_connections", retry_after=1, hint=self._advice or
                f"close some; idle ones are closed after a while. The limit is {self._prefix}USER_CONNECTIONS",
            )  # fmt: skip
        if self._places["ordinary"] + self._places["stream"] >= self.ordinary:
            return Unavailable(
                f"all {self.ordinary} {self._what} that there may be are taken, by several users", retry_after=1,
                code="connections_full",
                hint=self._advice or f"try again; the limit is {self._prefix}CONNECTIONS",
            )  # fmt: skip
        return None

    def _take(self, place: Place) -> Place:
        self._count(place, 1)
        return place

    def _count(self, place: Place, change: int) -> None:
        self._places[place.kind] += change
        counter = self._of.get(place.kind)
        if counter is not None:
            name = place.listens or place.who.name
            counter[name] += change
            if not counter[name]:
                del counter[name]

    def _tell(self, who: Who, refusal: XmigError) -> None:
        """In the log, but not each time: whoever is refused may come back a thousand times a second."""
        self.refused["user" if refusal.status == 429 else "all"] += 1
        when, since = self._logged.get(who.name, (-LOG_EVERY, 0))
        now = time.monotonic()
        if now - when < LOG_EVERY:
            self._logged[who.name] = (when, since + 1)
            return
        if len(self._logged) >= MOST_LOGGED:
            self._logged.clear()
        self._logged[who.name] = (now, 0)
        logger.warning("connection refused", who=who.name, why=refusal.message, before=since or None)
