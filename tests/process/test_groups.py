"""Groups: communicators, rounds, recoveries, failures, and what a new daemon finds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import pytest

from xmigd.groups import instructions as i
from xmigd.groups import patience as g
from xmigd.groups.groups import Groups
from xmigd.groups.ties import Who

MS = 1_000_000
N, M = "a" * 64, "b" * 64


def who(process: str, job: str = "job") -> Who:
    return Who(process, 1000, job)


def made(*communicators: tuple[str, str], opened: bool = True) -> Groups:
    """Each a name and its ranks' processes, one letter each."""
    groups = Groups(100)
    if opened:
        groups.open(0)
    for name, processes in communicators:
        for rank, process in enumerate(processes):
            groups.communicator(0, who(process), name, rank, len(processes), "joined")
    return groups


def all_stop(groups: Groups, number: int, processes: str, counts: dict[str, int]) -> list[i.Instruction]:
    out: list[i.Instruction] = []
    for process in processes:
        out += groups.stopped(MS, process, number, counts)
    return out


class TestTies:
    def test_who_has_a_communicator_is_tied_until_it_is_past(self) -> None:
        groups = Groups(1)
        groups.open(0)
        assert groups.communicator(0, who("a"), N, 0, 2, "joined") == [i.Tie("a", True)]
        assert groups.communicator(0, who("a"), N, 0, 2, "joined") == []
        assert groups.communicator(0, who("a"), N, 0, 2, "ended") == []
        assert groups.communicator(0, who("a"), N, 0, 2, "past") == [i.Tie("a", False)]

    def test_communicators_of_different_users_are_different(self) -> None:
        groups = made((N, "a"))
        groups.communicator(0, Who("b", 1001, "job"), N, 0, 1, "joined")
        assert groups.wanted(1, "a") == [i.Stop("a", 100, {})]


class TestRounds:
    def test_rounds_are_later_than_those_that_a_member_was_in_elsewhere(self) -> None:
        groups = made((N, "ab"))
        groups.later_than(5000)
        groups.later_than(200)
        groups.later_than(g.NEVER)  # nobody can have been
        assert groups.wanted(1, "a") == [i.Stop("a", 5001, {}), i.Stop("b", 5001, {})]

    def test_a_round_of_an_earlier_daemon_is_one_by_any_number(self) -> None:
        groups = made((N, "ab"), opened=False)
        assert groups.held(1, "a", 700) == []
        groups.later_than(700)
        assert groups.open(2) == [i.Resolve("a", 700)]
        assert groups.held(3, "b", 700) == [i.Resolve("b", 700)]
        assert groups.wanted(4, "a") == [i.Stop("a", 701, {}), i.Stop("b", 701, {})]

    def test_nobody_waits_for_a_rank_that_is_left_in_a_communicator(self) -> None:
        groups = made((N, "abc"), (M, "abc"))
        groups.communicator(0, who("b"), M, 1, 3, "past")  # it has ended it, and a snapshot was taken
        groups.communicator(0, who("c"), M, 2, 3, "past")  # its next server did not make it again
        groups.wanted(0, "a")
        for process, counts in (("a", {N: 1, M: 0}), ("b", {N: 1}), ("c", {N: 1})):
            out = groups.stopped(MS, process, 100, counts)
        assert out == [i.Hold("a", 100, (M,)), i.Hold("b", 100, ()), i.Hold("c", 100, ())]

    def test_a_round_that_fits_at_once(self) -> None:
        groups = made((N, "ab"))
        assert groups.wanted(0, "a") == [i.Stop("a", 100, {}), i.Stop("b", 100, {})]
        assert all_stop(groups, 100, "ab", {N: 3}) == [i.Hold("a", 100, ()), i.Hold("b", 100, ())]
        assert groups.held(0, "a", 100) == []
        assert groups.held(0, "b", 100) == [i.Take("a", 100), i.Take("b", 100)]
        assert groups.wanted(1, "a") == []
        groups.committed(1, "a", 100)
        assert groups.wanted(g.BETWEEN_ROUNDS, "a") == []
        groups.committed(1, "b", 100)
        assert groups.wanted(g.BETWEEN_ROUNDS - 1, "a") == []
        assert groups.wanted(g.BETWEEN_ROUNDS, "a") != []

    def test_groups_become_one_while_both_commit(self) -> None:
        """Each of them reports the round that it was in, and once all have there can be another one."""
        groups = made((N, "ab"), (M, "cd"))
        for number, communicator, members in ((100, N, "ab"), (101, M, "cd")):
            groups.wanted(0, members[0])
            all_stop(groups, number, members, {communicator: 3})
            for process in members:
                out = groups.held(0, process, number)
            assert out == [i.Take(process, number) for process in members]
        for rank, process in enumerate("ac"):
            groups.communicator(1, who(process), "both", rank, 2, "joined")
        for process, number in (("a", 100), ("c", 101), ("d", 101)):
            assert groups.committed(2, process, number) == []
        assert groups.wanted(g.BETWEEN_ROUNDS, "a") == []
        assert groups.committed(2, "b", 100) == [i.Settled("b")]
        assert groups.wanted(g.BETWEEN_ROUNDS, "a") == [i.Stop(process, 102, {}) for process in "abcd"]

    def test_who_is_behind_goes_on(self) -> None:
        groups = made((N, "abc"), (M, "ab"))
        groups.wanted(0, "c")
        groups.stopped(0, "a", 100, {N: 3, M: 1, f"{N}:0>2": 2})
        groups.stopped(0, "b", 100, {N: 4})
        assert groups.stopped(0, "c", 100, {N: 4}) == [
            i.Stop("a", 100, {N: 4}), i.Stop("b", 100, {M: 1}), i.Stop("c", 100, {f"{N}:0>2": 2}),
        ]  # fmt: skip
        groups.stopped(0, "a", 100, {N: 4, M: 1, f"{N}:0>2": 2})
        groups.stopped(0, "b", 100, {N: 4, M: 1})
        assert groups.stopped(0, "c", 100, {N: 5, f"{N}:0>2": 2}) == [
            i.Stop("a", 100, {N: 5}), i.Stop("b", 100, {N: 5}),
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("behind", "same"), [([0, 0], True), ([3, 3], True), ([None, 0], False), ([None, None], False)]
    )
    def test_whether_all_are_at_the_same_place(self, behind: list[int | None], same: bool) -> None:
        groups = made((N, "ab"))
        groups.wanted(0, "a")
        groups.stopped(0, "a", 100, {N: 4}, behind[0])
        assert groups.stopped(0, "b", 100, {N: 4}, behind[1]) == [
            i.Hold("a", 100, (), same_place=same), i.Hold("b", 100, (), same_place=same),
        ]  # fmt: skip

    @pytest.mark.parametrize("reached", [3, 2])
    def test_who_is_at_another_place_goes_on_once(self, reached: int) -> None:
        groups = made((N, "ab"))
        groups.wanted(0, "a")
        groups.stopped(0, "a", 100, {N: 4}, 0)
        assert groups.stopped(0, "b", 100, {N: 4}, 3) == [i.Stop("a", 100, {}, 3)]
        same = reached == 3
        assert groups.stopped(0, "a", 100, {N: 4}, reached) == [
            i.Hold("a", 100, (), same_place=same), i.Hold("b", 100, (), same_place=same),
        ]  # fmt: skip

    def test_who_is_behind_goes_on_to_the_place_of_the_others(self) -> None:
        groups = made((N, "abc"))
        groups.wanted(0, "a")
        groups.stopped(0, "a", 100, {N: 4}, 2)
        groups.stopped(0, "b", 100, {N: 5}, 1)
        assert groups.stopped(0, "c", 100, {N: 5}, 0) == [i.Stop("a", 100, {N: 5}, 1)]
        assert groups.stopped(0, "a", 100, {N: 5}, 1) == [i.Stop("c", 100, {}, 1)]
        assert all(one.same_place for one in groups.stopped(0, "c", 100, {N: 5}, 1) if isinstance(one, i.Hold))

    def test_who_never_comes_to_the_same_place_is_sent_on_now_and_then(self) -> None:
        groups, t, sent_on = made((N, "ab")), 0, []
        for number in range(100, 100 + 2 * g.OF_ROUNDS):
            t += g.BETWEEN_ROUNDS
            groups.wanted(t, "a")
            groups.stopped(t, "a", number, {N: 4}, 0)
            more = groups.stopped(t, "b", number, {N: 4}, 3)
            sent_on.append(isinstance(more[0], i.Stop))
            if sent_on[-1]:
                assert isinstance(groups.stopped(t, "a", number, {N: 4}, 1)[0], i.Hold)
            for event in (groups.held, groups.committed):
                for one in "ab":
                    event(t, one, number)
        assert sent_on == 2 * ([True] * g.TRIES + [False] * (g.OF_ROUNDS - g.TRIES))

    @pytest.mark.parametrize("event", ["busy", "time", "new"])
    def test_it_is_given_up(self, event: str) -> None:
        groups = made((N, "ab"))
        groups.wanted(0, "a")
        assert groups.due == g.GRACE + g.PATIENCE
        if event == "busy":
            out = groups.busy(1, "b", 100)
        elif event == "time":
            out = groups.wake(g.GRACE + g.PATIENCE)
        else:
            out = groups.communicator(1, who("a"), M, 0, 2, "joined")
        assert out == [i.Continue("a", 100), i.Continue("b", 100)]
        assert groups.due is None
        assert groups.held(2, "a", 100) == []

    @pytest.mark.parametrize(
        ("why", "expected"),
        [
            ("late", [0, 100, 200, 400, 800, 1600, 2000, 2000]),
            ("not possible", [0, 100, 200, 400, 800, 1600, 2000, 2000]),
            ("refused", [0, 20, 40, 80, 160, 160]),  # it has cost next to nothing
        ],
    )
    def test_the_pause_doubles(self, why: str, expected: list[int]) -> None:
        groups, t, pauses = made((N, "ab")), 0, []
        for number in range(100, 100 + len(expected)):
            begun = t
            while not groups.wanted(t, "a"):
                t += MS
            pauses.append((t - begun) // MS)
            if why == "not possible":
                for one in "ab":
                    groups.stopped(t, one, number, {})
            if why == "late":
                assert groups.due is not None
                t = groups.due
                groups.wake(t)
            else:
                groups.busy(t, "a", number)
        assert pauses == expected

    def test_patience_is_learnt(self) -> None:
        """Twice as long after each time that it was not enough; twice what it took; less again when less will do."""
        groups, t, patiences = made((N, "ab")), 0, []
        for took in [9, None, None, None, 90, 1, 1, 40, 1, 1, 1, 1, 1]:
            t += 10_000 * MS
            (stop, *_) = groups.wanted(t, "a")
            assert isinstance(stop, i.Stop)
            assert groups.due is not None
            patiences.append((groups.due - g.GRACE - t) // MS)
            if took is None:
                t = groups.due
                groups.wake(t)
                continue
            groups.stopped(t, "a", stop.round, {})
            t += took * MS
            groups.stopped(t, "b", stop.round, {})
            for event in (groups.held, groups.committed):
                for one in "ab":
                    event(t, one, stop.round)
        assert patiences == [50, 50, 100, 200, 200, 180, 157, 137, 120, 105, 92, 80, 70]

    def test_ended_communicators_are_gone_for_the_others(self) -> None:
        groups = made((N, "ab"), (M, "ab"))
        groups.communicator(0, who("a"), M, 0, 2, "ended")
        groups.wanted(0, "a")
        assert all_stop(groups, 100, "ab", {N: 0, M: 0}) == [i.Hold("a", 100, ()), i.Hold("b", 100, (M,))]


class TestLeaving:
    ATTEMPTS: Mapping[str, tuple[int, ...]] = {"a": (1,), "b": (1,)}

    def test_at_the_next_round(self) -> None:
        groups = made((N, "ab"))
        keys = groups.whole("a")
        assert groups.leave(0, "a", keys, self.ATTEMPTS, g.LEAVE_PATIENCE) == [i.Stop(p, 100, {}) for p in "ab"]
        all_stop(groups, 100, "ab", {N: 3})
        groups.held(0, "a", 100)
        assert groups.held(0, "b", 100) == [i.Take("a", 100, True, True, (1,)), i.Take("b", 100, True, False, (1,))]

    def test_another_waits_for_it(self) -> None:
        """It is not refused: it is to try again when that move is over."""
        groups = made((N, "ab"))
        keys = groups.whole("a")
        groups.leave(0, "a", keys, self.ATTEMPTS, g.LEAVE_PATIENCE)
        why = "another rank is about to leave its server"
        assert groups.leave(0, "b", keys, self.ATTEMPTS, g.LEAVE_PATIENCE) == [i.Stays("b", why, changed=True)]
        assert groups.another_leaves("b")
        assert not groups.another_leaves("a")

    def test_what_is_decided_is_not_sent_again(self) -> None:
        """To a rank whose daemon was not there: what it was to go on with may be gone. All are recovered."""
        groups = made((N, "ab"))
        groups.leave(0, "a", groups.whole("a"), self.ATTEMPTS, g.LEAVE_PATIENCE)
        all_stop(groups, 100, "ab", {N: 3})
        groups.held(0, "a", 100)
        groups.held(0, "b", 100)
        groups.committed(0, "a", 100)
        out = groups.held_again(1, "b", 100)
        assert [(type(one), one.process) for one in out] == [(i.Break, "b"), (i.Note, "b"), (i.Break, "a")]
        for process in "ab":
            out = groups.awaits(2, process)
        assert [type(one) for one in out] == [i.Recover]

    def test_not_with_what_has_become_void(self) -> None:
        """The round is taken all the same. When it is prepared once more it leaves with that."""
        groups = made((N, "ab"))
        keys = groups.whole("a")
        groups.leave(0, "a", keys, self.ATTEMPTS, g.LEAVE_PATIENCE)
        all_stop(groups, 100, "ab", {N: 3})
        groups.held(0, "a", 100)
        assert [type(one) for one in groups.not_yet(0, "a")] == [i.Stays]
        assert groups.not_yet(0, "a") == []
        assert groups.held(0, "b", 100) == [i.Take("a", 100), i.Take("b", 100)]
        for process in "ab":
            groups.committed(0, process, 100)
        later = g.BETWEEN_ROUNDS
        again = {"a": (2,), "b": (2,)}
        assert groups.leave(later, "a", keys, again, g.LEAVE_PATIENCE) == [i.Stop(p, 101, {}) for p in "ab"]
        all_stop(groups, 101, "ab", {N: 1})
        groups.held(later, "a", 101)
        assert groups.held(later, "b", 101) == [i.Take("a", 101, True, True, (2,)), i.Take("b", 101, True, False, (2,))]


class TestRecovery:
    def test_all_go_on_when_all_wait(self) -> None:
        groups = made((N, "ab"))
        out = groups.broken(0, "b", "killed")
        assert [type(one) for one in out] == [i.Note, i.Break]
        assert groups.awaits(0, "a") == []
        assert groups.awaits(0, "b") == [i.Recover("a", {"a": (), "b": ()})]
        assert groups.wanted(g.BETWEEN_ROUNDS, "a") != []

    def test_without_one_whose_program_has_exited(self) -> None:
        groups = made((N, "abc"), (M, "ab"))
        groups.broken(0, "b", "killed")
        groups.awaits(0, "a")
        groups.awaits(0, "b")
        assert groups.gone(0, "c") == [i.Recover("a", {"a": (N,), "b": (N,)})]

    def test_nobody_if_one_is_lost(self) -> None:
        groups = made((N, "ab"))
        groups.broken(0, "b", "killed")
        groups.awaits(0, "a")
        assert groups.lost(0, "b", "too often") == [i.Hopeless("a", "rank 1 of its communicator was lost: too often")]

    def test_a_tie_holds_until_all_have_committed(self) -> None:
        groups = made((N, "ab"))
        groups.wanted(0, "a")
        all_stop(groups, 100, "ab", {N: 0})
        groups.held(0, "a", 100)
        groups.held(0, "b", 100)
        groups.committed(0, "a", 100)
        assert groups.communicator(0, who("a"), N, 0, 2, "past") == []
        assert i.Break("a", "the server of rank 1 was lost: killed") in groups.broken(0, "b", "killed")
        groups.awaits(0, "a")
        assert groups.awaits(0, "b") == [i.Recover("a", {"a": (), "b": ()}), i.Tie("a", False)]


class TestDifferingMemory:
    def test_all_recover_together(self) -> None:
        groups = made((N, "abc"))
        out = groups.differs(1, "b", "it differs")
        assert out == [
            i.Note("b", "it differs: all 3 ranks recover together"),
            *(i.Break(process, "it differs") for process in "abc"),
        ]
        assert groups.differs(2, "b", "again") == [], "they do already"
        assert groups.awaits(3, "a") == groups.awaits(3, "b") == []
        assert groups.awaits(4, "c") == [i.Recover("a", {"a": (), "b": (), "c": ()})]

    def test_a_round_is_given_up_unless_it_is_decided(self) -> None:
        groups = made((N, "ab"))
        groups.wanted(0, "a")
        assert i.Continue("a", 100) in groups.differs(1, "b", "it differs")
        groups = made((N, "ab"))
        groups.wanted(0, "a")
        all_stop(groups, 100, "ab", {N: 1})
        for process in "ab":
            groups.held(2 * MS, process, 100)
        assert groups.differs(3 * MS, "b", "it differs") == [], "what they go back to is not known yet"


class TestHangs:
    LATER = 1 + g.STUCK_PATIENCE

    def stuck(self, groups: Groups, processes: str) -> None:
        for one in processes:
            assert groups.stuck(1, one, 30.0) == []

    def test_all_are_recovered_if_nobody_gets_further(self) -> None:
        groups = made((N, "ab"))
        self.stuck(groups, "ab")
        assert groups.due == self.LATER
        reason = "no rank has got further for 30 s"
        assert groups.wake(self.LATER) == [
            i.Note("a", f"{reason}: all 2 ranks recover together"), i.Hung("a", reason), i.Hung("b", reason),
        ]  # fmt: skip
        groups.awaits(self.LATER, "a")
        assert groups.awaits(self.LATER, "b") == [i.Recover("a", {"a": (), "b": ()})]
        assert groups.due is None

    def test_one_who_waits_for_nobody_is_waited_for(self) -> None:
        """Through another communicator: a waits for b, b for c."""
        groups = made((N, "ab"), (M, "bc"))
        self.stuck(groups, "ab")
        assert groups.due is None

    def test_groups_of_their_own(self) -> None:
        groups = made((N, "ab"), (M, "cd"))
        self.stuck(groups, "abc")
        assert {one.process for one in groups.wake(self.LATER) if isinstance(one, i.Hung)} == {"a", "b"}

    @pytest.mark.parametrize("event", ["further", "new", "round", "broken"])
    def test_meanwhile(self, event: str) -> None:
        groups = made((N, "ab"))
        self.stuck(groups, "ab")
        if event == "further":
            groups.stuck(2, "a", 0)
        elif event == "new":
            groups.communicator(2, who("c"), M, 0, 2, "joined")
            groups.communicator(2, who("b"), M, 1, 2, "joined")
        elif event == "round":
            groups.wanted(2, "a")
            all_stop(groups, 100, "ab", {N: 1})
            for one in "ab":
                groups.held(2, one, 100)
        else:
            groups.broken(2, "a", "killed")
            for one in "ab":
                groups.awaits(2, one)
        assert groups.wake(self.LATER) == []

    def test_it_has_to_last(self) -> None:
        groups = made((N, "ab"))
        self.stuck(groups, "ab")
        groups.stuck(2, "a", 0)
        groups.stuck(self.LATER - 1, "a", 30.0)
        assert groups.wake(self.LATER) == []
        assert groups.wake(self.LATER - 1 + g.STUCK_PATIENCE) != []

    @pytest.mark.parametrize("event", ["gone", "lost", "past"])
    def test_whom_they_waited_for_is_not_there_any_more(self, event: str) -> None:
        """Whether they still wait they say within a moment."""
        groups = made((N, "abc"))
        self.stuck(groups, "ab")
        later = 10 * g.STUCK_PATIENCE
        if event == "gone":
            groups.gone(later, "c")
        elif event == "lost":
            groups.lost(later, "c", "its journal is damaged")
        else:
            groups.communicator(later, who("c"), N, 2, 3, "past")
        assert groups.due == later + g.STUCK_PATIENCE
        assert len(groups.wake(groups.due)) == 3

    def test_a_round_under_way_is_given_up(self) -> None:
        groups = made((N, "ab"))
        self.stuck(groups, "ab")
        groups.wanted(self.LATER - 1, "a")
        assert groups.wake(self.LATER)[:2] == [i.Continue("a", 100), i.Continue("b", 100)]

    def test_a_new_daemon(self) -> None:
        groups = made((N, "ab"), opened=False)
        self.stuck(groups, "ab")
        assert groups.due is None
        groups.open(5)
        assert groups.due == 5 + g.STUCK_PATIENCE
        assert len(groups.wake(groups.due)) == 3


class TestFailures:
    def test_an_answer_once_all_nodes_are_heard(self) -> None:
        groups = made((N, "ab"))
        assert groups.failed(0, "a", N) == []
        assert groups.wake(g.LOOK_AGAIN) == [i.Doubt("a", N)]
        for t in (g.LOOK_AGAIN + 1, 10 * g.LOOK_AGAIN):
            assert groups.failed(t, "a", N) == []
            assert groups.due is None, "it depends on the nodes alone"
        assert groups.heard(10 * g.LOOK_AGAIN, "a", N) == []
        assert groups.failed(10 * g.LOOK_AGAIN, "a", N) == []
        assert groups.wake(11 * g.LOOK_AGAIN) == [i.CommunicatorLost("a", N)]
        assert groups.heard(12 * g.LOOK_AGAIN, "a", N) == []
        assert groups.due is None

    @pytest.mark.parametrize("heard", [False, True])
    def test_none_if_a_node_has_seen_a_loss(self, heard: bool) -> None:
        groups = made((N, "ab"))
        groups.failed(0, "a", N)
        assert groups.wake(g.LOOK_AGAIN) == [i.Doubt("a", N)]
        if heard:
            groups.heard(g.LOOK_AGAIN, "a", N)
        groups.broken(g.LOOK_AGAIN, "b", "killed")
        groups.heard(2 * g.LOOK_AGAIN, "a", N)
        assert groups.wake(9 * g.LOOK_AGAIN) == []
        assert groups.due is None

    def test_a_program_that_ends_meanwhile(self) -> None:
        groups = made((N, "ab"))
        groups.failed(0, "a", N)
        groups.wake(g.LOOK_AGAIN)
        groups.gone(g.LOOK_AGAIN, "a")
        assert groups.heard(g.LOOK_AGAIN, "a", N) == []
        assert groups.due is None

    def test_none_before_all_are_there(self) -> None:
        groups = made((N, "ab"), opened=False)
        assert groups.failed(0, "a", "unknown") == []
        assert groups.failed(0, "a", N) == []
        assert groups.wake(g.LOOK_AGAIN) == []
        groups.open(g.LOOK_AGAIN)
        assert groups.wake(2 * g.LOOK_AGAIN) == [i.CommunicatorLost("a", "unknown"), i.Doubt("a", N)]

    def test_none_if_the_group_recovers(self) -> None:
        groups = made((N, "ab"))
        groups.failed(0, "a", N)
        groups.broken(1, "b", "killed")
        assert groups.wake(g.LOOK_AGAIN) == []
        assert groups.failed(g.LOOK_AGAIN, "a", N) == []

    def test_at_once_if_it_is_in_no_communicator_any_more(self) -> None:
        """Its server did not make again what others have ended, and the program uses it."""
        groups = made((N, "ab"), opened=False)
        assert groups.failed(0, "c", N) == [], "it may be one of those that are still missing"
        groups.open(0)
        groups.communicator(0, who("a"), N, 0, 2, "past")
        assert groups.failed(0, "a", N) == [i.CommunicatorLost("a", N)]

    def test_at_once_if_a_program_is_gone(self) -> None:
        groups = made((N, "ab"))
        groups.gone(0, "b")
        assert groups.failed(0, "a", N) == [i.CommunicatorLost("a", N)]


class TestSevered:
    """A connection has ended, and no rank has."""

    def severed(self, groups: Groups, t: int = 0) -> list[i.Instruction]:
        groups.failed(t, "a", N, severed=True)
        groups.failed(t, "b", N, severed=True)
        groups.wake(t + g.LOOK_AGAIN)
        groups.heard(t + g.LOOK_AGAIN, "a", N)
        return groups.wake(t + 2 * g.LOOK_AGAIN)

    def test_all_are_recovered_once_all_nodes_are_heard(self) -> None:
        groups = made((N, "abc"))
        note, *hung = self.severed(groups)
        assert isinstance(note, i.Note)
        assert "rank 0 lost its connection to another rank: all 3 ranks recover together" in note.text
        assert [type(one) for one in hung] == [i.Hung] * 3
        groups.heard(2 * g.LOOK_AGAIN, "b", N)
        assert groups.failed(2 * g.LOOK_AGAIN, "c", N, severed=True) == [], "its server ends"
        for one in "abc":
            recovered = groups.awaits(3 * g.LOOK_AGAIN, one)
        assert [type(one) for one in recovered] == [i.Recover]
        assert groups.due is None, "what an earlier server has reported is over"

    def test_it_may_come_again(self) -> None:
        groups = made((N, "ab"))
        for t in (0, 10 * g.LOOK_AGAIN):
            assert len(self.severed(groups, t)) == 3
            for one in "ab":
                groups.awaits(t + 3 * g.LOOK_AGAIN, one)

    def test_not_what_a_program_has_ended(self) -> None:
        """By an abort, too."""
        groups = made((N, "abc"))
        groups.communicator(0, who("c"), N, 2, 3, "ended")
        assert self.severed(groups) == [i.CommunicatorLost("a", N)]

    def test_not_what_lacks_a_rank(self) -> None:
        groups = made((N, "ab"))
        groups.communicator(0, who("a"), "three", 0, 3, "joined")
        groups.communicator(0, who("b"), "three", 1, 3, "joined")
        groups.failed(0, "a", "three", severed=True)
        groups.wake(g.LOOK_AGAIN)
        groups.heard(g.LOOK_AGAIN, "a", "three")
        assert groups.wake(2 * g.LOOK_AGAIN) == [i.CommunicatorLost("a", "three")]

    def test_not_before_a_node_is_heard_that_may_have_seen_a_loss(self) -> None:
        groups = made((N, "ab"))
        groups.failed(0, "a", N, severed=True)
        assert groups.wake(g.LOOK_AGAIN) == [i.Doubt("a", N)]
        assert groups.due is None
        groups.gone(9 * g.LOOK_AGAIN, "b")
        assert groups.heard(9 * g.LOOK_AGAIN, "a", N) == []
        assert groups.wake(10 * g.LOOK_AGAIN) == [i.CommunicatorLost("a", N)]


class TestNewDaemon:
    def test_nothing_begins_before_all_are_there(self) -> None:
        groups = made((N, "ab"), opened=False)
        assert groups.wanted(0, "a") == []
        assert groups.held(0, "a", 7) == []
        assert groups.open(0) == [i.Resolve("a", 7)]
        assert groups.held(0, "b", 7) == [i.Resolve("b", 7)]

    def test_who_missed_the_decision_gets_it_again(self) -> None:
        """Of another node, whose daemon was started again."""
        groups = made((N, "ab"))
        groups.wanted(0, "a")
        all_stop(groups, 100, "ab", {N: 3})
        groups.held(0, "a", 100)
        assert groups.held(0, "b", 100) == [i.Take("a", 100), i.Take("b", 100)]
        assert groups.held_again(1, "b", 100) == [i.Take("b", 100)]
        groups.committed(2, "b", 100)
        assert groups.held_again(3, "b", 100) == [i.Continue("b", 100)]
        assert groups.held_again(3, "a", 7) == [i.Resolve("a", 7)]

    def test_a_round_whose_messages_may_be_lost_is_given_up(self) -> None:
        groups = made((N, "ab"))
        groups.wanted(0, "a")
        assert groups.unheard(1, "b") == [i.Continue("a", 100), i.Continue("b", 100)]
        assert groups.unheard(1, "b") == []
        assert groups.unheard(1, "stranger") == []
        assert all_stop(groups, 100, "ab", {N: 3}) == []
        assert groups.held_again(2, "b", 100) == [i.Continue("b", 100)]
        assert groups.fate_of("b") == "well"
        assert groups.fate_of("stranger") is None

    def test_an_orphan_is_the_rank_that_nobody_is(self) -> None:
        groups = Groups(100)
        groups.communicator(0, who("a"), N, 0, 2, "joined")
        groups.orphan(who("b"))
        groups.awaits(0, "b")
        assert groups.open(0) == [i.Break("a", "a member's server ended while no daemon was there")]
        assert groups.awaits(0, "a") == [i.Recover("a", {"a": (), "b": ()})]

    def test_an_orphan_that_was_in_no_group_goes_on_alone(self) -> None:
        groups = made((N, "ab"), opened=False)
        groups.orphan(who("c"))
        groups.awaits(0, "c")
        assert groups.open(0) == [i.Tie("c", False)]

    def test_orphans_of_which_only_their_journals_tell(self) -> None:
        groups = Groups(100)
        for one in "ab":
            groups.orphan(who(one))
            groups.awaits(0, one)
        assert groups.open(0, "ab") == [i.Recover("a", {"a": (), "b": ()})]


class TestManyRanks:
    RANKS = 8000

    def test_what_a_round_and_a_recovery_cost(self) -> None:
        """In messages: their waves are as many as for two ranks."""
        begun = time.process_time()
        groups = Groups(100)
        groups.open(0)
        names = [f"{rank:04d}" for rank in range(self.RANKS)]
        for rank, name in enumerate(names):
            groups.communicator(0, who(name), N, rank, self.RANKS, "joined")
            groups.communicator(0, who(name), f"{rank // 8:064x}", rank % 8, 8, "joined")
        tied = time.process_time()
        stops = groups.wanted(0, names[5])
        ahead = self.answers(stops, lambda one: groups.stopped(MS, one, 100, counts(one, 3 + (int(one) % 8 == 0))))
        holds = self.answers(ahead, lambda one: groups.stopped(MS, one, 100, counts(one, 4)))
        takes = self.answers(holds, lambda one: groups.held(MS, one, 100))
        assert [len(wave) for wave in (stops, ahead, holds, takes)] == [8000, 7000, 8000, 8000]
        assert self.answers(takes, lambda one: groups.committed(MS, one, 100)) == [i.Settled(takes[-1].process)]
        breaks = [one for one in groups.broken(MS, names[3], "killed") if isinstance(one, i.Break)]
        assert len(breaks) == 7999
        goes = self.answers(breaks, lambda one: groups.awaits(MS, one)) + groups.awaits(MS, names[3])
        assert [len(one.members) for one in goes if isinstance(one, i.Recover)] == [8000]
        done = time.process_time()
        print(f"{self.RANKS} ranks: tied in {tied - begun:.2f} s, round and recovery in {done - tied:.2f} s")

    def test_that_nobody_gets_further(self) -> None:
        groups = Groups(100)
        groups.open(0)
        names = [f"{rank:04d}" for rank in range(self.RANKS)]
        for rank, name in enumerate(names):
            groups.communicator(0, who(name), N, rank, self.RANKS, "joined")
        begun = time.process_time()
        for name in names:
            assert groups.stuck(1, name, 300.0) == []
        out = groups.wake(1 + g.STUCK_PATIENCE)
        assert sum(isinstance(one, i.Hung) for one in out) == self.RANKS
        print(f"{self.RANKS} ranks: stuck in {time.process_time() - begun:.2f} s")

    @staticmethod
    def answers(
        wave: Sequence[i.Instruction], answer: Callable[[str], list[i.Instruction]]
    ) -> list[i.Instruction]:  # fmt: skip
        """All get what was sent, and all answer."""
        out: list[i.Instruction] = []
        for one in wave:
            assert out == []
            out = answer(one.process)
        return out


def counts(process: str, all_ranks: int) -> dict[str, int]:
    return {N: all_ranks, f"{int(process) // 8:064x}": 2}


class TestPauses:
    """For a checkpoint, all members of a group stand still behind one round."""

    def held(self, groups: Groups, number: int) -> list[i.Instruction]:
        all_stop(groups, number, "ab", {N: 3})
        groups.held(MS, "a", number)
        return groups.held(MS, "b", number)

    def test_at_the_next_round_once_all_are_to(self) -> None:
        groups = made((N, "ab"))
        assert groups.pause(0, ["a"]) == []
        assert groups.pause(0, ["b"]) == [i.Stop("a", 100, {}), i.Stop("b", 100, {})]
        assert self.held(groups, 100) == [i.Take("a", 100, pauses=True), i.Take("b", 100, pauses=True)]
        assert not groups.is_to_pause("a")

    def test_a_round_that_was_under_way_will_do(self) -> None:
        groups = made((N, "ab"))
        groups.wanted(0, "a")
        assert groups.pause(0, ["a", "b"]) == []
        assert self.held(groups, 100) == [i.Take("a", 100, pauses=True), i.Take("b", 100, pauses=True)]

    def test_it_is_tried_until_it_fits_or_nobody_wants_it(self) -> None:
        groups, t = made((N, "ab")), 0
        groups.pause(t, ["a", "b"])
        for number in range(100, 105):
            groups.busy(t, "b", number, "a checkpoint copies its snapshot")
            assert groups.due is not None
            t = groups.due
            assert [type(one) for one in groups.wake(t)] == [i.Stop, i.Stop]
        assert groups.not_to_pause(t, ["a", "b"]) == []
        assert self.held(groups, 105) == [i.Take("a", 105), i.Take("b", 105)]

    def test_one_that_is_not_to_any_more_lets_none_pause(self) -> None:
        groups = made((N, "ab"))
        groups.pause(0, ["a", "b"])
        groups.not_to_pause(0, ["a"])
        assert self.held(groups, 100) == [i.Take("a", 100), i.Take("b", 100)]

    def test_none_while_they_are_recovered(self) -> None:
        groups = made((N, "ab"))
        groups.pause(0, ["a", "b"])
        groups.broken(1, "b", "it was killed")
        assert not any(isinstance(one, i.Stop) for one in groups.wake(10**12))


class TestSuspensions:
    """All members of a group are suspended with one round, or none is."""

    def prepared(self, groups: Groups, processes: str) -> list[i.Instruction]:
        out: list[i.Instruction] = []
        for process in processes:
            groups.suspend(0, process)
        for process in processes:
            out += groups.prepared(0, process)
        return out

    def decided(self, groups: Groups, processes: str) -> list[i.Instruction]:
        self.prepared(groups, processes)
        all_stop(groups, 100, processes, {N: 3})
        out: list[i.Instruction] = []
        for process in processes:
            out += groups.held(MS, process, 100)
        for process in processes:
            groups.committed(MS, process, 100)
        return out

    def test_a_round_of_all_once_all_are_prepared(self) -> None:
        groups = made((N, "ab"))
        assert groups.suspend(0, "a") == []
        assert groups.prepared(0, "a") == []
        assert groups.suspend(0, "b") == []
        assert groups.prepared(0, "b") == [i.Stop("a", 100, {}), i.Stop("b", 100, {})]
        assert all_stop(groups, 100, "ab", {N: 3}) == [i.Hold("a", 100, (), True), i.Hold("b", 100, (), True)]
        groups.held(1, "a", 100)
        assert groups.held(1, "b", 100) == [i.Take("a", 100, suspends=True), i.Take("b", 100, suspends=True)]
        assert groups.committed(2, "a", 100) == []
        assert groups.committed(2, "b", 100) == []

    def test_nothing_leaves_before_all_stand_suspended(self) -> None:
        groups = made((N, "ab"))
        self.decided(groups, "ab")
        assert groups.suspended(2, "a") == []
        out = groups.suspended(2, "b")
        assert out == [i.AllSuspended("a"), i.AllSuspended("b"), i.Tie("a", False), i.Tie("b", False)]
        assert groups.wanted(3, "a") == []
        assert groups.broken(3, "a", "its server is killed") == []

    def test_it_is_tried_until_it_fits(self) -> None:
        groups, t = made((N, "ab")), 0
        self.prepared(groups, "ab")
        for number in range(100, 110):
            groups.busy(t, "b", number, "a communicator is being made")
            assert groups.due == t + g.BETWEEN_ROUNDS
            t += g.BETWEEN_ROUNDS
            assert [type(one) for one in groups.wake(t)] == [i.Stop, i.Stop]
        out = groups.wake(g.SUSPEND_PATIENCE)
        assert out[:2] == [i.Continue("a", 110), i.Continue("b", 110)]
        assert out[2] == i.NotSuspended(
            "a", "the ranks could not stand still together in time: a communicator is being made"
        )

    def test_not_all_are_to_be_suspended(self) -> None:
        groups = made((N, "ab"))
        groups.suspend(0, "a")
        groups.prepared(0, "a")
        assert groups.due == g.GATHER_PATIENCE
        (out,) = groups.wake(g.GATHER_PATIENCE)
        assert out == i.NotSuspended("a", "not all ranks of its group are to be suspended")
        assert isinstance(groups.prepared(g.GATHER_PATIENCE, "b")[0], i.NotSuspended)

    def test_one_is_not_suspended_after_all(self) -> None:
        """What was prepared for the round is given up first: who holds waits for that."""
        groups = made((N, "ab"))
        self.prepared(groups, "ab")
        all_stop(groups, 100, "ab", {N: 3})
        out = groups.stay(MS, "b", "it was cancelled")
        assert out[:2] == [i.Continue("a", 100), i.Continue("b", 100)]
        assert {type(one) for one in out[2:]} == {i.NotSuspended}

    @pytest.mark.parametrize("when", ["prepared", "decided", "suspended"])
    def test_a_server_is_lost(self, when: str) -> None:
        groups = made((N, "ab"))
        if when == "prepared":
            self.prepared(groups, "ab")
        else:
            self.decided(groups, "ab")
        if when == "suspended":
            groups.suspended(2, "a")
        out = groups.broken(3, "b", "killed")
        assert i.Break("a", "the server of rank 1 was lost: killed") in out
        assert i.NotSuspended("a", "the server of a rank was lost") in out
        assert groups.suspended(4, "b") == groups.suspended(4, "a") == []
        groups.awaits(5, "a")
        assert groups.awaits(5, "b") == [i.Recover("a", {"a": (), "b": ()})]

    def test_the_last_program_that_was_waited_for_ends(self) -> None:
        groups = made((N, "ab"))
        self.decided(groups, "ab")
        groups.suspended(2, "a")
        assert groups.gone(3, "b") == [i.AllSuspended("a"), i.Tie("a", False)]

    @pytest.mark.parametrize("before", ["", "b"])
    def test_their_last_communicator_is_past(self, before: str) -> None:
        """Their programs have ended it, and the snapshot is the first without it. `before`: who reports that it stands
        suspended before the last one has that snapshot."""
        groups = made((N, "ab"))
        self.prepared(groups, "ab")
        all_stop(groups, 100, "ab", {N: 3})
        for one in "ab":
            groups.held(MS, one, 100)
        for one, rank in (("b", 1), ("a", 0)):
            groups.committed(2, one, 100)
            assert groups.communicator(2, who(one), N, rank, 2, "past") == []
            if one == before:
                assert groups.suspended(2, one) == []
        if not before:
            assert groups.suspended(3, "b") == []
        out = groups.suspended(3, "a")
        assert out == [i.AllSuspended("a"), i.AllSuspended("b"), i.Tie("a", False), i.Tie("b", False)]
        assert groups.communicator(4, who("a"), M, 0, 1, "joined") == [i.Tie("a", True)]
        assert groups.others("a") == []

    def test_their_last_communicator_is_past_and_a_server_is_lost(self) -> None:
        """They are recovered from that snapshot, and tied by nothing any more."""
        groups = made((N, "ab"))
        self.decided(groups, "ab")
        for rank, one in enumerate("ab"):
            groups.communicator(2, who(one), N, rank, 2, "past")
        groups.suspended(2, "a")
        groups.broken(3, "b", "killed")
        groups.awaits(4, "a")
        out = groups.awaits(4, "b")
        assert out[0] == i.Recover("a", {"a": (), "b": ()})
        assert out[1:] == [i.Tie("a", False), i.Tie("b", False)]

    def test_a_rank_that_moves_meanwhile(self) -> None:
        groups = made((N, "ab"))
        groups.leave(0, "a", [(1000, N)], {}, MS)
        assert isinstance(groups.suspend(0, "b")[0], i.NotSuspended)
        groups = made((N, "ab"))
        groups.suspend(0, "b")
        assert groups.leave(0, "a", [(1000, N)], {}, MS) == [i.Stays("a", "its group is being suspended")]

    def test_who_is_missing_after_a_resumption(self) -> None:
        groups = made((N, "ab"), (M, "ac"))
        assert groups.lacking("a") == ()
        groups.forget(1, "abc")
        groups.communicator(2, who("a"), N, 0, 2, "joined")
        groups.communicator(2, who("a"), M, 0, 2, "joined")
        groups.communicator(2, who("c"), M, 1, 2, "joined")
        assert groups.lacking("a") == (N,)
        assert groups.lacking("c") == ()

    def test_a_new_daemon_finds_one_suspended(self) -> None:
        groups = made((N, "ab"), opened=False)
        assert groups.woken(1, who("c"), "a") == [
            i.Break("a", "a member was suspended when the daemon was lost"),
            i.Break("b", "a member was suspended when the daemon was lost"),
        ]
        groups.open(2)
        groups.awaits(3, "c")
        groups.awaits(3, "a")
        assert groups.awaits(3, "b") == [i.Recover("a", {"a": (), "b": (), "c": ()})]
        groups.communicator(4, who("c"), M, 0, 1, "joined")
        assert groups.others("c") == ["a", "b"]
