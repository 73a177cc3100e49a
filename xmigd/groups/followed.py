"""What servers of this node have made ahead for groups that another node coordinates. Pure.

That node decides (prepared.py); this one bounds it, and knows what memory comes free if a program needs it, however far
away the other one is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from xmigd.groups.prepared import LETTING_GO, MOST_OF_PROCESS, Server, Spare


@dataclass(slots=True)
class _Of:
    """A server."""

    attempts: dict[int, int | None] = field(default_factory=dict)  # bytes that each took there; None: it is being made
    made: int = 0  # attempts of which all ranks have theirs
    bytes: int = 0  # that these take, about


class Followed:
    def __init__(self, bound: int) -> None:
        """`bound`: bytes of device memory that the communicators of one standby may take."""
        self._bound = bound
        self._of: dict[Server, _Of] = {}
        self._freed: dict[Server, tuple[int, int]] = {}  # bytes that come free, and until when

    def begin(self, server: Server, attempt: int, *, moves: bool = False) -> str:
        """Why it is not made; empty: it is. `moves`: for a rank that does, which is bounded by what it needs."""
        of = self._of.get(server, _Of())
        if attempt in of.attempts:
            return "it was requested twice"
        if len(of.attempts) >= MOST_OF_PROCESS:
            return f"the server has {MOST_OF_PROCESS} communicators"
        if not moves and sum(size or 0 for size in of.attempts.values()) >= self._bound:
            return "standby_communicators_mib of this node are used up"
        self._of.setdefault(server, of).attempts[attempt] = None
        return ""

    def reported(self, server: Server, attempt: int, device_bytes: int, why: str) -> bool:
        """Is it known, and still wanted?"""
        of = self._of.get(server, _Of())
        if of.attempts.get(attempt, 0) is not None:
            return False
        if why:
            self.forget(server, attempt)
        else:
            of.attempts[attempt] = device_bytes
        return True

    def noted(self, server: Server, made: int, device_bytes: int) -> None:
        """By the node that coordinates: so many have been made by all, and take so much. No more than this node knows
        of is believed."""
        if (of := self._of.get(server)) is not None:
            of.made, of.bytes = made, device_bytes
            self._bound_by_own(of)

    def made(self, server: Server) -> tuple[int, int]:
        """By it and all others, and what that takes."""
        of = self._of.get(server, _Of())
        return of.made, of.bytes

    def has(self, server: Server, attempt: int) -> bool:
        """Has it made this one, and nobody wants it forgotten?"""
        return self._of.get(server, _Of()).attempts.get(attempt) is not None

    def use(self, server: Server, attempts: Iterable[int]) -> bool:
        """From now on these are what it communicates with, as all others do. False: it has not all of them."""
        attempts = tuple(attempts)
        has_all = all(self.has(server, one) for one in attempts)
        for one in attempts:
            self.forget(server, one)
        return has_all

    def forget(self, server: Server, attempt: int) -> bool:
        """Was it known?"""
        of = self._of.get(server, _Of())
        if attempt not in of.attempts:
            return False
        del of.attempts[attempt]
        self._bound_by_own(of)
        if not of.attempts:
            del self._of[server]
        return True

    def over(self, process: str) -> list[tuple[Server, int]]:
        """It goes on with another server, has ended, or nobody knows any more what its servers have made. Returns what
        that was."""
        return self._drop([server for server in self._of if server[0] == process])

    def bytes_on(self, device: Mapping[Server, int]) -> int:
        """As in prepared.py."""
        return sum(of.bytes // device[server] for server, of in self._of.items() if server in device)

    def spare(self, t: int, device: Mapping[Server, int]) -> Spare:
        unknown = any(len(of.attempts) > of.made for server, of in self._of.items() if server in device)
        self._freed = {server: (size, until) for server, (size, until) in self._freed.items() if t < until}
        freed = sum(size // device[server] for server, (size, _) in self._freed.items() if server in device)
        return Spare(self.bytes_on(device) + freed, unknown)

    def give_up(self, t: int, device: Mapping[Server, int]) -> list[tuple[Server, int]]:
        """Returns what is to be forgotten."""
        there = [server for server in self._of if server in device]
        for server in there:
            self._freed[server] = (self._of[server].bytes, t + LETTING_GO)
        return self._drop(there)

    @staticmethod
    def _bound_by_own(of: _Of) -> None:
        own = [size for size in of.attempts.values() if size is not None]
        of.made, of.bytes = min(of.made, len(own)), min(of.bytes, sum(own))

    def _drop(self, servers: list[Server]) -> list[tuple[Server, int]]:
        return [(server, attempt) for server in servers for attempt in self._of.pop(server).attempts]
