"""Communicators that servers make before they are needed. Pure.

Beside the communicators of a group, those who may take over make the same ones with each other: the standbys of all
ranks, for a recovery; or the target of a rank's move with the servers of the others. One such making is an *attempt*:
one server for each process of the communicator, all of which must succeed; if one of them is not there any more, the
attempt is void.

Invariants: an attempt is named in a recovery only if every one of its servers is the one that gets the process, and has
reported that it is done; two attempts with a server in common were sent to all their servers in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from xmigd.groups.instructions import Instruction
from xmigd.groups.ties import Key

MOST_OF_PROCESS = 64  # communicators; a recovery makes the others
FIRST_PAUSE = 5_000_000_000  # ns, after an attempt that failed
LAST_PAUSE = 60_000_000_000
LETTING_GO = 1_000_000_000  # ns, that servers may take to free what they were sent to forget
SHORT_PAUSE = 600_000_000_000  # after a program has needed the memory

Server = tuple[str, int]  # a process, and which of its servers


@dataclass(frozen=True, slots=True)
class Prepare(Instruction):
    server: int
    attempt: int
    name: str


@dataclass(frozen=True, slots=True)
class Forget(Instruction):
    server: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Made(Instruction):
    """By the servers of all its ranks."""

    server: int
    attempt: int
    processes: int


@dataclass(frozen=True, slots=True)
class Unready(Instruction):
    """A communicator of the process that moves cannot be made with its target."""

    reason: str


@dataclass(frozen=True, slots=True)
class Spare:
    """Of a device's memory, what communicators that were made ahead take, and could be given up."""

    bytes: int
    unknown: bool = False  # some are just being made, and nobody knows what these will take

    def __add__(self, other: Spare) -> Spare:
        return Spare(self.bytes + other.bytes, self.unknown or other.unknown)

    def of(self, missing: int) -> int:
        """How much comes free for a program that lacks so many bytes. 0: not enough, and nothing is given up."""
        coming = max(self.bytes, missing) if self.unknown else self.bytes
        return coming if coming >= missing else 0


@dataclass(slots=True)
class _Attempt:
    number: int
    key: Key
    moves: str  # the process that moves; empty: of standbys
    servers: dict[str, int]
    missing: set[str]  # who has not reported that it is done
    bytes: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Trouble:
    pause: int
    not_before: int
    servers: dict[str, int]


class Prepared:
    def __init__(self, first: int = 1) -> None:
        """`first`: the number of the first attempt, higher than any of an earlier daemon."""
        self._next = first
        self._attempts: dict[int, _Attempt] = {}
        self._current: dict[tuple[str, Key], int] = {}  # attempts, by who moves and communicator
        self._troubles: dict[Key, _Trouble] = {}
        # Of moves, by who moves and communicator: by which servers it could not be made since the last snapshot.
        self._refused: dict[tuple[str, Key], dict[str, int]] = {}
        self._taken: dict[Server, int] = {}  # bytes
        self._freed: dict[Server, tuple[int, int]] = {}  # bytes that come free, and until when
        self._short: dict[str, int] = {}  # processes on a device that was full: until when they make none

    def settled(
        self, t: int, whole: Mapping[Key, tuple[str, ...]], standbys: Mapping[str, int | None],
        bounds: Mapping[str, int],
    ) -> list[Instruction]:  # fmt: skip
        """A group has a snapshot with these communicators, of these processes. `standbys`: those that are warm.
        `bounds`: bytes of device memory that the communicators of a process's standby may take; 0: it makes none."""
        self._refused = {one: servers for one, servers in self._refused.items() if one[1] not in whole}
        out: list[Instruction] = []
        for key in sorted(whole):
            processes = set(whole[key])
            servers = {process: number for process in processes if (number := standbys.get(process)) is not None}
            attempt = self._attempts.get(self._current.get(("", key), 0))
            if attempt is not None:
                if attempt.servers == servers:
                    continue
                out += self._void(attempt)
            if len(servers) == len(processes) and self._may(t, key, servers, bounds):
                out += self._begin("", key, servers)
        return out

    def want_move(
        self, t: int, process: str, whole: Mapping[Key, tuple[str, ...]], servers: Mapping[str, int | None]
    ) -> list[Instruction]:  # fmt: skip
        """The communicators of a process that moves. `servers`: its target, and those that have the others. One that
        could not be made is tried once more after the next snapshot, which may be the first that has it."""
        out: list[Instruction] = []
        for key in sorted(whole):
            wanted = {one: number for one in whole[key] if (number := servers.get(one)) is not None}
            attempt = self._attempts.get(self._current.get((process, key), 0))
            if attempt is not None and attempt.servers != wanted:
                out += self._void(attempt)
                attempt = None
            complete = len(wanted) == len(set(whole[key])) and self._refused.get((process, key)) != wanted
            if attempt is None and complete and not self._is_short(t, wanted):
                out += self._begin(process, key, wanted)
        return out

    def move_is_ready(
        self, process: str, whole: Mapping[Key, tuple[str, ...]], servers: Mapping[str, int | None]
    ) -> dict[str, tuple[int, ...]] | None:  # fmt: skip
        """By process, what all are to use from now on. None: not all of it is there."""
        named: dict[str, list[int]] = {process: []}
        for key in whole:
            attempt = self._attempts.get(self._current.get((process, key), 0))
            if attempt is None or attempt.missing:
                return None
            for one, number in attempt.servers.items():
                if servers.get(one) != number:
                    return None
                named.setdefault(one, []).append(attempt.number)
        return {one: tuple(sorted(numbers)) for one, numbers in named.items()}

    def moved(self, process: str, used: Collection[int]) -> list[Instruction]:
        """These attempts are taken from now on: nobody is to forget any, however late it takes it. The others of its
        move are of communicators that it has left meanwhile."""
        for attempt in [one for one in self._attempts.values() if one.moves == process and one.number in used]:
            self._remove(attempt)
        return self.move_over(process)

    def move_over(self, process: str) -> list[Instruction]:
        """What was made for its move, and not taken, is not needed any more."""
        self._forget_refusals(process)
        out: list[Instruction] = []
        for attempt in [one for one in self._attempts.values() if one.moves == process]:
            out += self._void(attempt)
        return out

    def reported(
        self, t: int, process: str, server: int, number: int, device_bytes: int, why: str
    ) -> list[Instruction]:
        """One has made its communicator, or cannot."""
        attempt = self._attempts.get(number)
        if attempt is None or attempt.servers.get(process) != server or process not in attempt.missing:
            return []
        if why:
            if attempt.moves:
                self._refused[attempt.moves, attempt.key] = dict(attempt.servers)
                return [*self._void(attempt, but=process), Unready(attempt.moves, why)]
            self._has_failed(t, attempt)
            return self._void(attempt, but=process)
        attempt.missing.discard(process)
        attempt.bytes[process] = device_bytes
        if not attempt.moves:
            self._troubles.pop(attempt.key, None)
        if attempt.missing:
            return []
        self._count_bytes(attempt)
        servers = sorted(attempt.servers.items())
        return [Made(one, server, number, len(servers)) for one, server in servers]

    def usable(self, servers: Mapping[str, int | None]) -> dict[str, tuple[int, ...]]:
        """These servers get their processes: by process, the attempts that they can use. All others of these processes
        are void, and so are these from now on."""
        named: dict[str, list[int]] = {process: [] for process in servers}
        for attempt in list(self._attempts.values()):
            if not attempt.servers.keys() & servers.keys():
                continue
            fits = all(servers.get(process) == number for process, number in attempt.servers.items())
            if fits and not attempt.missing:
                for process in attempt.servers:
                    named[process].append(attempt.number)
            self._remove(attempt)
        return {process: tuple(sorted(numbers)) for process, numbers in named.items()}

    def bytes_of(self, process: str, server: int) -> int:
        """That the communicators of a standby take, about."""
        return self._taken.get((process, server), 0)

    def bytes_on(self, device: Mapping[Server, int]) -> int:
        """Of device memory that communicators made ahead take there, about. `device`: the servers that use it, with the
        number of devices that each of them uses."""
        return sum(self._taken.get(server, 0) // devices for server, devices in device.items())

    def spare(self, t: int, device: Mapping[Server, int]) -> Spare:
        """What a program on that device could have of it."""
        unknown = any(one.missing for one in self._attempts.values() if self._is_on(one, device))
        # Ranks of one job run out of memory at the same moment: what the first had given up is the second's, too.
        return Spare(self.bytes_on(device) + self._freed_on(t, device), unknown)

    def give_up(self, t: int, device: Mapping[Server, int]) -> list[Instruction]:
        """A program lacks memory there, which comes before all of these."""
        there = [one for one in self._attempts.values() if self._is_on(one, device)]
        out: list[Instruction] = []
        for one in there:
            for server in one.servers.items():
                self._freed[server] = (self._taken.get(server, 0), t + LETTING_GO)
        for one in there:
            out += self._void(one)
        # Of processes that others coordinate nobody says here that they have ended.
        self._short = {process: until for process, until in self._short.items() if t < until}
        for process, _ in device:
            self._short[process] = t + SHORT_PAUSE
        return out

    @staticmethod
    def _is_on(attempt: _Attempt, device: Mapping[Server, int]) -> bool:
        return not device.keys().isdisjoint(attempt.servers.items())

    def _freed_on(self, t: int, device: Mapping[Server, int]) -> int:
        self._freed = {server: (size, until) for server, (size, until) in self._freed.items() if t < until}
        return sum(self._freed[server][0] // devices for server, devices in device.items() if server in self._freed)

    def made_by(self, process: str, server: int) -> int:
        """Communicators that it has made, as have the others' servers."""
        return sum(one.servers.get(process) == server and not one.missing for one in self._attempts.values())

    def without(self, process: str) -> list[Instruction]:
        """What its servers have made is of no use any more."""
        out: list[Instruction] = []
        for attempt in [one for one in self._attempts.values() if process in one.servers]:
            out += self._void(attempt)
        return out

    def gone(self, process: str) -> list[Instruction]:
        """The process has ended."""
        out: list[Instruction] = []
        for attempt in [one for one in self._attempts.values() if process in one.servers]:
            out += self._void(attempt, but=process)
            self._troubles.pop(attempt.key, None)
        for server in [server for server in self._taken if server[0] == process]:
            del self._taken[server]
        self._short.pop(process, None)
        return out

    # --- small parts -------------------------------------------------------------------------------------------------

    def _may(self, t: int, key: Key, servers: dict[str, int], bounds: Mapping[str, int]) -> bool:
        trouble = self._troubles.get(key)
        if trouble is not None and t < trouble.not_before and trouble.servers == servers:
            return False
        if self._is_short(t, servers):
            return False
        for process, number in servers.items():
            of_it = [one for one in self._attempts.values() if one.servers.get(process) == number]
            taken = self._taken.get((process, number), 0)
            largest = max((one.bytes.get(process, 0) for one in of_it), default=0)
            bound = bounds.get(process, 0)
            if bound == 0 or len(of_it) >= MOST_OF_PROCESS or taken + largest > bound:
                return False
        return True

    def _forget_refusals(self, process: str) -> None:
        self._refused = {one: servers for one, servers in self._refused.items() if one[0] != process}

    def _is_short(self, t: int, servers: Mapping[str, int]) -> bool:
        return any(t < self._short.get(process, t) for process in servers)

    def _begin(self, moves: str, key: Key, servers: dict[str, int]) -> list[Instruction]:
        attempt = _Attempt(self._next, key, moves, servers, set(servers))
        self._next += 1
        self._attempts[attempt.number] = attempt
        self._current[moves, key] = attempt.number
        return [Prepare(process, servers[process], attempt.number, key[1]) for process in sorted(servers)]

    def _count_bytes(self, attempt: _Attempt) -> None:
        """Each server has compared what was free before and after, while others took memory and gave it back. Ranks of
        a communicator take much the same, so that the smallest figure is the nearest."""
        smallest = min(attempt.bytes.values())
        for server in attempt.servers.items():
            attempt.bytes[server[0]] = smallest
            self._taken[server] = self._taken.get(server, 0) + smallest

    def _has_failed(self, t: int, attempt: _Attempt) -> None:
        before = self._troubles.get(attempt.key)
        pause = FIRST_PAUSE if before is None else min(2 * before.pause, LAST_PAUSE)
        self._troubles[attempt.key] = _Trouble(pause, t + pause, dict(attempt.servers))

    def _void(self, attempt: _Attempt, but: str = "") -> list[Instruction]:
        self._remove(attempt)
        return [
            Forget(process, number, attempt.number)
            for process, number in sorted(attempt.servers.items())
            if process != but
        ]

    def _remove(self, attempt: _Attempt) -> None:
        del self._attempts[attempt.number]
        if self._current.get((attempt.moves, attempt.key)) == attempt.number:
            del self._current[attempt.moves, attempt.key]
        for process, number in attempt.servers.items():
            server = (process, number)
            if not attempt.missing:
                self._taken[server] = self._taken.get(server, 0) - attempt.bytes[process]
            if self._taken.get(server, 1) <= 0:
                del self._taken[server]
