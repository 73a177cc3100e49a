"""Communicators that servers of this node make ahead, as another node wants it: what is bounded here, and what comes
free."""

from __future__ import annotations

from xmigd.groups.followed import Followed
from xmigd.groups.prepared import LETTING_GO, MOST_OF_PROCESS, Server, Spare

GIB = 1 << 30
S: Server = ("a", 1)
OTHER: Server = ("b", 4)
DEVICE = {S: 1, ("c", 0): 1}


def both_made(bound: int = GIB) -> Followed:
    one = Followed(bound)
    for attempt, size in ((7, 1000), (8, 500)):
        assert one.begin(S, attempt) == ""
        assert one.reported(S, attempt, size, "")
    one.noted(S, 2, 1500)
    return one


def test_what_is_counted() -> None:
    one = Followed(GIB)
    one.begin(S, 7)
    assert one.bytes_on(DEVICE) == 0
    one.reported(S, 7, 1000, "")
    assert one.bytes_on(DEVICE) == 0, "not before all have made it"
    one.noted(S, 1, 900)
    assert one.bytes_on(DEVICE) == 900
    assert one.bytes_on({S: 2}) == 450
    assert one.bytes_on({OTHER: 1}) == 0


def test_no_more_than_its_servers_have_made_is_believed() -> None:
    one = both_made()
    one.noted(S, 99, 7 * GIB)
    assert one.made(S) == (2, 1500)
    one.noted(OTHER, 1, GIB)
    assert one.made(OTHER) == (0, 0)
    one.forget(S, 7)
    assert one.made(S) == (1, 500)


def test_memory_is_bounded_here() -> None:
    assert Followed(0).begin(S, 7) != ""
    one = both_made(1500)
    assert "standby_communicators_mib" in one.begin(S, 9)
    assert one.begin(OTHER, 9) == "", "of each standby"
    one.forget(S, 7)
    assert one.begin(S, 9) == ""


def test_their_number_is_bounded() -> None:
    one = Followed(GIB)
    for attempt in range(MOST_OF_PROCESS):
        assert one.begin(S, attempt) == ""
    assert one.begin(S, MOST_OF_PROCESS) != ""
    assert one.begin(S, 0) != "", "nor is one made twice"


def test_what_nobody_wants_is_not_reported() -> None:
    one = Followed(GIB)
    assert not one.reported(S, 7, 1000, "")
    one.begin(S, 7)
    one.forget(S, 7)
    assert not one.reported(S, 7, 1000, ""), "it was forgotten meanwhile"
    assert not one.has(S, 7)
    one.begin(S, 8)
    assert not one.has(S, 8)
    assert one.reported(S, 8, 0, "no room")
    assert not one.reported(S, 8, 1000, ""), "twice"
    assert not one.forget(S, 8)


def test_all_are_given_up() -> None:
    one = both_made()
    assert one.spare(0, DEVICE) == Spare(1500)
    assert one.give_up(0, DEVICE) == [(S, 7), (S, 8)]
    assert one.bytes_on(DEVICE) == 0
    assert one.spare(LETTING_GO - 1, DEVICE) == Spare(1500), "it is being freed already"
    assert one.spare(LETTING_GO, DEVICE) == Spare(0)
    assert both_made().give_up(0, {OTHER: 1}) == []


def test_what_is_being_made_may_take_anything() -> None:
    """Also what this node's has made, and others have not yet."""
    one = both_made()
    one.begin(S, 9)
    assert one.spare(0, DEVICE) == Spare(1500, unknown=True)
    one.reported(S, 9, 100, "")
    assert one.spare(0, DEVICE) == Spare(1500, unknown=True)
    one.noted(S, 3, 1600)
    assert one.spare(0, DEVICE) == Spare(1600)
    assert Spare(1, unknown=True).of(7) == 7
    assert Spare(8, unknown=True).of(7) == 8
    assert (Spare(3) + Spare(4)).of(7) == 7
    assert Spare(6).of(7) == 0


def test_nothing_is_left_of_a_process_that_goes_on() -> None:
    one = both_made()
    one.begin(OTHER, 7)
    assert one.has(S, 7)
    assert one.over("a") == [(S, 7), (S, 8)]
    assert not one.has(S, 7)
    assert one.over("a") == []
    assert one.made(S) == (0, 0)
    assert one.over("b") == [(OTHER, 7)]


def test_what_a_move_needs_is_not_bounded() -> None:
    """But by number, and it is counted."""
    one = Followed(0)
    for attempt in range(MOST_OF_PROCESS):
        assert one.begin(S, attempt, moves=True) == ""
    assert one.begin(S, MOST_OF_PROCESS, moves=True) != ""
    for attempt in (0, 1):
        one.reported(S, attempt, 1000, "")
    one.noted(S, 2, 2000)
    assert one.bytes_on(DEVICE) == 2000


def test_what_is_used_is_not_given_up_any_more() -> None:
    one = both_made()
    assert one.use(S, [7])
    assert not one.has(S, 7)
    assert one.bytes_on(DEVICE) == 500
    assert not one.use(S, [7, 8]), "one of them is not there"
    assert one.bytes_on(DEVICE) == 0
