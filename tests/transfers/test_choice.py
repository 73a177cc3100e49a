"""Devices for the processes of a job that comes: named ones in turn, or those with room that the fewest have."""

from __future__ import annotations

import pytest

from xmigd.devices.names import each_of, in_turn, together
from xmigd.errors import Invalid
from xmigd.migrations.plan import Place
from xmigd.transfers.needs import DeviceNeed, Needs, ProgramNeed, choose, judge_all


def needs(*programs: list[int], kind: str = "cuda") -> Needs:
    """Bytes on each device of each program."""
    return Needs(
        xmig_version="1", layout=1, job="a" * 32, priority="normal", job_name="",
        command="", uid=0, pids=(), live_bytes=0, program_bytes=0,
        instructions=(), files=(), programs=tuple(
            ProgramNeed(device="cuda:0", devices=tuple(DeviceNeed(kind=kind, bytes=each) for each in one))  # type: ignore[arg-type]
            for one in programs
        ),
    )  # fmt: skip


def places(*free: int) -> dict[str, Place]:
    return {f"cuda:{number}": Place(id=f"cuda:{number}", free_bytes=bytes) for number, bytes in enumerate(free)}


def test_names_of_several() -> None:
    assert each_of("") == []
    assert each_of("cuda:0,1") == each_of("cuda:0,cuda:1") == ["cuda:0", "cuda:1"]
    assert each_of("nonsense") == [":nonsense"]  # no node has that
    assert together(["cuda:1", "cuda:0", "cuda:1"]) == "cuda:1,cuda:0"


def test_named_ones_in_turn() -> None:
    assert in_turn([1, 1, 1], ["cuda:4", "cuda:2"]) == [["cuda:4"], ["cuda:2"], ["cuda:4"]]
    assert in_turn([2, 1], ["cuda:0", "cuda:1", "cuda:2"]) == [["cuda:0", "cuda:1"], ["cuda:2"]]
    for counts, named in (([1], ["cuda:0", "cuda:1"]), ([2, 1], ["cuda:0"]), ([1, 1], [])):
        with pytest.raises(Invalid):
            in_turn(counts, named)


def test_each_has_its_own_while_there_are_enough() -> None:
    assert choose(needs([1], [1]), places(5, 50, 9)) == [["cuda:1"], ["cuda:2"]]
    assert choose(needs([1], [1], [1]), places(5, 50)) == [["cuda:1"], ["cuda:0"], ["cuda:1"]]
    assert choose(needs([1, 1], [1]), places(5, 50)) == [["cuda:1", "cuda:0"], ["cuda:1"]]


def test_room_is_for_all_of_them() -> None:
    assert choose(needs([30], [30], [30]), places(5, 100)) == [["cuda:1"]] * 3
    assert choose(needs([40], [40], [40]), places(5, 100)) == [["cuda:1"]] * 2  # there is none for the third
    assert choose(needs([1], kind="cpu"), places(5)) == []
    three = needs([40], [40], [40])
    found = judge_all(three, [["cuda:1"]] * 3, places(5, 100))
    assert [[why.code for why in reasons] for reasons in found] == [[], [], ["no_room"]]
    assert judge_all(three, [["cuda:1"], ["cuda:7"], ["cuda:0"]], places(5, 100))[1][0].code == "no_such_device"
    twice = judge_all(needs([1, 1]), [["cuda:0", "cuda:0"]], places(5))
    assert twice[0][0].code == "wrong_number"
