"""A move, a suspension or a resumption as a state machine: events in, instructions out, no I/O, no clock.

It is a part of the machine of the process (machine.py), which owns the servers and tells it of them.

Phases
------
move      preparing → copying → committing → handing_over → taking → over
suspend   preparing → handing_over → keeping → releasing → over
resume    preparing → committing → taking → over

preparing     the target server opens its device; of a suspension: the source brings the shadow to host memory or files
copying       rounds: the source takes a snapshot, the target copies what it does not have of it. If its device cannot
              reach the source's: preparing once more, with a new target, while the source brings its shadow to host
              memory
committing    it is being written down who hands over to whom
handing_over  the source is to stop at a last snapshot
keeping       a holder is given every descriptor, so that the daemon may die while no server is there
releasing     the exits of the source and of its standby give the device back
taking        the target restores that snapshot and answers the program
rolling_back  it has failed; who must not go on is not gone yet, or the source still has to say whether it stopped

A rank is suspended and resumed with all others of its group, and waits for them three times: in `preparing`, once it is
prepared; in `handing_over`, once it stands suspended; in `taking`, once its target has everything. `GroupSuspends`
begins `handing_over`, and `GroupResumes` ends `taking`. Others may be on other nodes: that all stand suspended may be
decided and not known here yet. So who stands suspended waits for that also if its server is lost: nothing of that is
needed any more, unless the others are recovered.

The point of no return of a move and of a resumption is the moment at which the target has resumed the program, or all
ranks' targets are let in; of a suspension, that at which the source, or those of all ranks, say that it is suspended.

Who executes? The source until it has handed over, nobody until the target is instructed to take, the target from then
on. The source is instructed to go on only after the exit of a target that was instructed to take has been seen. It is
killed only when the target has resumed the program, and nothing that it holds is dropped before.
"""

from __future__ import annotations

from copy import copy
from typing import Literal

from xmigd.process import migration_events as v
from xmigd.process.events import AskSnapshot, Event, Instruction
from xmigd.process.limits import MoveLimits

SETTLED = 0.8  # a round that took more than this share of the one before: another will not make it less
LOADED_MS = 10.0  # a round that loaded code for longer is followed by another: the program is loading, and soon has all

ABORTABLE: dict[v.Kind, frozenset[v.Phase]] = {
    "move": frozenset({"planning", "preparing", "copying", "committing", "handing_over", "taking"}),
    "suspend": frozenset({"planning", "preparing"}),
    "resume": frozenset({"planning", "preparing", "committing", "taking"}),
}


class Move:
    """See the module's docstring. `begin` once, then `handle`."""

    def __init__(
        self, record: v.MigrationRecord, *, source: int | None, snapshot: int = 0, limits: MoveLimits | None = None,
        ranks: bool = False,
    ) -> None:  # fmt: skip
        self.record = record
        self.ranks = ranks  # all of its group do the same, and it waits for them
        self.limits = limits or MoveLimits()
        self.source = source
        self.target: int | None = None
        self.source_stopped = False
        self.target_took = False
        self.over = False
        self._requested = False  # the source, to stop; its answer is due
        self._waits = False  # for the other ranks
        self._warm = False  # the target is
        self._off_device = False  # the source's shadow is
        self._no_peer = ""  # why the content goes through the host
        self._reroutes = False  # once it is taken back, it begins anew through the host
        self._intents = 0  # that are being written
        self._round = 0
        self._snapshot = snapshot  # the source's last one
        self._awaits_snapshot = False
        self._snapshots: list[int] = []  # when the snapshot of each round was taken
        self._snapshot_ms = 0.0
        self._stopped_at: int | None = None
        self._out: list[Instruction] = []
        self._t = record.started

    @property
    def kind(self) -> v.Kind:
        return self.record.kind

    @property
    def phase(self) -> v.Phase:
        return self.record.phase

    @property
    def feeding(self) -> bool:
        """Has the target been given the source's memory, so that what the source adds and drops goes to it, too?"""
        return self.phase in ("copying", "committing", "handing_over") and self.kind == "move"

    @property
    def leaving(self) -> v.Leaving:
        """Of a rank's suspension: does it stand suspended until all others do, or do they?"""
        if self.ranks and self.kind == "suspend":
            if self.phase in ("keeping", "releasing"):
                return "leaves"
            if self.phase == "handing_over" and self._waits:
                return "waits"
        return ""

    @property
    def in_doubt(self) -> bool:
        """Of a rank: it has done its part, and what is decided may not be known here yet."""
        return self._waits and self.phase in ("handing_over", "taking")

    @property
    def may_cancel(self) -> str | None:
        """None: yes. Otherwise why not."""
        if self.over:
            return "it is over"
        if self.phase == "rolling_back" and not self._reroutes:
            return "it is being taken back already"
        if self.phase != "rolling_back" and self.phase not in ABORTABLE[self.kind]:
            return "it is past the point up to which it can be taken back"
        return None

    def begin(self, t: int) -> list[Instruction]:
        self._out, self._t = [], t
        self._go("preparing")
        if self.kind == "suspend":
            assert self.source is not None
            self._out.append(v.DropStandby())  # it ends meanwhile
            self._out.append(v.PrepareSuspend(self.source, self.record.target, self.ranks))
            self._out.append(v.WantHolder())  # it starts meanwhile
            self._out.append(v.Patience(self.limits.phase_timeout))
        else:
            if self.kind == "move":
                self.record.path = "peer"
            self._out.append(v.WantTarget())
            self._out.append(v.Patience(self.limits.start_timeout))
        return self._out

    def handle(self, event: Event) -> list[Instruction]:
        """Take an event; return what is to be done, in order."""
        self._out, self._t = [], event.t
        if self.over:
            return []
        match event:
            case v.TargetReady():
                self._target_ready()
            case v.SourceSnapshot():
                self._source_snapshot(event)
            case v.SnapshotStands() if event.server == self.source:
                self._snapshot_stands(event)
            case v.RoundProgress() if event.server == self.target:
                self._round_progress(event)
            case v.RoundDone() if event.server == self.target:
                self._round_done(event)
            case v.IntentWritten():
                self._intent_written()
            case v.IntentFailed():
                if self._intent_settled():
                    self._fail("not_recorded", event.reason)
            case v.SuspendProgress() if event.server == self.source:
                self._suspend_progress(event)
            case v.Prepared() if event.server == self.source:
                self._prepared(event)
            case v.HandedOver() if event.server == self.source:
                self._handed_over(event)
            case v.Suspended() if event.server == self.source:
                self._suspended(event)
            case v.GroupSuspends():
                self._group_suspends()
            case v.GroupSuspended():
                if self.phase == "handing_over" and self.source_stopped:
                    self._keep()
            case v.GroupResumes():
                self._group_resumes(event)
            case v.GroupRefuses():
                if self.ranks and self.phase not in ("keeping", "releasing", "rolling_back"):
                    self._fail("group_refused", event.text)
            case v.HandoverFailed() if event.server == self.source:
                self._handover_failed(event)
            case v.TargetPhase():
                self._target_phase(event)
            case v.TargetFailed() if event.server == self.target:
                if event.code == "no_peer" and self.record.path == "peer":
                    self._reroute(event.text)
                elif self.phase != "rolling_back":
                    self._fail(event.code, event.text)
            case v.Kept() | v.HolderGone():
                # Without a holder the daemon holds it all, and goes on trying for one.
                if self.phase == "keeping":
                    self._release()
            case v.TargetGone():
                self._target_gone(event)
            case v.SourceGone():
                self._source_gone(event)
            case v.DeviceLeft():
                if self.phase == "releasing":
                    self._park()
            case v.CancelRequested():
                if self.may_cancel is None:
                    self._give_up("cancelled", event.why)
            case v.ProgramGone():
                if self.phase != "releasing":
                    self._give_up("program_exited", "the program has exited")
            case v.TimeIsUp():
                self._time_is_up()
        return self._out

    def abandon(self, t: int, why: str) -> list[Instruction]:
        """The process has ended; its servers are being killed by whoever says so."""
        self._out, self._t = [], t
        if not self.over:
            if self.record.code is None:
                self.record.code, self.record.error = "program_exited", why
            self._end("failed")
        return self._out

    def validate_state(self) -> None:
        """Raise AssertionError if an invariant does not hold. For tests."""
        record = self.record
        assert self.over == (record.state != "running")
        assert not (self.target_took and self.source is not None and not self.source_stopped)
        if self.phase in ("copying", "committing", "handing_over") and self.kind == "move":
            assert self.source is not None
            assert self.target is not None
            assert not self.target_took
        if self.phase == "taking":
            assert self.target is not None
            assert self.target_took
            assert self.kind == "resume" or self.source is None or self.source_stopped
        if self.phase in ("keeping", "releasing"):
            assert self.kind == "suspend"
            assert self.source_stopped
        if self.phase == "rolling_back":
            assert record.code is not None
            assert self.target_took or self._requested
        if record.state == "done":
            assert record.code is None
            assert record.downtime_ms is None or record.downtime_ms >= 0

    # --- towards the target ------------------------------------------------------------------------------------------

    def _target_ready(self) -> None:
        if self.phase != "preparing" or self.target is None:
            return
        self.record.setup_ms = (self._t - self.record.started) / 1e6
        self._warm = True
        if self.kind == "resume":
            self._commit()
        elif self.record.path == "peer" or self._off_device:
            self._begin_copying()

    def _begin_copying(self) -> None:
        assert self.target is not None
        self._out.append(v.GiveTarget(self.target, "move"))
        self._go("copying")
        self._ask_snapshot()

    def _reroute(self, why: str) -> None:
        """The target cannot map the source's device memory, and ends. It may find out late: the last snapshot is the
        first that a young program has."""
        self._no_peer = why
        if self.phase in ("copying", "committing"):
            self._go_through_host()
        elif self.phase in ("handing_over", "taking"):
            self._reroutes = True
            self._fail("no_peer", why)

    def _go_through_host(self) -> None:
        """What the next target copies from is brought to where every device reaches it."""
        assert self.source is not None
        if self.target is not None:
            self._out.append(v.Dismiss(self.target, self._no_peer))
        self.target, self._warm, self._reroutes = None, False, False
        self._round, self._awaits_snapshot, self._snapshots = 0, False, []
        self.record.path, self.record.iterations = "host", []  # what was copied is lost
        self._go("preparing")
        self._out.append(v.WantTarget())
        self._out.append(AskSnapshot(self.source, host=True))
        self._out.append(v.Patience(self.limits.phase_timeout))

    def _ask_snapshot(self) -> None:
        assert self.source is not None
        self._round += 1
        self._awaits_snapshot = True
        self._out.append(AskSnapshot(self.source))
        self._out.append(v.Patience(self.limits.snapshot_patience))

    def _source_snapshot(self, event: v.SourceSnapshot) -> None:
        self._snapshot, self._snapshot_ms = event.number, event.ms
        if self.phase == "copying" and self._awaits_snapshot:
            self._begin_round()
        elif self.phase == "preparing" and self.record.path == "host" and event.off_device:
            self._off_device = True
            if self._warm:
                self._begin_copying()

    def _snapshot_stands(self, event: v.SnapshotStands) -> None:
        if self.phase == "copying" and self._awaits_snapshot:
            self._snapshot = event.number
            self._begin_round()

    def _begin_round(self) -> None:
        assert self.target is not None
        self._awaits_snapshot = False
        self._snapshots.append(self._t)
        self._out.append(v.AskRound(self.target, self._round, self._snapshot))
        self._out.append(v.Patience(self.limits.phase_timeout))

    def _round_progress(self, event: v.RoundProgress) -> None:
        if self.phase != "copying" or self._awaits_snapshot or event.number != self._round:
            return
        before = sum(iteration.copied_bytes for iteration in self.record.iterations)
        self.record.processed_bytes = before + event.copied_bytes
        self._out.append(v.Progress(copy(self.record)))
        self._out.append(v.Patience(self.limits.phase_timeout))  # it is alive

    def _round_done(self, event: v.RoundDone) -> None:
        if self.phase == "taking" and self.kind == "resume":  # what it had to copy; the rest had come ahead
            self.record.total_bytes, self.record.processed_bytes = event.total_bytes, event.copied_bytes
            return
        if self.phase != "copying" or self._awaits_snapshot or event.number != self._round:
            return
        record = self.record
        record.total_bytes = event.total_bytes
        record.iterations.append(
            v.Iteration(event.number, event.copied_bytes, event.differing_bytes, event.ms, event.loading_ms)
        )
        record.processed_bytes = sum(iteration.copied_bytes for iteration in record.iterations)
        copied = [(i.copied_bytes, i.ms) for i in record.iterations if i.copied_bytes and i.ms > 0]
        if copied:  # of the largest round: small ones are all overhead
            largest = max(copied)
            record.bytes_per_s = largest[0] / largest[1] * 1e3
        if len(self._snapshots) > 1 and self._snapshots[-1] > self._snapshots[-2]:
            record.dirty_bytes_per_s = event.copied_bytes / ((self._snapshots[-1] - self._snapshots[-2]) / 1e9)
        self._out.append(v.Progress(copy(record)))
        self._decide()

    def _decide(self) -> None:
        """Another round, or is the rest small enough, or as small as it gets?"""
        record, rounds = self.record, self.record.iterations
        # What the last round had to copy and to load is what comes up meanwhile. The first one did everything.
        rests = [
            (i.copied_bytes / record.bytes_per_s * 1e3 if record.bytes_per_s else 0.0) + i.loading_ms for i in rounds
        ]
        record.expected_downtime_ms = self._snapshot_ms + rests[-1]
        record.expected_downtime_basis = "the source's last snapshot, and what the last round copied and loaded"
        goal = self.limits.downtime_ms if record.max_downtime_ms is None else record.max_downtime_ms
        too_long = record.expected_downtime_ms > goal or rounds[-1].loading_ms > LOADED_MS
        falls = len(rounds) < 3 or rests[-1] < SETTLED * rests[-2]
        if too_long and falls and len(rounds) < self.limits.max_rounds:
            self._ask_snapshot()
        elif record.max_downtime_ms is not None and record.expected_downtime_ms > record.max_downtime_ms:
            self._fail(
                "downtime",
                f"the program would stand still for about {record.expected_downtime_ms:.0f} ms, more than the "
                f"{record.max_downtime_ms:g} ms allowed: it changes its memory, or loads code, as fast as the target "
                "can follow",
            )
        else:
            self._commit()

    def _commit(self) -> None:
        assert self.target is not None
        self._go("committing")
        self._intents += 1
        self._out.append(v.WriteIntent(copy(self.record), self.target))
        self._out.append(v.Patience(self.limits.phase_timeout))

    def _intent_settled(self) -> bool:
        """Is that the one that is waited for? They are answered in their order."""
        self._intents = max(self._intents - 1, 0)
        return self.phase == "committing" and self._intents == 0

    def _intent_written(self) -> None:
        if not self._intent_settled():
            return
        if self.kind == "resume":
            assert self.target is not None
            self.target_took = True
            self._stopped_at = self._t
            self._go("taking")
            self._out.append(v.GiveTarget(self.target, "resume", waits=self.ranks))
        else:
            assert self.source is not None
            self._requested = True
            self._go("handing_over")
            self._out.append(v.AskHandover(self.source))
            self._out.append(v.Patience(self.limits.handover_timeout))
            return
        self._out.append(v.Patience(self.limits.phase_timeout))

    def _handed_over(self, event: v.HandedOver) -> None:
        if not self._requested or self.kind != "move":
            return
        self._requested, self.source_stopped = False, True
        if self.phase == "rolling_back":
            self._taken_back()
            return
        assert self.target is not None
        self._stopped_at = min(event.drained, self._t)
        self.target_took = True
        self.record.location = "moving"
        self._go("taking")
        self._out.append(v.Take(self.target, event.snapshot))
        self._out.append(v.Patience(self.limits.phase_timeout))

    def _handover_failed(self, event: v.HandoverFailed) -> None:
        if self.phase == "rolling_back" and self._requested:
            self._requested = False
            self._taken_back()
        elif self.phase in ("preparing", "handing_over") and not self.source_stopped:
            self._requested = False
            if self.phase == "preparing" and self.record.path == "host":
                self._fail("no_peer", f"{self._no_peer}; nor can it go through the host: {event.text}")
            else:
                self._fail("source_refused", event.text, source_goes_on=True)

    def _target_phase(self, event: v.TargetPhase) -> None:
        # Also of a target that is being killed: it reported so before it died, and the program has its answers.
        if not self.target_took or self.target is None:
            return
        # A time that a server names is believed between what is known.
        at = max(self._stopped_at or self._t, min(event.at, self._t))
        self.record.phases.append(v.PhaseTime(event.name, at))
        self._out.append(v.Patience(self.limits.phase_timeout))
        if event.name == "restored" and self.ranks and self.phase == "taking":
            self._wait_for_others("restored")
        if event.name != "resumed":
            return
        if self._stopped_at is not None and self.kind == "move":
            self.record.downtime_ms = (at - self._stopped_at) / 1e6
        self._taken()

    def _taken(self) -> None:
        """The process is the target's, for good."""
        assert self.target is not None
        self.record.location, self.record.device = "device", self.record.target
        self.record.code = self.record.error = None
        self._finish("done")
        self._out.append(v.Switch(copy(self.record), self.target))
        self._close()

    # --- suspension --------------------------------------------------------------------------------------------------

    def _suspend_progress(self, event: v.SuspendProgress) -> None:
        if self.phase == "preparing" and self.kind == "suspend":
            self.record.processed_bytes, self.record.total_bytes = event.done_bytes, event.total_bytes
            self._out.append(v.Progress(copy(self.record)))
            self._out.append(v.Patience(self.limits.phase_timeout))

    def _prepared(self, event: v.Prepared) -> None:
        if self.phase != "preparing" or self.kind != "suspend":
            return
        assert self.source is not None
        self.record.setup_ms = event.ms
        self._out.append(v.WantHolder())  # another, if that one has gone
        if self.ranks:
            self._wait_for_others("prepared")
            return
        self._requested = True
        self._go("handing_over")
        self._out.append(v.AskSuspend(self.source))
        self._out.append(v.Patience(self.limits.phase_timeout))

    def _wait_for_others(self, what: Literal["prepared", "suspended", "restored"]) -> None:
        self._waits = True
        self._out.append(v.Waits(what))

    def _group_suspends(self) -> None:
        """Its source is informed by the round."""
        if self.phase != "preparing" or not self._waits:
            return
        self._waits, self._requested = False, True
        self._go("handing_over")
        self._out.append(v.Patience(self.limits.phase_timeout))

    def _group_resumes(self, event: v.GroupResumes) -> None:
        if self.phase != "taking" or not self._waits or self.target is None:
            return
        self._waits = False
        self._out.append(v.LetIn(self.target, event.gone))
        self._taken()

    def _suspended(self, event: v.Suspended) -> None:
        if not self._requested or self.kind != "suspend":
            return
        self._requested, self.source_stopped = False, True
        if self.phase == "rolling_back":
            self._taken_back()
            return
        self.record.total_bytes = self.record.processed_bytes = event.total_bytes
        # What it did between its last record and now is time in which the program could not go on, whoever waits.
        self.record.downtime_ms = event.ms
        if self.ranks:
            self._wait_for_others("suspended")
        else:
            self._keep()

    def _keep(self) -> None:
        self._waits = False
        self.record.code = self.record.error = None
        self.record.location = "file" if self.record.target == "file" else "host"
        self._go("keeping")
        self._out.append(v.Patience(self.limits.keep_timeout))
        self._out.append(v.KeepNow())

    def _release(self) -> None:
        """Nothing of the source is needed any more. The exits of its servers give the device back to the last byte."""
        self._go("releasing")
        if self.source is not None:
            self._out.append(v.Dismiss(self.source, "its process is suspended"))
        self._out.append(v.Patience(self.limits.phase_timeout))
        self._out.append(v.DropDeviceMemory())
        self._out.append(v.LeaveDevice())

    def _park(self) -> None:
        self._finish("done")
        self._out.append(v.Parked())
        self._close()

    # --- what goes wrong ---------------------------------------------------------------------------------------------

    def _give_up(self, code: str, why: str) -> None:
        """Nobody wants it any more."""
        if self._reroutes:  # and is being taken back
            self._reroutes = False
            self.record.code, self.record.error = code, why
        elif self.phase != "rolling_back":
            self._fail(code, why)

    def _fail(self, code: str, text: str, *, source_goes_on: bool = False) -> None:
        """Back to where it was. Nobody is instructed to go on while another may."""
        record = self.record
        if record.code is None:
            record.code, record.error = code, text
        if self.target is not None:
            self._out.append(v.Dismiss(self.target, f"the move is given up: {text}"))
        if self.kind == "suspend" and self.phase == "preparing" and self.source is not None and not source_goes_on:
            self._out.append(v.AbortSuspend(self.source))
        if (self.target_took and self.target is not None) or self._requested:
            self._go("rolling_back")
            waits = (
                self.limits.handover_timeout if self._requested and self.kind == "move" else self.limits.phase_timeout
            )
            self._out.append(v.Patience(waits))
        elif self.source_stopped:
            self._taken_back()
        else:
            self._end("cancelled" if code == "cancelled" else "failed")

    def _taken_back(self) -> None:
        """Is everybody gone, or silent, who has to be?"""
        if self._requested or (self.target_took and self.target is not None):
            return
        source_lost = self.source is None and self.kind != "resume"
        self.record.location = self._location_without_target
        if self.source is not None and self.source_stopped:
            self.source_stopped = False
            self.target_took = False
            self._out.append(v.GoOn(self.source))
        if self._reroutes and not source_lost:
            self.record.code = self.record.error = None
            self._go_through_host()
            return
        self._end("cancelled" if self.record.code == "cancelled" else "failed", source_lost=source_lost)

    @property
    def _location_without_target(self) -> v.Location:
        if self.kind == "resume":
            return "file" if self.record.source == "file" else "host"
        return "device"

    def _target_gone(self, event: v.TargetGone) -> None:
        took = self.target_took
        self.target = None
        if self.phase == "rolling_back":
            self._taken_back()
            return
        if self.record.code is None:
            self.record.code, self.record.error = event.code, event.text
        if took:
            self._go("rolling_back")
            self._taken_back()
        else:
            self._fail(event.code, event.text)

    def _source_gone(self, event: v.SourceGone) -> None:
        self._requested = False
        self.source = None
        why = f"the server that had the program was lost: {event.text}"
        if self.phase == "rolling_back":
            self._taken_back()
        elif self.leaving == "waits":
            self.record.code, self.record.error = "source_lost", why  # if that is not decided
        elif self.phase not in ("keeping", "releasing", "taking"):  # then it has done its part
            self._fail("source_lost", why)

    def _time_is_up(self) -> None:
        if self._waits and self.phase != "rolling_back":
            self._out.append(v.Patience(self.limits.phase_timeout))  # each of the others has its own time
        elif self.phase == "keeping":
            self._release()
        elif self.phase == "copying" and self._awaits_snapshot:
            self._begin_round()  # with the last one that there is
        elif self.phase == "releasing":
            self._out.append(v.Patience(self.limits.phase_timeout))  # they were killed: exits take what they take
        elif self.phase == "rolling_back":
            if self._requested and self.source is not None:
                self._out.append(v.Dismiss(self.source, "it does not say whether it has stopped"))
            self._out.append(v.Patience(self.limits.phase_timeout))
        elif self.phase == "handing_over":
            assert self.source is not None
            self._fail("timeout", "the source did not stop in time")
            self._out.append(v.Dismiss(self.source, "it did not stop in time"))
        else:
            self._fail("timeout", f"no progress in time while {self.phase.replace('_', ' ')}")

    # --- small parts -------------------------------------------------------------------------------------------------

    def _go(self, phase: v.Phase) -> None:
        self.record.phase = phase
        self.record.phases.append(v.PhaseTime(phase, self._t))
        self._out.append(v.SaveMigration(self._copy()))

    def _finish(self, state: v.Outcome) -> None:
        self.record.state, self.record.ended, self.record.phase = state, self._t, "over"
        self.record.phases.append(v.PhaseTime("over", self._t))

    def _end(self, state: v.Outcome, *, source_lost: bool = False) -> None:
        if self.record.path == "host" and self.source is not None:
            self._out.append(AskSnapshot(self.source, host=False))
        self._finish(state)
        self._close(source_lost=source_lost)

    def _close(self, *, source_lost: bool = False) -> None:
        self.over = True
        self._out.append(v.SaveMigration(self._copy()))
        self._out.append(v.Over(source_lost))

    def _copy(self) -> v.MigrationRecord:
        record = copy(self.record)
        record.phases, record.iterations = list(record.phases), list(record.iterations)
        return record
