"""Groups: communicators, rounds, recoveries, failures, and what a new daemon finds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from xmigd.groups import groups as g
from xmigd.groups.groups import Groups, Who

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


def all_stop(groups: Groups, number: int, processes: str, counts: dict[str, int]) -> list[g.Instruction]:
    out: list[g.Instruction] = []
    for process in processes:
        out += groups.stopped(MS, process, number, counts)
    return out


class TestTies:
    def test_who_has_a_communicator_is_tied_until_it_is_past(self) -> None:
        groups = Groups(1)
        groups.open(0)
        assert groups.communicator(0, who("a"), N, 0, 2, "joined") == [g.Tie("a", True)]
        assert groups.communicator(0, who("a"), N, 0, 2, "joined") == []
        assert groups.communicator(0, who("a"), N, 0, 2, "ended") == []
        assert groups.communicator(0, who("a"), N, 0, 2, "past") == [g.Tie("a", False)]

    def test_communicators_of_different_users_are_different(self) -> None:
        groups = made((N, "a"))
        groups.communicator(0, Who("b", 1001, "job"), N, 0, 1, "joined")
        assert groups.wanted(1, "a") == [g.Stop("a", 100, {})]


class TestRounds:
    def test_a_round_that_fits_at_once(self) -> None:
        groups = made((N, "ab"))
        assert groups.wanted(0, "a") == [g.Stop("a", 100, {}), g.Stop("b", 100, {})]
        assert all_stop(groups, 100, "ab", {N: 3}) == [g.Hold("a", 100, ()), g.Hold("b", 100, ())]
        assert groups.held(0, "a", 100) == []
        assert groups.held(0, "b", 100) == [g.Take("a", 100), g.Take("b", 100)]
        assert groups.wanted(1, "a") == []
        groups.committed(1, "a", 100)
        assert groups.wanted(g.BETWEEN_ROUNDS, "a") == []
        groups.committed(1, "b", 100)
        assert groups.wanted(g.BETWEEN_ROUNDS - 1, "a") == []
        assert groups.wanted(g.BETWEEN_ROUNDS, "a") != []

    def test_who_is_behind_goes_on(self) -> None:
        groups = made((N, "abc"), (M, "ab"))
        groups.wanted(0, "c")
        groups.stopped(0, "a", 100, {N: 3, M: 1, f"{N}:0>2": 2})
        groups.stopped(0, "b", 100, {N: 4})
        assert groups.stopped(0, "c", 100, {N: 4}) == [
            g.Stop("a", 100, {N: 4}), g.Stop("b", 100, {M: 1}), g.Stop("c", 100, {f"{N}:0>2": 2}),
        ]  # fmt: skip
        groups.stopped(0, "a", 100, {N: 4, M: 1, f"{N}:0>2": 2})
        groups.stopped(0, "b", 100, {N: 4, M: 1})
        assert groups.stopped(0, "c", 100, {N: 5, f"{N}:0>2": 2}) == [
            g.Stop("a", 100, {N: 5}), g.Stop("b", 100, {N: 5}),
        ]  # fmt: skip

    @pytest.mark.parametrize("event", ["busy", "time", "new"])
    def test_it_is_given_up(self, event: str) -> None:
        groups = made((N, "ab"))
        groups.wanted(0, "a")
        assert groups.due == g.PATIENCE
        if event == "busy":
            out = groups.busy(1, "b", 100)
        elif event == "time":
            out = groups.wake(g.PATIENCE)
        else:
            out = groups.communicator(1, who("a"), M, 0, 2, "joined")
        assert out == [g.Continue("a", 100), g.Continue("b", 100)]
        assert groups.due is None
        assert groups.held(2, "a", 100) == []

    def test_the_pause_doubles(self) -> None:
        groups, t, pauses = made((N, "ab")), 0, []
        for number in range(100, 106):
            begun = t
            while not groups.wanted(t, "a"):
                t += MS
            pauses.append((t - begun) // MS)
            groups.busy(t, "a", number)
        assert pauses == [0, 100, 200, 400, 800, 1000]

    def test_ended_communicators_are_gone_for_the_others(self) -> None:
        groups = made((N, "ab"), (M, "ab"))
        groups.communicator(0, who("a"), M, 0, 2, "ended")
        groups.wanted(0, "a")
        assert all_stop(groups, 100, "ab", {N: 0, M: 0}) == [g.Hold("a", 100, ()), g.Hold("b", 100, (M,))]


class TestRecovery:
    def test_all_go_on_when_all_wait(self) -> None:
        groups = made((N, "ab"))
        out = groups.broken(0, "b", "killed")
        assert [type(one) for one in out] == [g.Note, g.Break]
        assert groups.awaits(0, "a") == []
        assert groups.awaits(0, "b") == [g.Recover("a", {"a": (), "b": ()})]
        assert groups.wanted(g.BETWEEN_ROUNDS, "a") != []

    def test_without_one_whose_program_has_exited(self) -> None:
        groups = made((N, "abc"), (M, "ab"))
        groups.broken(0, "b", "killed")
        groups.awaits(0, "a")
        groups.awaits(0, "b")
        assert groups.gone(0, "c") == [g.Recover("a", {"a": (N,), "b": (N,)})]

    def test_nobody_if_one_is_lost(self) -> None:
        groups = made((N, "ab"))
        groups.broken(0, "b", "killed")
        groups.awaits(0, "a")
        assert groups.lost(0, "b", "too often") == [g.Hopeless("a", "rank 1 of its communicator was lost: too often")]

    def test_a_tie_holds_until_all_have_committed(self) -> None:
        groups = made((N, "ab"))
        groups.wanted(0, "a")
        all_stop(groups, 100, "ab", {N: 0})
        groups.held(0, "a", 100)
        groups.held(0, "b", 100)
        groups.committed(0, "a", 100)
        assert groups.communicator(0, who("a"), N, 0, 2, "past") == []
        assert g.Break("a", "the server of rank 1 was lost: killed") in groups.broken(0, "b", "killed")
        groups.awaits(0, "a")
        assert groups.awaits(0, "b") == [g.Recover("a", {"a": (), "b": ()}), g.Tie("a", False)]


class TestFailures:
    def test_an_answer_after_a_second_look(self) -> None:
        groups = made((N, "ab"))
        assert groups.failed(0, "a", N) == []
        assert groups.wake(g.LOOK_AGAIN) == [g.CommunicatorLost("a", N)]

    def test_none_if_the_group_recovers(self) -> None:
        groups = made((N, "ab"))
        groups.failed(0, "a", N)
        groups.broken(1, "b", "killed")
        assert groups.wake(g.LOOK_AGAIN) == []
        assert groups.failed(g.LOOK_AGAIN, "a", N) == []

    def test_at_once_if_a_program_is_gone(self) -> None:
        groups = made((N, "ab"))
        groups.gone(0, "b")
        assert groups.failed(0, "a", N) == [g.CommunicatorLost("a", N)]


class TestNewDaemon:
    def test_nothing_begins_before_all_are_there(self) -> None:
        groups = made((N, "ab"), opened=False)
        assert groups.wanted(0, "a") == []
        assert groups.held(0, "a", 7) == []
        assert groups.open(0) == [g.Resolve("a", 7)]
        assert groups.held(0, "b", 7) == [g.Resolve("b", 7)]

    def test_an_orphan_is_the_rank_that_nobody_is(self) -> None:
        groups = Groups(100)
        groups.communicator(0, who("a"), N, 0, 2, "joined")
        groups.orphan(who("b"))
        groups.awaits(0, "b")
        assert groups.open(0) == [g.Break("a", "a member's server ended while no daemon was there")]
        assert groups.awaits(0, "a") == [g.Recover("a", {"a": (), "b": ()})]

    def test_an_orphan_that_was_in_no_group_goes_on_alone(self) -> None:
        groups = made((N, "ab"), opened=False)
        groups.orphan(who("c"))
        groups.awaits(0, "c")
        assert groups.open(0) == [g.Tie("c", False)]

    def test_orphans_of_which_only_their_journals_tell(self) -> None:
        groups = Groups(100)
        for one in "ab":
            groups.orphan(who(one))
            groups.awaits(0, one)
        assert groups.open(0, "ab") == [g.Recover("a", {"a": (), "b": ()})]


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
        assert self.answers(takes, lambda one: groups.committed(MS, one, 100)) == []
        breaks = [one for one in groups.broken(MS, names[3], "killed") if isinstance(one, g.Break)]
        assert len(breaks) == 7999
        goes = self.answers(breaks, lambda one: groups.awaits(MS, one)) + groups.awaits(MS, names[3])
        assert [len(one.members) for one in goes if isinstance(one, g.Recover)] == [8000]
        done = time.process_time()
        print(f"{self.RANKS} ranks: tied in {tied - begun:.2f} s, round and recovery in {done - tied:.2f} s")

    @staticmethod
    def answers(
        wave: Sequence[g.Instruction], answer: Callable[[str], list[g.Instruction]]
    ) -> list[g.Instruction]:  # fmt: skip
        """All get what was sent, and all answer."""
        out: list[g.Instruction] = []
        for one in wave:
            assert out == []
            out = answer(one.process)
        return out


def counts(process: str, all_ranks: int) -> dict[str, int]:
    return {N: all_ranks, f"{int(process) // 8:064x}": 2}
