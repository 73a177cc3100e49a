"""Profiles of running jobs: each server gets a page, and what it writes there is read every two seconds.

A process's profile is the sum over its servers: those that were lost have left what they had counted. Those of the last
jobs that are over are kept, in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from xmigd import log
from xmigd.ipc import messages as m
from xmigd.ipc.fds import Fd, sealed_memory
from xmigd.profiling.pages import (
    LAUNCHES,
    PROFILE_BYTES,
    RECENT,
    Entry,
    Kind,
    Profile,
    read_launches,
    read_profile,
    read_ticks,
)
from xmigd.profiling.period import find_period, step_times
from xmigd.servers.server import Server
from xmigd.supervisor.process import Process

logger = log.get("profiling")

INTERVAL = 2.0  # seconds between two looks at the pages
GIVE_EVERY = 0.25  # seconds, until a new server has one
OVER_KEPT = 64  # processes that are over
FIRST_LAUNCHES = 1 << 13  # of which a period is looked for first
STEPS_KEPT = 64
SHARES_KEPT = 64
Key = tuple[Kind, str, tuple[int, int, int], tuple[int, int, int], int]


@dataclass(slots=True)
class Sum:
    """Of an operation, over the devices and the servers of a process."""

    last: Entry
    calls: int = 0
    timed: int = 0
    total_ns: int = 0
    bytes: int = 0
    recent_ns: list[float] = field(default_factory=list)

    def add(self, entry: Entry) -> None:
        self.last = entry
        self.calls += entry.calls
        self.timed += entry.timed
        self.total_ns += entry.total_ns
        self.bytes += entry.bytes
        self.recent_ns = [*self.recent_ns, *entry.recent_ns][-RECENT * 4 :]

    @property
    def mean_ns(self) -> float | None:
        return self.total_ns / self.timed if self.timed else None


def key_of(entry: Entry) -> Key:
    return entry.kind, entry.name, entry.grid, entry.block, entry.shared_bytes


def add_up(entries: Iterable[Entry], sums: dict[Key, Sum] | None = None) -> dict[Key, Sum]:
    sums = {} if sums is None else sums
    for entry in entries:
        sums.setdefault(key_of(entry), Sum(entry)).add(entry)
    return sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """Of the last interval. What is not known is None."""

    idle_share: float | None = None
    step_ms: float | None = None  # median of the steps that ended in it
    peak_bytes: int | None = None
    link_bytes_per_s: float | None = None  # collectives, and copies between devices
    host_bytes_per_s: float | None = None
    collectives: float | None = None  # share of the time, as long as its devices were in one


@dataclass(slots=True)
class _Page:
    server: Server
    fd: Fd
    profile: Profile | None = None  # as it was read last


class Watched:
    """A process, and what its servers have written."""

    def __init__(self, process: Process) -> None:
        self.id, self.job, self.uid, self.device = process.row.id, process.job.id, process.job.uid, process.row.device
        self.began = time.time()
        self.pages: dict[int, _Page] = {}
        self.active: int | None = None
        self.past: list[Profile] = []
        self.now = Now()
        self.steps: deque[tuple[float, float]] = deque(maxlen=STEPS_KEPT)  # (end, took), seconds of CLOCK_MONOTONIC
        self.shares: deque[tuple[float, float]] = deque(maxlen=SHARES_KEPT)  # (end, of the time in collectives)
        self.period: int | None = None
        self.live_bytes: int | None = None
        self.peak_bytes: int | None = None
        self._seen_at = time.monotonic()
        self._before: dict[Key, tuple[int, int]] = {}  # calls and bytes at the last look
        self._launches = 0

    @property
    def profiles(self) -> list[Profile]:
        return [*self.past, *(page.profile for page in self.pages.values() if page.profile is not None)]

    def step_ms(self, seconds: float | None = None) -> float | None:
        """The median of the last steps, those that lie in the last so many seconds."""
        begin = 0.0 if seconds is None else time.monotonic() - seconds
        chosen = [took for end, took in list(self.steps) if end - took >= begin]
        return statistics.median(chosen) * 1e3 if chosen else None

    def collectives(self, seconds: float) -> float | None:
        """The median share of the time in which its devices were in a collective, of the last so many seconds."""
        begin = time.monotonic() - seconds
        chosen = [share for end, share in list(self.shares) if end >= begin]
        return statistics.median(chosen) if chosen else None

    def give_pages(self, process: Process, every: int) -> None:
        """Each server that can have the program one day writes from its first record on."""
        self.device, self.active = process.row.device, process.machine.active
        for number, server in process.servers.items():
            if number == process.machine.holder or not server.takes_profiling or not server.pid:
                continue
            page = self.pages.get(number)
            if page is not None and page.server is server:
                continue
            page = self.pages[number] = _Page(server, sealed_memory("xmig-profile", PROFILE_BYTES))
            server.send(m.pack("profile", every=every), (page.fd,))

    def look(self, servers: Mapping[int, Server]) -> None:
        """Read all pages. Not for the event loop's thread."""
        for page in list(self.pages.values()):
            page.profile = read_profile(page.fd) or page.profile
        at = time.monotonic()
        sums = add_up(entry for profile in self.profiles for entry in profile.entries)
        self._compute(sums, max(at - self._seen_at, 1e-6))
        self._seen_at = at
        for number, page in list(self.pages.items()):
            if servers.get(number) is page.server:
                continue
            if page.profile is not None and page.profile.entries:
                self.past = _fold([*self.past, page.profile])
            del self.pages[number]

    def _compute(self, sums: dict[Key, Sum], seconds: float) -> None:
        busy, together, link, host, known = 0.0, 0.0, 0, 0, True
        for key, one in sums.items():
            calls, size = self._before.get(key, (0, 0))
            more = max(0, one.calls - calls)
            if more and one.mean_ns is None:
                known = False
            took = more * (one.mean_ns or 0.0) / 1e9
            busy += took
            together += took if key[0] is Kind.collective else 0.0
            if key[0] in (Kind.collective, Kind.between_devices):
                link += max(0, one.bytes - size)
            elif key[0] in (Kind.to_device, Kind.to_host):
                host += max(0, one.bytes - size)
        self._before = {key: (one.calls, one.bytes) for key, one in sums.items()}
        page = self.pages.get(-1 if self.active is None else self.active)
        profile = None if page is None else page.profile
        if page is None or profile is None:
            self.now = Now()
            return
        self.live_bytes, self.peak_bytes = profile.live_bytes, max(profile.peak_bytes, self.peak_bytes or 0)
        devices = len(self.device.split(","))
        self.now = Now(
            idle_share=max(0.0, 1 - busy / seconds / devices) if known else None,
            step_ms=self._find_steps(page.fd, profile),
            peak_bytes=self.peak_bytes, link_bytes_per_s=link / seconds, host_bytes_per_s=host / seconds,
            collectives=min(1.0, together / seconds / devices) if known else None,
        )  # fmt: skip
        if self.now.collectives is not None:
            self.shares.append((time.monotonic(), self.now.collectives))

    def _find_steps(self, page: Fd, profile: Profile) -> float | None:
        if profile.launches == self._launches:
            return None
        self._launches = profile.launches
        ticks = read_ticks(page, profile.ticks)
        found = None
        for count in (FIRST_LAUNCHES, LAUNCHES):
            found = find_period(read_launches(page, profile.launches, count), self.period)
            if found is not None or profile.launches <= count:
                break
        if found != self.period:
            self.period = found
            self.steps.clear()
        if found is None:
            return None
        last = self.steps[-1][0] if self.steps else 0.0
        # Steps are counted from the last launch back: one that is known already may come again, a little moved.
        new = [step for step in step_times(ticks, found) if step[0] - step[1] / 2 > last]
        self.steps.extend(new)
        return statistics.median(took for _, took in new) * 1e3 if new else None


def _fold(profiles: list[Profile]) -> list[Profile]:
    """As one, so that a process that loses many servers does not take more and more memory."""
    sums = add_up(entry for profile in profiles for entry in profile.entries)
    entries = tuple(
        Entry(
            kind=one.last.kind, name=one.last.name, ordinal=one.last.ordinal, grid=one.last.grid, block=one.last.block,
            shared_bytes=one.last.shared_bytes, calls=one.calls, timed=one.timed, total_ns=one.total_ns,
            bytes=one.bytes, reachable_bytes=one.last.reachable_bytes,
            blocks_per_processor=one.last.blocks_per_processor, processors=one.last.processors,
            threads_per_processor=one.last.threads_per_processor, memory_mbps=one.last.memory_mbps,
            recent_ns=tuple(one.recent_ns[-RECENT:]),
        )
        for one in sums.values()
    )  # fmt: skip
    last = profiles[-1]
    return [
        Profile(
            began=min(one.began for one in profiles), entries=entries, launches=sum(one.launches for one in profiles),
            ticks=0, live_bytes=last.live_bytes, peak_bytes=max(one.peak_bytes for one in profiles),
            unlisted=sum(one.unlisted for one in profiles), samples=sum(one.samples for one in profiles),
            dropped=sum(one.dropped for one in profiles),
        )
    ]  # fmt: skip


class Profiles:
    def __init__(self, processes: Mapping[str, Process], every: int) -> None:
        """One of `every` operations is timed, or fewer; 0: there are no profiles."""
        self._processes = processes
        self.every = every
        self._watched: dict[str, Watched] = {}
        self._over: OrderedDict[str, Watched] = OrderedDict()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self.every:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def of_job(self, job: str) -> list[Watched]:
        """Its processes, those that are over as well, as far as they are kept."""
        found = [*self._over.values(), *self._watched.values()]
        return [one for one in found if one.job == job]

    def step_ms(self, process: str, seconds: float) -> float | None:
        """The median of its last steps that lie in the last so many seconds. None: none is known."""
        found = self._watched.get(process)
        return None if found is None else found.step_ms(seconds)

    def collectives(self, process: str, seconds: float) -> float | None:
        """The share of the time in which its devices were in a collective, of the last so many seconds."""
        found = self._watched.get(process)
        return None if found is None else found.collectives(seconds)

    def sample(self, process: str) -> dict[str, Any]:
        """For its series."""
        found = self._watched.get(process)
        if found is None:
            return {}
        now = found.now
        return {
            "idle_share": now.idle_share, "step_ms": now.step_ms, "peak_bytes": now.peak_bytes,
            "link_bytes_per_s": now.link_bytes_per_s, "host_bytes_per_s": now.host_bytes_per_s,
        }  # fmt: skip

    async def look(self) -> None:
        """At all of them, now."""
        await self._leave_the_dead()
        for process in list(self._processes.values()):
            await asyncio.to_thread(self._watch(process).look, dict(process.servers))

    async def _leave_the_dead(self) -> None:
        """Their pages are read for the last time, and closed."""
        for name in list(self._watched.keys() - self._processes.keys()):
            over = self._over[name] = self._watched.pop(name)
            await asyncio.to_thread(over.look, {})
            while len(self._over) > OVER_KEPT:
                self._over.popitem(last=False)

    async def _run(self) -> None:
        looked = 0.0
        while True:
            try:
                for process in list(self._processes.values()):
                    self._watch(process)
                await self._leave_the_dead()
                if time.monotonic() - looked >= INTERVAL:
                    looked = time.monotonic()
                    await self.look()
            except Exception:
                logger.exception("profiles cannot be read")
                await asyncio.sleep(INTERVAL)
            await asyncio.sleep(GIVE_EVERY)

    def _watch(self, process: Process) -> Watched:
        watched = self._watched.get(process.row.id)
        if watched is None:
            watched = self._watched[process.row.id] = Watched(process)
        watched.give_pages(process, self.every)
        return watched
