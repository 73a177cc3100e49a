"""Which servers are clients of which MPS.

A device that is shared through MPS has two of them for each user with programs there. The servers that have processes
are clients of the first, their standbys are clients of the second.

A fault of one client ends all clients of an MPS, and so does a client that is killed while its kernels run: what
NVIDIA says of that is that nothing is promised of the others. Then this MPS is condemned. All of its servers are
replaced, at once, by standbys that had no part in it. The second MPS is the first from then on, and the next standbys
get a new second one.

Who has caused a fault is not known: MPS tells all clients the same. Whoever reports it first, with others beside it,
is recovered apart: without MPS, where a fault is its own. So a process ends others' servers once at most, and no
program gets the error of another.

Invariants:
  The first has a lower number than the second.
  Nobody joins one that is condemned. It is ended once it has no client any more, or after a while.
  No user's server is a client of another user's MPS.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, Literal

from xmigd import log
from xmigd.mps.control import Control, Owner, Unusable
from xmigd.servers.scopes import Scopes

ENVIRONMENT = "CUDA_MPS_PIPE_DIRECTORY"
SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MOST_ENDS, ENDS_WITHIN = 3, 60.0  # that ended clients, and seconds: so many, and it is not used for a while
MOST_CLIENTS = 48  # of one MPS, by NVIDIA's documentation
WHILE = 60.0  # seconds
LINGER = 10.0  # seconds that it stays without clients
CLIENTS_PATIENCE = 10.0  # seconds that clients of a condemned one may take to end

logger = log.get("mps")

State = Literal["off", "on", "failed"]
# `executes`: it was given a process, and has not stopped since. `copies`: the content of one that another server has.
Work = Literal["none", "copies", "executes"]


class Seat:
    """One client. `lost`, with a reason, is called once: it cannot go on there."""

    def __init__(self, control: Control, lost: Callable[[str], None]) -> None:
        self.control = control
        self.lost = lost
        self.pid = 0  # once it works
        self.work: Work = "none"

    @property
    def works(self) -> bool:
        """Kernels of its may run."""
        return self.work != "none"


class _Domain:
    """Of one device and one user."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.first: Control | None = None
        self.second: Control | None = None
        self.condemned: set[Control] = set()  # until their clients have ended
        self.making: dict[Control, asyncio.Task[None]] = {}
        self.seats: set[Seat] = set()
        self.ends: deque[float] = deque(maxlen=MOST_ENDS)
        self.failed = ""
        self.failed_until = 0.0
        self.number = 0

    def seats_of(self, control: Control) -> list[Seat]:
        return [seat for seat in self.seats if seat.control is control]


class Mps:
    """Lives in the event loop's thread."""

    def __init__(self, folder: Path, devices: Iterable[str], scopes: Scopes) -> None:
        """`folder`: of the daemon's runtime directory; it is made when it is needed."""
        self.devices = frozenset(devices)
        self._folder = folder
        self._scopes = scopes
        self._loop = asyncio.get_running_loop()
        self._domains: dict[tuple[str, int], _Domain] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving = False

    # --- what servers and their processes do --------------------------------------------------------------------------

    async def join(
        self, device: str, uid: int, gid: int, *, standby: bool, lost: Callable[[str], None]
    ) -> Seat | str:  # fmt: skip
        """A seat for a server that is about to be started there; or why it has to do without."""
        if device not in self.devices:
            return "its device is not shared through MPS"
        domain = self._domain(Owner(device, uid, gid))
        while not self._leaving:
            if domain.failed and self._loop.time() < domain.failed_until:
                return domain.failed
            domain.failed = ""
            control = self._choose(domain, second=standby)
            if (task := domain.making.get(control)) is not None:
                await asyncio.shield(task)
                continue  # it may have been condemned meanwhile
            if len(domain.seats_of(control)) >= MOST_CLIENTS:
                return f"its MPS has {MOST_CLIENTS} clients, and takes no more"
            seat = Seat(control, lost)
            domain.seats.add(seat)
            return seat
        return "the daemon is stopping"

    def adopt(self, device: str, uid: int, pid: int, lost: Callable[[str], None]) -> Seat | None:
        """Of a server that an earlier daemon has started. None: it is no client of MPS. One whose MPS has ended
        meanwhile is lost soon."""
        folder = _folder_in(pid)
        if folder is None or folder.parent.parent != self._folder:
            return None
        domain = self._domains.get((device, uid))
        for control in () if domain is None else (domain.first, domain.second):
            if domain is not None and control is not None and control.folder == folder.parent:
                seat = Seat(control, lost)
                self.works(seat, pid, "executes")
                domain.seats.add(seat)
                return seat
        self._loop.call_soon(lost, "the MPS that it was a client of has ended")
        return None

    def works(self, seat: Seat, pid: int, work: Work) -> None:
        """It is about to; or it stands still, and its device is done."""
        seat.pid, seat.work = pid, work
        if seat.works:
            seat.control.client_works(pid)
        else:
            seat.control.client_rests(pid)

    def left(self, seat: Seat) -> None:
        """Its server has ended."""
        domain = self._of(seat.control)
        domain.seats.discard(seat)
        seat.control.client_rests(seat.pid)
        if not domain.seats:
            self._loop.call_later(LINGER, self._end_if_unused, domain)

    def has_others(self, seat: Seat) -> bool:
        """Do other servers with processes have a part in what happens there?"""
        return any(each.works for each in self._of(seat.control).seats_of(seat.control) if each is not seat)

    def condemn(self, control: Control, why: str) -> None:
        """Nobody can go on there: its clients are lost, and what replaces them goes elsewhere."""
        domain = self._of(control)
        if control is domain.first:
            domain.first, domain.second = domain.second, None
        elif control is domain.second:
            domain.second = None
        else:
            return
        control.condemn()
        domain.condemned.add(control)
        seats = domain.seats_of(control)
        logger.warning(
            "an MPS is condemned", device=domain.owner.device, uid=domain.owner.uid, number=control.number, why=why,
            clients=len(seats), log=" | ".join(control.last_lines()) or None,
        )  # fmt: skip
        self._count_end(domain, bool(seats), why)
        for seat in seats:
            seat.lost(why)
        self._task(self._end_condemned(domain, control))

    # --- what others ask ----------------------------------------------------------------------------------------------

    def state(self, device: str) -> tuple[State, str]:
        """Of a device, and why it has failed."""
        if device not in self.devices:
            return "off", ""
        for domain in list(self._domains.values()):
            if domain.owner.device == device and domain.failed and self._loop.time() < domain.failed_until:
                return "failed", f"user {domain.owner.uid}: {domain.failed}"
        return "on", ""

    # --- beginning and end --------------------------------------------------------------------------------------------

    def find_left(self) -> None:
        """Take over what an earlier daemon has started, before its servers announce themselves."""
        living: dict[_Domain, list[Control]] = {}
        for each in [*self._folder.glob("*.json"), *self._folder.glob("*.condemned")]:
            match = re.fullmatch(r"([a-z]+)([0-9]+)\.([0-9]+)\.([0-9]+)\.([0-9]+)", each.stem)
            if match is None:
                continue
            kind, ordinal, uid, gid, number = match[1], *map(int, match.groups()[1:])
            domain = self._domain(Owner(f"{kind}:{ordinal}", uid, gid))
            domain.number = max(domain.number, number)
            control = Control(self._folder, domain.owner, number, self._ended)
            if control.adopt():
                living.setdefault(domain, []).append(control)
        for domain, controls in living.items():
            controls.sort(key=lambda control: control.number)
            domain.first, domain.second = [*controls, None][:2]
            for control in controls:
                self._task(control.look())
            self._loop.call_later(LINGER, self._end_if_unused, domain)

    async def stop(self) -> None:
        """The daemon leaves. What has servers with processes stays with them."""
        self._leaving = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for domain in self._domains.values():
            for condemned in domain.condemned:
                condemned.kill()
            for control in (domain.first, domain.second):
                if control is None:
                    continue
                works = control.has_unannounced or any(seat.works for seat in domain.seats_of(control))
                if control not in domain.making and works:
                    control.leave()
                else:
                    control.kill()

    # --- small parts --------------------------------------------------------------------------------------------------

    def _domain(self, owner: Owner) -> _Domain:
        return self._domains.setdefault((owner.device, owner.uid), _Domain(owner))

    def _of(self, control: Control) -> _Domain:
        return self._domains[control.owner.device, control.owner.uid]

    def _choose(self, domain: _Domain, *, second: bool) -> Control:
        if second and domain.first is not None:
            if domain.second is None:
                domain.second = self._make(domain)
            return domain.second
        if domain.first is None:
            domain.first = self._make(domain)
        return domain.first

    def _make(self, domain: _Domain) -> Control:
        domain.number += 1
        control = Control(self._folder, domain.owner, domain.number, self._ended)
        domain.making[control] = self._task(self._start(domain, control))
        return control

    async def _start(self, domain: _Domain, control: Control) -> None:
        try:
            self._folder.mkdir(mode=0o711, exist_ok=True)
            await control.start(self._scopes)
        except Exception as error:  # whoever waits for it goes on without
            if not isinstance(error, Unusable | OSError):
                logger.exception("an MPS was not started", device=domain.owner.device, uid=domain.owner.uid)
            if control in (domain.first, domain.second):  # else it was condemned meanwhile
                self._fail(domain, str(error))
            if control is domain.first:
                domain.first, domain.second = domain.second, None
            elif control is domain.second:
                domain.second = None
            return
        finally:
            domain.making.pop(control, None)
        logger.info("an MPS runs", device=domain.owner.device, uid=domain.owner.uid, number=control.number)
        if control not in (domain.first, domain.second):  # condemned meanwhile
            control.kill()

    def _ended(self, control: Control, why: str) -> None:
        if control not in self._of(control).making:  # its start says why it fails
            self.condemn(control, why)

    def _count_end(self, domain: _Domain, had_clients: bool, why: str) -> None:
        """By whatever: a program whose servers die again and again does not take its neighbours' with it for ever."""
        now = self._loop.time()
        if had_clients:
            domain.ends.append(now)
        if len(domain.ends) == MOST_ENDS and now - domain.ends[0] < ENDS_WITHIN:
            domain.ends.clear()
            self._fail(domain, f"{MOST_ENDS} times within {ENDS_WITHIN:g} s it has ended; the last time: {why}")

    def _fail(self, domain: _Domain, why: str) -> None:
        domain.failed, domain.failed_until = why, self._loop.time() + WHILE
        logger.error("a device is used without MPS", device=domain.owner.device, uid=domain.owner.uid, why=why,
                     until=f"for {WHILE:g} s")  # fmt: skip

    async def _end_condemned(self, domain: _Domain, control: Control) -> None:
        end = self._loop.time() + CLIENTS_PATIENCE
        while domain.seats_of(control) and self._loop.time() < end:
            await asyncio.sleep(0.05)
        control.kill()
        domain.condemned.discard(control)

    def _end_if_unused(self, domain: _Domain) -> None:
        there = [control for control in (domain.first, domain.second) if control is not None]
        if domain.seats or domain.making or self._leaving or any(control.has_unannounced for control in there):
            return
        for control in there:
            self._task(control.end())
        domain.first = domain.second = None

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _folder_in(pid: int) -> Path | None:
    """Where a process looks for MPS. None: nowhere of its own, or it has ended."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read(1 << 16).split(b"\0")
    except OSError:
        return None
    for variable in variables:
        name, _, value = variable.partition(b"=")
        if name == ENVIRONMENT.encode():
            return Path(value.decode(errors="replace"))
    return None
