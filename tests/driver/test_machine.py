"""The machine against a driver that is made up: every order of failures, every moment of a cancellation."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from xmigd.driver_checkpoint.machine import Call, Checkpointing, Kind, Result, State

ENDS = ("running", "locked", "checkpointed", "failed")


class Process:
    """What the driver knows of it."""

    def __init__(self, state: State) -> None:
        self.state: State = state
        self.on = "source"

    def carry_out(self, call: Call) -> None:
        before: dict[str, State] = {"lock": "running", "checkpoint": "locked", "restore": "checkpointed",
                                    "unlock": "locked"}  # fmt: skip
        after: dict[str, State] = {"lock": "locked", "checkpoint": "checkpointed", "restore": "locked",
                                   "unlock": "running"}  # fmt: skip
        if call.name in before:
            assert self.state == before[call.name], f"{call} in {self.state}"
            self.state = after[call.name]
            if call.name == "restore":
                self.on = call.where


# What a call does: as it should, refuses and changes nothing, does it but says that it failed, or breaks the process.
Behaviour = st.sampled_from(["ok", "ok", "ok", "refuses", "lies", "breaks", "dies"])


def run(machine: Checkpointing, process: Process, behaviours: list[str], cancel_at: int | None = None) -> list[Call]:
    calls: list[Call] = []
    rooms: set[str] = set()
    call = machine.begin(process.state)
    while call is not None:
        calls.append(call)
        assert len(calls) < 500, "it does not end"
        if cancel_at == len(calls):
            machine.cancel("somebody")
        behaviour = behaviours.pop(0) if behaviours else "ok"
        if call.name == "restore":
            assert call.where in rooms, "restored without having seen the room"
            rooms.discard(call.where)
        error = None if behaviour == "ok" else behaviour
        if call.name == "room":
            error = None if behaviour in ("ok", "lies") else "no room"
            if error is None:
                rooms.add(call.where)
        elif behaviour in ("ok", "lies"):
            process.carry_out(call)
        elif behaviour == "breaks" and call.name == "restore":
            process.state = "failed"
        elif behaviour == "dies":
            process.state = "gone"
        call = machine.after(Result(process.state, error))
    return calls


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(["move", "suspend"]), st.lists(Behaviour, max_size=14), st.none() | st.integers(1, 8))
def test_it_ends_where_it_says(kind: Kind, behaviours: list[str], cancel_at: int | None) -> None:
    machine, process = Checkpointing(kind), Process("running")
    run(machine, process, behaviours, cancel_at)
    assert machine.outcome in ("done", "failed", "cancelled")
    assert machine.phase == "over"
    if process.state in ("failed", "gone"):
        assert (machine.outcome, machine.location) == ("failed", "lost")
    elif process.state == "running":
        assert machine.location == process.on
        assert (machine.outcome == "done") == (kind == "move" and process.on == "target")
    elif process.state == "checkpointed":
        assert machine.location == "host"
        assert machine.outcome == "done" or machine.code is not None
    else:
        assert machine.location == process.on
        assert machine.outcome == "failed"
    if machine.outcome == "failed":
        assert machine.why


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["move", "suspend", "resume"]), st.sampled_from(["running", "locked", "checkpointed"]),
    st.lists(Behaviour, max_size=10),
)  # fmt: skip
def test_what_an_earlier_daemon_left_goes_back(kind: Kind, state: State, behaviours: list[str]) -> None:
    machine, process = Checkpointing(kind), Process(state)
    call = machine.begin(state, abandoned=True)
    rooms = 0
    while call is not None:
        behaviour = behaviours.pop(0) if behaviours else "ok"
        rooms += call.name == "room"
        assert (call.name, call.where) not in (("restore", "target"), ("checkpoint", "source"), ("lock", "source"))
        if call.name != "room" and behaviour == "ok":
            process.carry_out(call)
        call = machine.after(Result(process.state, None if behaviour == "ok" else "no"))
    assert machine.outcome == "failed"
    assert machine.code == "interrupted"
    assert process.state != "locked" or machine.retries > 0
    assert process.state == "running" or machine.location in ("host", "source")


def names(calls: list[Call]) -> list[str]:
    return [call.name if call.name not in ("room", "restore") else f"{call.name} {call.where}" for call in calls]


def test_the_straight_way() -> None:
    machine, process = Checkpointing("move"), Process("running")
    assert names(run(machine, process, [])) == [
        "lock", "room host", "checkpoint", "room target", "restore target", "unlock",
    ]  # fmt: skip
    assert (machine.outcome, machine.location, process.on) == ("done", "target", "target")


def test_suspended_and_resumed() -> None:
    machine, process = Checkpointing("suspend"), Process("running")
    assert names(run(machine, process, [])) == ["lock", "room host", "checkpoint"]
    assert (machine.outcome, machine.location) == ("done", "host")
    machine = Checkpointing("resume")
    assert names(run(machine, process, [])) == ["room target", "restore target", "unlock"]
    assert (machine.outcome, machine.location) == ("done", "target")


def test_no_room_on_the_target_goes_back() -> None:
    machine, process = Checkpointing("move"), Process("running")
    calls = run(machine, process, ["ok", "ok", "ok", "refuses"])
    assert names(calls)[3:] == ["room target", "room source", "restore source", "unlock"]
    assert (machine.outcome, machine.location, machine.why) == ("failed", "source", "no room")


def test_room_on_the_way_back_is_waited_for() -> None:
    machine, process = Checkpointing("move"), Process("running")
    calls = run(machine, process, ["ok", "ok", "ok", "refuses", "refuses", "ok", "refuses"])
    assert names(calls)[4:] == ["room source", "wait", "room source", "wait", "room source", "restore source", "unlock"]
    assert (machine.outcome, machine.location) == ("failed", "source")


def test_it_stays_in_the_hosts_memory_when_there_is_no_room_at_all() -> None:
    machine, process = Checkpointing("move"), Process("running")
    run(machine, process, ["ok", "ok", "ok", *["refuses"] * 400])
    assert (machine.outcome, machine.location, process.state) == ("failed", "host", "checkpointed")


def test_cancelled_while_it_is_saved() -> None:
    machine, process = Checkpointing("move"), Process("running")
    calls = run(machine, process, [], cancel_at=3)
    assert names(calls)[3:] == ["room source", "restore source", "unlock"]
    assert (machine.outcome, machine.location, process.state) == ("cancelled", "source", "running")


def test_not_cancelled_while_it_is_restored() -> None:
    machine, process = Checkpointing("move"), Process("running")
    run(machine, process, [], cancel_at=5)
    assert (machine.outcome, process.on) == ("done", "target")
