"""Communicators that are made before they are needed: what is wanted of which server, and what may be used."""

from __future__ import annotations

from collections.abc import Mapping

from xmigd.groups.instructions import Instruction
from xmigd.groups.prepared import (
    FIRST_PAUSE,
    LETTING_GO,
    SHORT_PAUSE,
    Forget,
    Made,
    Prepare,
    Prepared,
    Server,
    Unready,
)  # fmt: skip
from xmigd.groups.ties import Key

GIB = 1 << 30
ALL: Key = (1000, "all")
PAIR: Key = (1000, "pair")
WHOLE = {ALL: ("a", "b"), PAIR: ("a", "b")}


def prepared() -> Prepared:
    return Prepared()


def settled(
    one: Prepared, t: int, whole: Mapping[Key, tuple[str, ...]], standbys: Mapping[str, int | None], bound: int = GIB
) -> list[Instruction]:
    return one.settled(t, whole, standbys, dict.fromkeys(standbys, bound))


def short(one: Prepared, t: int, device: Mapping[Server, int], missing: int) -> tuple[list[Instruction], int]:
    coming = one.spare(t, device).of(missing)
    return (one.give_up(t, device), coming) if coming else ([], 0)


def made(one: Prepared, attempt: int, device_bytes: int = 0, *, servers: dict[str, int] | None = None) -> list[object]:
    out: list[object] = []
    for process, server in (servers or {"a": 1, "b": 1}).items():
        out = list(one.reported(0, process, server, attempt, device_bytes, ""))
    return out


class TestStandbys:
    def test_all_are_sent_the_same_in_the_same_order(self) -> None:
        out = settled(prepared(), 0, WHOLE, {"a": 1, "b": 1})
        assert out == [
            Prepare("a", 1, 1, "all"), Prepare("b", 1, 1, "all"),
            Prepare("a", 1, 2, "pair"), Prepare("b", 1, 2, "pair"),
        ]  # fmt: skip

    def test_a_recovery_uses_what_all_have_made(self) -> None:
        one = prepared()
        settled(one, 0, WHOLE, {"a": 1, "b": 1})
        assert made(one, 1) == [Made("a", 1, 1, 2), Made("b", 1, 1, 2)]
        one.reported(0, "a", 1, 2, 0, "")
        assert one.usable({"a": 1, "b": 1}) == {"a": (1,), "b": (1,)}
        assert one.usable({"a": 1, "b": 1}) == {"a": (), "b": ()}, "only once"

    def test_another_server_uses_nothing_of_it(self) -> None:
        one = prepared()
        settled(one, 0, {ALL: ("a", "b")}, {"a": 1, "b": 1})
        made(one, 1)
        assert one.usable({"a": 1, "b": 2}) == {"a": (), "b": ()}

    def test_a_standby_that_is_replaced_begins_it_anew(self) -> None:
        one = prepared()
        settled(one, 0, {ALL: ("a", "b")}, {"a": 1, "b": 1})
        made(one, 1)
        assert settled(one, 0, {ALL: ("a", "b")}, {"a": 1, "b": None}) == [Forget("a", 1, 1), Forget("b", 1, 1)]
        assert settled(one, 0, {ALL: ("a", "b")}, {"a": 1, "b": 2}) == [
            Prepare("a", 1, 2, "all"), Prepare("b", 2, 2, "all"),
        ]  # fmt: skip

    def test_nothing_is_done_twice(self) -> None:
        one = prepared()
        settled(one, 0, WHOLE, {"a": 1, "b": 1})
        assert settled(one, 1, WHOLE, {"a": 1, "b": 1}) == []

    def test_what_failed_is_tried_again_later(self) -> None:
        one = prepared()
        settled(one, 0, {ALL: ("a", "b")}, {"a": 1, "b": 1})
        assert one.reported(0, "a", 1, 1, 0, "no room") == [Forget("b", 1, 1)]
        assert settled(one, FIRST_PAUSE - 1, {ALL: ("a", "b")}, {"a": 1, "b": 1}) == []
        assert len(settled(one, FIRST_PAUSE, {ALL: ("a", "b")}, {"a": 1, "b": 1})) == 2
        assert one.reported(FIRST_PAUSE, "a", 1, 2, 0, "no room") == [Forget("b", 1, 2)]
        assert settled(one, 2 * FIRST_PAUSE, {ALL: ("a", "b")}, {"a": 1, "b": 1}) == []

    def test_memory_is_bounded(self) -> None:
        """By what the smallest figure of an attempt says."""
        one = prepared()
        settled(one, 0, {ALL: ("a", "b")}, {"a": 1, "b": 1})
        one.reported(0, "a", 1, 1, 5 * GIB, "")
        one.reported(0, "b", 1, 1, GIB * 3 // 4, "")
        assert one.bytes_of("a", 1) == GIB * 3 // 4
        assert settled(one, 0, WHOLE, {"a": 1, "b": 1}) == [], "another of that size is more than the bound"
        one.usable({"a": 1, "b": 1})
        assert one.bytes_of("a", 1) == 0
        assert settled(prepared(), 0, WHOLE, {"a": 1, "b": 1}, bound=0) == []

    def test_each_node_has_a_bound_of_its_own(self) -> None:
        one = prepared()
        assert one.settled(0, WHOLE, {"a": 1, "b": 1}, {"a": GIB, "b": 0}) == [], "b's node gives nothing"
        assert one.settled(0, WHOLE, {"a": 1, "b": 1}, {"a": GIB}) == [], "of b's nothing is known"
        one.settled(0, {ALL: ("a", "b")}, {"a": 1, "b": 1}, {"a": GIB, "b": 100})
        made(one, 1, 60)
        assert one.settled(0, WHOLE, {"a": 1, "b": 1}, {"a": GIB, "b": 100}) == [], "two are more than b's"
        assert len(one.settled(0, WHOLE, {"a": 1, "b": 1}, {"a": GIB, "b": 120})) == 2

    def test_what_is_of_no_use_is_forgotten_by_all(self) -> None:
        """Of a node that was out of reach: also by its own servers, and it is made anew."""
        one = prepared()
        settled(one, 0, {ALL: ("a", "b")}, {"a": 1, "b": 1})
        made(one, 1)
        assert one.without("b") == [Forget("a", 1, 1), Forget("b", 1, 1)]
        assert one.usable({"a": 1, "b": 1}) == {"a": (), "b": ()}
        assert len(settled(one, 0, {ALL: ("a", "b")}, {"a": 1, "b": 1})) == 2

    def test_who_has_ended_is_in_none(self) -> None:
        one = prepared()
        settled(one, 0, WHOLE, {"a": 1, "b": 1})
        assert one.gone("a") == [Forget("b", 1, 1), Forget("b", 1, 2)]


SERVERS = {"a": 7, "b": 0}  # a's target, and the server that has b


class TestMoves:
    def test_it_is_ready_when_all_have_all(self) -> None:
        one = prepared()
        out = one.want_move(0, "a", WHOLE, SERVERS)
        assert [(each.process, each.server) for each in out if isinstance(each, Prepare)] == 2 * [("a", 7), ("b", 0)]
        made(one, 1, servers=SERVERS)
        assert one.move_is_ready("a", WHOLE, SERVERS) is None
        made(one, 2, servers=SERVERS)
        assert one.move_is_ready("a", WHOLE, SERVERS) == {"a": (1, 2), "b": (1, 2)}
        assert one.move_is_ready("a", WHOLE, {"a": 7, "b": 3}) is None, "b has another server now"

    def test_why_it_cannot_be(self) -> None:
        one = prepared()
        one.want_move(0, "a", {ALL: ("a", "b")}, SERVERS)
        assert one.reported(0, "b", 0, 1, 0, "no room") == [Forget("a", 7, 1), Unready("a", "no room")]

    def test_what_cannot_be_made_is_tried_after_the_next_snapshot(self) -> None:
        """Which may be the first that has it; not at once, again and again."""
        one, of_both = prepared(), {ALL: ("a", "b")}
        one.want_move(0, "a", of_both, SERVERS)
        one.reported(0, "b", 0, 1, 0, "the last snapshot has no such communicator")
        assert one.want_move(1, "a", of_both, SERVERS) == []
        assert settled(one, 2, of_both, {}) == []
        assert [each.attempt for each in one.want_move(2, "a", of_both, SERVERS) if isinstance(each, Prepare)] == [2, 2]
        one.reported(2, "b", 0, 2, 0, "no room")
        assert len(one.want_move(3, "a", of_both, SERVERS | {"b": 3})) == 2, "by another server"
        one.reported(3, "b", 3, 3, 0, "no room")
        one.move_over("a")
        assert len(one.want_move(4, "a", of_both, SERVERS | {"b": 3})) == 2, "for another move"

    def test_nothing_is_left_of_it(self) -> None:
        one = prepared()
        one.want_move(0, "a", {ALL: ("a", "b")}, SERVERS)
        made(one, 1, servers=SERVERS)
        assert one.move_over("a") == [Forget("a", 7, 1), Forget("b", 0, 1)]
        assert one.move_over("a") == []

    def test_nobody_forgets_what_it_is_about_to_take(self) -> None:
        one = prepared()
        one.want_move(0, "a", {ALL: ("a", "b")}, SERVERS)
        made(one, 1, servers=SERVERS)
        assert one.moved("a", (1,)) == []
        assert one.move_over("a") == []
        assert one.move_is_ready("a", {ALL: ("a", "b")}, SERVERS) is None

    def test_what_it_has_left_meanwhile_is_forgotten(self) -> None:
        one = prepared()
        one.want_move(0, "a", WHOLE, SERVERS)
        made(one, 1, servers=SERVERS)
        made(one, 2, servers=SERVERS)
        assert one.move_is_ready("a", {ALL: ("a", "b")}, SERVERS) == {"a": (1,), "b": (1,)}
        assert one.moved("a", (1,)) == [Forget("a", 7, 2), Forget("b", 0, 2)]

    def test_what_another_move_needs_is_still_there(self) -> None:
        one = prepared()
        one.want_move(0, "a", {ALL: ("a", "b")}, SERVERS)
        one.want_move(0, "c", {PAIR: ("b", "c")}, {"b": 0, "c": 9})
        made(one, 1, servers=SERVERS)
        assert one.moved("a", (1,)) == []
        made(one, 2, servers={"b": 0, "c": 9})
        assert one.move_is_ready("c", {PAIR: ("b", "c")}, {"b": 0, "c": 9}) == {"b": (2,), "c": (2,)}


ONE_DEVICE = {("a", 1): 1}  # only a's standby uses it


class TestShortMemory:
    """A program has no room on the device that a's standby uses."""

    def both_made(self) -> Prepared:
        one = prepared()
        settled(one, 0, WHOLE, {"a": 1, "b": 1})
        made(one, 1, 1000)
        made(one, 2, 500)
        return one

    def test_all_are_given_up(self) -> None:
        """By all of their servers."""
        one = self.both_made()
        assert one.bytes_on(ONE_DEVICE) == 1500
        out, coming = short(one, 0, ONE_DEVICE, 1500)
        assert out == [Forget("a", 1, 1), Forget("b", 1, 1), Forget("a", 1, 2), Forget("b", 1, 2)]
        assert coming == 1500
        assert one.bytes_on(ONE_DEVICE) == 0
        assert one.usable({"a": 1, "b": 1}) == {"a": (), "b": ()}

    def test_nothing_if_that_is_not_enough(self) -> None:
        one = self.both_made()
        assert short(one, 0, ONE_DEVICE, 1501) == ([], 0)
        assert one.usable({"a": 1, "b": 1}) == {"a": (1, 2), "b": (1, 2)}

    def test_the_other_ranks_run_out_of_memory_at_the_same_moment(self) -> None:
        """What their standbys take is being freed already."""
        one = self.both_made()
        short(one, 0, ONE_DEVICE, 1)
        assert short(one, LETTING_GO - 1, {("b", 1): 1}, 1500) == ([], 1500)
        assert short(one, LETTING_GO, {("b", 1): 1}, 1) == ([], 0)

    def test_nothing_where_there_is_nothing(self) -> None:
        """Nor is it a reason to make none."""
        one = prepared()
        assert short(one, 0, ONE_DEVICE, 0) == ([], 0)
        assert len(settled(one, 0, WHOLE, {"a": 1, "b": 1})) == 4

    def test_nothing_of_other_devices(self) -> None:
        assert short(self.both_made(), 0, {("c", 1): 1}, 1) == ([], 0)
        assert short(self.both_made(), 0, {("a", 2): 1}, 1) == ([], 0)

    def test_what_is_being_made_may_take_anything(self) -> None:
        one = prepared()
        settled(one, 0, {ALL: ("a", "b")}, {"a": 1, "b": 1})
        assert short(one, 0, ONE_DEVICE, 7 * GIB) == ([Forget("a", 1, 1), Forget("b", 1, 1)], 7 * GIB)
        assert one.reported(0, "a", 1, 1, 0, "") == [], "it came too late"

    def test_a_server_on_two_devices(self) -> None:
        """It is not known which of them has how much."""
        assert self.both_made().bytes_on({("a", 1): 2}) == 750

    def test_they_are_made_again_later(self) -> None:
        one = self.both_made()
        short(one, 5, ONE_DEVICE, 1)
        assert settled(one, 4 + SHORT_PAUSE, WHOLE, {"a": 1, "b": 2}) == [], "by none of its servers"
        assert one.want_move(5, "b", WHOLE, {"a": 1, "b": 7}) == []
        assert len(settled(one, 5 + SHORT_PAUSE, WHOLE, {"a": 1, "b": 2})) == 4

    def test_a_move_is_not_ready_any_more(self) -> None:
        one = prepared()
        one.want_move(0, "a", {ALL: ("a", "b")}, SERVERS)
        made(one, 1, 1000, servers=SERVERS)
        short(one, 0, {("b", 0): 1}, 1)
        assert one.move_is_ready("a", {ALL: ("a", "b")}, SERVERS) is None
