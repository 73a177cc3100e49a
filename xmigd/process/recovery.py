"""Recoveries: what is done when a server of the process dies, from its first server to its end. Pure.

It knows nothing of moves; `machine.py` adds them, and says what else may become of a server.

Whose fault?
------------
A fault (record, error) that occurs again at the same record in the replay that follows is the program's own: the next
server has to deliver it. A device that works asynchronously cannot say which record it was, only that it was one of
those that were not known to be done; then the replay does these one by one, and if one of them faults in the same way,
that is the same fault. Where several processes share an MPS, a fault may be any one's: who reports it does not get it,
and is recovered apart, where the next one is its own. Injected faults say so themselves and never count. Everything
else is repeated, but only while
there is progress: a new snapshot, a replay that got further than the best before, or a while of undisturbed running.
After `max_attempts` recoveries without any of these the process is lost. A SIGKILL does not count either: it came from
outside. Where no rank of a group gets further, neither the replay nor running on is progress: all get as far again
before they hang. But whatever killed them, servers that die without progress get their successors ever more slowly: the
first few at once, the others after a pause that doubles up to `LAST_BACKOFF` and that the process's state tells of.

Running out of something (descriptors, processes, memory) is nobody's fault: starting a server is tried again, ever more
slowly, for as long as the program lives.
"""

from __future__ import annotations

import signal
from copy import copy
from dataclasses import dataclass

from xmigd.process import events as e
from xmigd.process.core import FIRST_BACKOFF, LAST_BACKOFF, Death, ServerState
from xmigd.process.group import GroupMember
from xmigd.process.limits import Limits

CUDA_ERROR_OUT_OF_MEMORY = 2
CUDA_ERROR_DEVICE_UNAVAILABLE = 46
CUDA_ERROR_LAUNCH_TIMEOUT = 702
CUDA_ERROR_SYSTEM_NOT_READY = 802
CUDA_ERRORS_MPS = range(805, 811)  # of its connection, its server, its clients

LOST_TRIES = 3
AT_ONCE = 3  # servers that are replaced without a pause, of those lost in a row without progress


@dataclass(frozen=True, slots=True)
class _Window:
    """A fault of one of the records after `after` up to `until`."""

    after: int
    until: int
    error: int


class Recovery(GroupMember):
    """See the module's docstring."""

    def __init__(self, limits: Limits | None = None, *, faults: int = 0, recoveries: int = 0) -> None:
        super().__init__(limits)
        self.doom: tuple[int, str] | None = None  # CUresult and sentence of a process that is being lost
        self.attempts = 0  # recoveries (or first starts) since the last progress
        self.recovery: e.RecoveryRecord | None = None
        self._faults = faults
        self._recoveries = recoveries
        self._lost_in_a_row = 0  # servers, whatever killed them, since the last progress
        self._hung = 0  # how often its group was, since the last snapshot
        self._injecting: dict[int, int] = {}  # server -> injection
        self._suspect: e.Deliver | None = (
            None  # injected once; a snapshot behind it proves that it was not the program's own
        )
        self._window: _Window | None = None  # likewise, of a record that is not known
        self._delivered: e.Deliver | None = (
            None  # the program's own; comes back in every replay until a snapshot passes it
        )
        self._replay_from = (
            0  # number of the snapshot that the replay under way began at; it may take others on its way
        )
        self._best = (0, -1)  # snapshot number, records of the replay that got furthest
        self._lost_tries = 0
        self._prepared: e.Prepare | None = None  # what the standby that prepares was sent
        self._reported: dict[int, str] = {}  # why a server that never was ready is about to exit

    # --- the entry ---------------------------------------------------------------------------------------------

    def _take(self, event: e.Event) -> None:
        match event:
            case e.ClientArrived():
                self._client_arrived()
            case e.Adopted():
                self._adopted(event)
            case e.Orphaned():
                self._orphaned(event)
            case e.ClientExited():
                self._client_exited(event)
            case e.StopRequested():
                self._stop_requested(event)
            case e.HandleMissed():
                self.unrecoverable = event.reason
            case e.DeviceLost():
                self._device_lost(event)
            case e.Salvaged():
                self._salvaged(event)
            case e.ReplicaDiffers():
                self._fault("corruption", event.reason)  # which no server has noticed, and none ends of
            case e.InjectRequested():
                self._inject(event)
            case e.TimerFired():
                if event.name in self._timers:
                    self._timers.discard(event.name)
                    self._timer_fired(event)
            case e.SpawnFailed():
                self._server_unavailable(event.server, event.reason)
            case e.Hello():
                self._hello(event)
            case e.Unavailable():
                self._unavailable(event)
            case e.Ready():
                self._ready(event)
            case e.Opened():
                self._opened(event)
            case e.Joining():
                self._joins(event)
            case e.PhaseReached():
                self._phase(event)
            case e.SnapshotCommitted():
                self._snapshot_committed(event)
            case e.Faulted():
                self._faulted(event)
            case e.ProgramError():
                self._program_error(event)
            case e.InjectionFires():
                self._injection_fires(event)
            case e.GarbageFound():
                self._garbage(event)
            case e.SaidBye():
                pass  # its exit follows; whether that was right is decided by whether the program has exited
            case e.Misbehaved():
                self._misbehaved(event)
            case e.Stranded():
                self._stranded(event)
            case e.Ending():
                self._ending(event)
            case e.Exited():
                self._exited(event)
            case e.GroupHung():
                self._group_hung(event.reason)
            case _:
                self._take_of_group(event)

    # --- beginnings --------------------------------------------------------------------------------------------

    def _client_arrived(self) -> None:
        if self.servers:
            return
        self._timer("start", self.limits.start_timeout)
        self._save("a program has connected")
        self.active = self._spawn()

    def _adopted(self, event: e.Adopted) -> None:
        number = self._new_number()
        self.servers[number] = "assigned"
        self.active = number
        self.opened = event.opened
        if event.joining:
            self._joining.add(number)
        self._interrupted(event.interrupted, "its server outlived that and has announced itself")
        self._go("running", "its server outlived the daemon and has announced itself")
        if event.detour:
            self._out.append(e.AskSnapshot(number, host=False))
        self._want_standby()

    def _orphaned(self, event: e.Orphaned) -> None:
        if self.state != "starting" or self.servers:
            return
        self.opened = event.opened
        self._interrupted(event.interrupted, "the next recovery goes on")
        self._begin_recovery(event.reason)

    def _interrupted(self, record: e.RecoveryRecord | None, how: str) -> None:
        if record is not None:
            record.outcome = "interrupted"
            record.story.append(f"{e.INTERRUPTED}: {how}")
            self._recoveries = max(self._recoveries, record.number)
            self._out.append(e.SaveRecovery(record))

    def _begin_recovery(self, reason: str) -> None:
        """No server has it, and a daemon that is new finds that out."""
        record = self._fault("server", reason)
        self._recoveries += 1
        self.recovery = e.RecoveryRecord(
            number=self._recoveries, cause=reason, fault=record.number, occurred=self._t, detected=self._t
        )
        self.recovery.story.append(reason)
        self._go("recovering", reason)
        self._replace()

    def _hello(self, event: e.Hello) -> None:
        if self.servers[event.server] != "spawning":
            return
        self.servers[event.server] = "warm"
        self._backoff = FIRST_BACKOFF
        if event.server == self.active:
            self._assign()

    def _unavailable(self, event: e.Unavailable) -> None:
        """A program that only begins is informed at once, as it would be natively. One that runs goes on: what its
        device lacks now, it may have again."""
        if self.servers[event.server] != "spawning":
            return
        if self.state == "starting":
            self._refuse(event.error, event.text)
            return
        self._reported[event.server] = event.text
        self._alone |= event.server == self.standby and event.error == CUDA_ERROR_DEVICE_UNAVAILABLE

    def _ready(self, event: e.Ready) -> None:
        if event.server != self.active or self.state != "starting" or self.servers[event.server] != "assigned":
            return
        self._clear("start")
        self._out.append(e.Admit())
        self.attempts = 0
        self.opened = event.opened
        self._go("running", "the server is ready")
        self._want_standby()

    def _opened(self, event: e.Opened) -> None:
        if event.server != self.active:
            return
        self.opened = True
        if self.state == "running":
            self._want_standby(self.limits.settle)

    def _joins(self, event: e.Joining) -> None:
        if event.joining:
            self._joining.add(event.server)
        else:
            self._joining.discard(event.server)
        if event.server != self.active:
            return
        if event.joining and "settle" in self._timers:
            self._clear("settle")
            self._want_standby()
        elif not event.joining and "join" in self._timers:
            self._spawn_standby()

    # --- giving the process to a server --------------------------------------------------------------------------

    def _assign(self) -> None:
        """The active server is warm: give it the process."""
        assert self.active is not None
        number = self.active
        if self._must_wait_for_group:
            return
        prepared = self.servers[number] == "preparing"
        self.servers[number] = "assigned"
        injections = tuple(self.armed.values())
        if self.state == "losing" and self._salvage:
            self._out.append(e.Assign(number, "recover", hold=True))
            self._timer("phase", self.limits.phase_timeout)
            return
        if self.state == "losing":
            assert self.doom is not None
            self._out.append(e.Assign(number, "lost", error=self.doom[0], text=self.doom[1]))
            self._timer("phase", self.limits.start_timeout)
            return
        if self.state == "starting":
            self._out.append(e.Assign(number, "fresh", injections=injections))
            return
        assert self.recovery is not None
        deliver = self._delivered
        if prepared:
            assert self._prepared is not None
            self._out += [e.Arm(number, one) for one in injections if one not in self._prepared.injections]
            self._out.append(e.Enter(number))
        else:
            assign = e.Assign(number, "recover", deliver=deliver, careful=self._careful, injections=injections)
            self._out.append(self._with_group(assign))
        self._replay_from = self._snapshot[0]
        self.recovery.standby_ready = self._t
        self.recovery.snapshot = self._snapshot[0]
        if deliver is not None:
            self.recovery.delivered_sequence, self.recovery.delivered_error = deliver.sequence, deliver.error
        # The watchdog comes first: it knows that a kernel hangs, a time-out does not know why nothing happens.
        self._timer("phase", self.limits.phase_timeout + self.limits.hang_timeout)
        self._save_recovery()

    @property
    def _careful(self) -> e.Careful | None:
        return None if self._window is None else e.Careful(self._window.after, self._window.until)

    def _ending(self, event: e.Ending) -> None:
        """The active server will be recovered from: the standby does what it can in the meantime. Whether it is given
        the process is decided when the exit is seen, which says how it ended."""
        if event.server != self.active or self.servers[event.server] not in ("assigned", "dying"):
            return
        recoverable = self.state in ("running", "recovering") and self.unrecoverable is None
        self._break("it has ended")
        if self.grouped or not recoverable or self._lost_in_a_row >= AT_ONCE:
            return
        if self.standby is not None and self.servers[self.standby] == "warm":
            self.servers[self.standby] = "preparing"
            injections = tuple(self.armed.values())
            self._prepared = e.Prepare(self.standby, self._delivered, self._careful, injections)
            self._out.append(self._prepared)

    def _drop_what_was_prepared_in_vain(self) -> None:
        """It can do nothing else any more."""
        if self.standby is None or self.servers[self.standby] != "preparing":
            return
        reported = self._prepared
        assert reported is not None
        if self.state != "recovering" or (reported.deliver, reported.careful) != (self._delivered, self._careful):
            self._drop_standby()

    def _replace(self) -> None:
        """The active server is gone and another must take its place."""
        self.active = None
        self._do_not_wait()
        self._await_group()
        self._drop_what_was_prepared_in_vain()
        if self.standby is not None:
            number, self.standby = self.standby, None
            self.active = number
            warm = self.servers[number] in ("warm", "preparing")
            if self.recovery is not None:
                self.recovery.standby = "warm" if warm else "warming"
            if warm:
                self._assign()
            return
        if self.recovery is not None:
            self.recovery.standby = "spawned"
        if "spawn" not in self._timers:
            self.active = self._spawn()

    def _phase(self, event: e.PhaseReached) -> None:
        if event.server != self.active or self.state != "recovering" or self.servers[event.server] != "assigned":
            return
        record = self.recovery
        assert record is not None
        at = max(record.standby_ready or record.detected, min(event.at, event.t))
        self._timer("phase", self.limits.phase_timeout + self.limits.hang_timeout)
        if event.name == "mapped":
            record.mapped = at
        elif event.name == "restored":
            record.restored = at
        elif event.name == "replayed":
            record.replayed = at
            record.records, record.compared = event.records, event.compared
            record.differing, record.first_difference = event.differing, event.first_difference
            self._replay_passed(event.records)
        else:
            record.resumed = at
            self._resumed()

    def _replay_passed(self, records: int) -> None:
        if (self._replay_from, records) > self._best:
            self._best = (self._replay_from, records)
            self._progressed()

    def _progressed(self) -> None:
        self.attempts = self._lost_in_a_row = 0

    def _resumed(self) -> None:
        assert self.recovery is not None
        record, self.recovery = self.recovery, None
        record.outcome = "resumed"
        self._clear("phase")
        self._out.append(e.SaveRecovery(record))
        self._alone = False  # what was true once is tried again
        self._go("running", f"recovered: {record.cause}")
        self._timer("stable", self.limits.stable_after)
        self._want_standby()

    def _snapshot_committed(self, event: e.SnapshotCommitted) -> None:
        if event.server != self.active or event.number <= self._snapshot[0]:
            return
        self._snapshot = (event.number, event.sequence)
        self._hung = 0
        self._progressed()
        if self._delivered is not None and event.sequence > self._delivered.sequence:
            self._delivered = None
        if self._suspect is not None and event.sequence > self._suspect.sequence:
            self._suspect = None
        if self._window is not None and event.sequence > self._window.until:
            self._window = None

    # --- what goes wrong -----------------------------------------------------------------------------------------

    def _faulted(self, event: e.Faulted) -> None:
        """A sticky fault. The server would exit by itself; killing it is quicker and cannot be refused."""
        if event.server != self.active or event.server in self._deaths:
            return
        injection = self._injecting.pop(event.server, None)
        shared = injection is None and event.shared
        ended = event.error in CUDA_ERRORS_MPS
        if ended:
            pass  # the MPS has, and no program's work has caused that
        elif shared:
            self._out.append(e.StayApart(event.text or f"CUDA error {event.error}"))
            self._drop_standby()
        elif injection is None and self.servers[event.server] == "assigned":
            if event.sequence != 0:
                self._suspect_or_deliver(e.Deliver(event.sequence, event.error))
            else:
                self._look_for_culprit(_Window(event.after, event.until, event.error))
        record = self._fault(
            "device" if injection is None else "injected",
            event.text or f"CUDA error {event.error}",
            sequence=event.sequence or None,
            op=event.op,
            error=event.error,
            injection=injection,
        )
        self._deaths[event.server] = Death(
            record,
            min(event.at, event.t),
            innocent=injection is not None or shared or ended,
            expected=event.expected,
        )
        self._break(record.text)
        self._kill(event.server, "it reported a sticky fault")

    def _stranded(self, event: e.Stranded) -> None:
        """Its standby can take over: it had no part in that."""
        state = self.servers[event.server]
        if state == "dying":
            return
        if event.server == self.active and event.server not in self._deaths:
            works = state == "assigned" and self.state in ("running", "recovering")
            record = self._fault("server", event.reason) if works else None
            self._deaths[event.server] = Death(record, self._t, innocent=True, why=event.reason)
            self._break(event.reason)
        self._kill(event.server, event.reason)
        if event.server == self.standby:
            self.standby = None
            self._retry_later(f"the standby ends: {event.reason}")

    def _device_lost(self, event: e.DeviceLost) -> None:
        """No program can cause that."""
        if self.state not in ("starting", "running", "recovering", "draining"):
            return
        self._drop_standby()
        number = self.active
        if number is None or self.servers[number] == "dying":
            return
        if number not in self._deaths and self.state != "draining":
            self._deaths[number] = Death(self._fault("server", event.reason), self._t, innocent=True)
            self._break(event.reason)
        self._kill(number, event.reason)

    def _suspect_or_deliver(self, fault: e.Deliver) -> None:
        window = self._window
        in_window = window is not None and window.after < fault.sequence <= window.until and window.error == fault.error
        if fault == self._suspect or in_window:
            self._delivered, self._suspect, self._window = fault, None, None
        else:
            self._suspect = fault

    def _look_for_culprit(self, fault: _Window) -> None:
        """If a careful replay did not meet it where it was looked for, the next one looks everywhere."""
        window = self._window
        if window is None or window.error != fault.error or fault.after >= window.until:
            self._window = fault
        else:
            self._window = _Window(0, max(window.until, fault.until), fault.error)

    def _group_hung(self, reason: str) -> None:
        """No rank of its group gets further. What was injected into another one is not known here, and counts."""
        active = self.active
        if self.grouped and active is not None and self.servers[active] == "assigned" and active not in self._deaths:
            injection = self._injecting.pop(active, None)
            kind: e.FaultKind = "timeout" if injection is None else "injected"
            record = self._fault(kind, reason, error=CUDA_ERROR_LAUNCH_TIMEOUT, injection=injection)
            self._deaths[active] = Death(record, innocent=injection is not None)
            self._hung += injection is None
        self._group_lost(reason)

    def _program_error(self, event: e.ProgramError) -> None:
        if event.server != self.active:
            return
        self._fault(
            "program",
            "the fault came back at the same record and was handed to the program",
            sequence=event.sequence,
            error=event.error,
        )

    def _injection_fires(self, event: e.InjectionFires) -> None:
        injection = self.armed.pop(event.id, None)
        if injection is not None and injection.kind != "flip":  # which no server ends of
            self._injecting[event.server] = event.id

    def _garbage(self, event: e.GarbageFound) -> None:
        if event.server != self.active or event.server in self._deaths:
            return
        text = f"the server gave the process up at journal position {event.position}: {event.text}"
        self._deaths[event.server] = Death(self._fault("garbage", text))
        self.unrecoverable = text
        self._break(text)
        self._kill(event.server, "it gave its process up")

    def _misbehaved(self, event: e.Misbehaved) -> None:
        if self.servers[event.server] == "dying":
            return
        self._kill(event.server, event.reason)
        if event.server == self.standby:
            self.standby = None
            self._retry_later(f"the standby misbehaved: {event.reason}")
        elif event.server == self.active and event.server not in self._deaths and self.state != "draining":
            self._deaths[event.server] = Death(self._fault("protocol", event.reason))
            self._break(event.reason)

    def _exited(self, event: e.Exited) -> None:
        state = self.servers[event.server]
        death, injecting, status = self._forget(event)
        if event.server == self.standby:
            self.standby = None
            if self._alone:
                self._save(f"there will be no standby: {status}")
            elif self.state == "running":
                self._retry_later(f"the standby ended: {status}")
            return
        if event.server != self.active:
            return
        self.active = None
        if self._was_to_leave(status):
            return
        if self.state == "draining":
            self._end("the program has exited")
        elif self.state == "losing":
            self._losing_server_exited(event, state)
        elif death is None and state in ("spawning", "warm"):
            self._server_gone_before_work(f"a server ended before it had the process: {status}")
        else:
            if death is None:
                injected = injecting is not None
                text = f"the server was lost: {event.status}" + (" (injected)" if injected else "")
                record = self._fault("injected" if injected else "server", text, injection=injecting)
                innocent = injected or event.killed
                death = Death(record, min(event.since or event.t, event.t), innocent, event.expected)
            self._server_lost(death, status)

    def _forget(self, event: e.Exited) -> tuple[Death | None, int | None, str]:
        """Its server. Returns why it died, which injection ended it, and why it ended."""
        del self.servers[event.server]
        self._joining.discard(event.server)
        death = self._deaths.pop(event.server, None)
        return death, self._injecting.pop(event.server, None), self._reported.pop(event.server, event.status)

    def _was_to_leave(self, status: str) -> bool:
        """Was the active server's exit what was requested of it?"""
        return False

    def _server_lost(self, death: Death, status: str) -> None:
        """The active server is gone, and nobody requested that."""
        self._recover(death)

    def _recover(self, death: Death) -> None:
        """Nobody has the process."""
        record = death.record
        cause = record.text if record is not None else death.why or "the server was lost"
        if not death.innocent:
            self.attempts = max(self.attempts + 1, self._hung)
        if self.state == "starting":
            if self.attempts >= self.limits.max_attempts:
                self._refuse(CUDA_ERROR_SYSTEM_NOT_READY, f"the server could not start: {cause}")
            else:
                self._replace()
            return
        self._broken_for_good(cause)
        if self.recovery is None:
            self._recoveries += 1
            self.recovery = e.RecoveryRecord(
                number=self._recoveries,
                cause=cause,
                fault=record.number if record else None,
                occurred=death.occurred if death.occurred is not None else self._t,
                detected=self._t,
                expected=death.expected,
            )
        else:
            again = self.recovery
            again.attempts += 1
            again.standby_ready = again.mapped = again.restored = again.replayed = None
        self.recovery.story.append(cause)
        self._clear("stable")
        if self.unrecoverable is not None:
            self._lose(CUDA_ERROR_DEVICE_UNAVAILABLE, self.unrecoverable)
        elif self.attempts > self.limits.max_attempts:
            error = record.error if record is not None and record.error else CUDA_ERROR_DEVICE_UNAVAILABLE
            self._lose(error, f"{self.limits.max_attempts} recoveries in a row made no progress; the last: {cause}")
        else:
            if self.state != "recovering":
                self._go("recovering", cause)
            self._lost_in_a_row += 1
            if self._lost_in_a_row <= AT_ONCE:
                self._replace()
            else:
                self._pause()

    def _pause(self) -> None:
        """Something kills every server before it comes further: replacing them at once would only use the machine up.
        A warm standby waits, too."""
        assert self.recovery is not None
        count = self._lost_in_a_row
        seconds = min(FIRST_BACKOFF * 2 ** (count - AT_ONCE - 1), LAST_BACKOFF)
        why = f"{count} servers in a row were lost without progress; the next one follows in {seconds:g} s"
        self.recovery.story.append(why)
        self._save_recovery()
        self._save(why)
        self._timer("spawn", seconds)

    def _server_unavailable(self, number: int, reason: str) -> None:
        """It could not be started at all."""
        del self.servers[number]
        if number == self.standby:
            self.standby = None
            self._retry_later(f"no standby: {reason}")
        elif number == self.active:
            self.active = None
            self._server_gone_before_work(f"no server could be started: {reason}")

    def _server_gone_before_work(self, why: str) -> None:
        self._fault("spawn", why)
        if self.recovery is not None:
            self.recovery.story.append(why)
            self._save_recovery()
        if self.state == "starting":
            self.attempts += 1
            if self.attempts >= self.limits.max_attempts:
                self._refuse(CUDA_ERROR_SYSTEM_NOT_READY, why)
                return
        self._retry_later(why)

    def _retry_later(self, why: str) -> None:
        if "spawn" in self._timers or not (self._standby_wanted or self.active is None):
            return
        self._save(f"{why}; trying again in {self._backoff:g} s")
        self._timer("spawn", self._backoff)
        self._backoff = min(self._backoff * 2, LAST_BACKOFF)

    def _timer_fired(self, event: e.TimerFired) -> None:
        match event.name:
            case "start":
                if self.state == "starting":
                    self._refuse(
                        CUDA_ERROR_SYSTEM_NOT_READY, f"no server was ready within {self.limits.start_timeout:g} s"
                    )
            case "spawn":
                if self.active is None and self.state in ("starting", "recovering", "losing"):
                    self._replace()
                elif self.state == "running":
                    self._want_standby()
            case "settle" | "join":
                if self.state == "running":
                    self._spawn_standby()
            case "phase":
                if self.active is not None and self.servers[self.active] == "assigned":
                    if self.active not in self._deaths:
                        text = "the server made no progress in time"
                        self._deaths[self.active] = Death(self._fault("timeout", text))
                        self._break(text)
                    self._kill(self.active, "it made no progress in time")
            case "stable":
                if self.state == "running":
                    self._progressed()
            case "drain":
                if self.state == "draining":
                    self._end("the program has exited; its server did not finish in time")
            case "stop":
                self._out.append(e.SignalClient(signal.SIGKILL, "it did not exit after SIGTERM"))

    # --- endings -------------------------------------------------------------------------------------------------

    def _stop_requested(self, event: e.StopRequested) -> None:
        if "stop" in self._timers:
            return
        self._out.append(e.SignalClient(signal.SIGTERM, event.reason))
        self._timer("stop", self.limits.stop_grace)

    def _client_exited(self, event: e.ClientExited) -> None:
        if self.state == "running" and self.active is not None and self.servers[self.active] == "assigned":
            self._drop_standby()
            self._program_gone()
            self._go("draining", event.reason)
            self._timer("drain", self.limits.stop_grace)
        elif self.state == "draining":
            return
        else:
            self._end(event.reason)

    def _program_gone(self) -> None:
        """It has exited, and its server has a moment to finish."""

    def _lose(self, error: int, why: str) -> None:
        self.doom = (error, why)
        if self.recovery is not None:
            record, self.recovery = self.recovery, None
            record.outcome = "lost"
            record.story.append(why)
            self._out.append(e.SaveRecovery(record))
        self._clear("phase")
        self._waits_in_vain(why)
        # A rank's snapshot is of no use without those of its group.
        has_snapshot = self.unrecoverable is None and self._snapshot[0] != 0 and not self.grouped
        self._salvage = self.limits.last_checkpoint and has_snapshot
        self._go("losing", why)
        self._replace()

    def _salvaged(self, event: e.Salvaged) -> None:
        """Saved or not: from here on nothing but its end is left."""
        number = self.active
        if self.state == "losing" and self._salvage and number is not None and self.servers[number] == "assigned":
            self._kill(number, event.reason)

    def _losing_server_exited(self, event: e.Exited, state: ServerState) -> None:
        if self._salvage:
            self._salvage = False
            self._clear("phase")
            self._replace()
            return
        if state in ("spawning", "warm"):
            self._server_gone_before_work(f"a server ended before it had the process: {event.status}")
            return
        self._lost_tries += 1
        if not event.clean and self._lost_tries < LOST_TRIES:
            self._replace()
            return
        assert self.doom is not None
        self._clear("phase")
        self._drop_standby()
        self._go("lost", self.doom[1])
        self._out.append(e.Release())

    def _refuse(self, error: int, why: str) -> None:
        self._out.append(e.Refuse(error, why))
        self._end(why)

    def _end(self, why: str) -> None:
        if self.recovery is not None:
            record, self.recovery = self.recovery, None
            record.outcome = "abandoned"
            record.story.append(why)
            self._out.append(e.SaveRecovery(record))
        self._abandon(why)
        for number, state in list(self.servers.items()):
            if state != "dying":
                self._kill(number, why)
        self.active = self.standby = None
        for timer in sorted(self._timers):
            self._clear(timer)
        released = self.state == "lost"
        self._go("ended", why)
        if not released:
            self._out.append(e.Release())
        self._out.append(e.Finish())

    def _abandon(self, why: str) -> None:
        """What is under way besides recovering, before the end."""

    # --- small parts -----------------------------------------------------------------------------------------------

    def _inject(self, event: e.InjectRequested) -> None:
        self.armed[event.injection.id] = event.injection
        if self.active is not None and self.servers[self.active] == "assigned" and self.state != "losing":
            self._out.append(e.Arm(self.active, event.injection))

    def _fault(
        self,
        kind: e.FaultKind,
        text: str,
        *,
        sequence: int | None = None,
        op: str | None = None,
        error: int | None = None,
        injection: int | None = None,
    ) -> e.FaultRecord:
        self._faults += 1
        record = e.FaultRecord(
            number=self._faults,
            kind=kind,
            t=self._t,
            text=text,
            sequence=sequence,
            op=op,
            error=error,
            injection=injection,
        )
        self._out.append(e.SaveFault(record))
        return record

    def _save_recovery(self) -> None:
        assert self.recovery is not None
        record = copy(self.recovery)
        record.story = list(record.story)
        self._out.append(e.SaveRecovery(record))
