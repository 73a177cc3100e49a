"""What is observed of ranks: what they do, what they wait for and waited for, and that it does not grow."""

from __future__ import annotations

import pytest

from xmigd.groups import instructions as i
from xmigd.groups import patience as g
from xmigd.groups.meetings import Answer
from xmigd.groups.ties import State, Who
from xmigd.ipc import messages as m
from xmigd.process import events as e
from xmigd.ranks import history as h
from xmigd.ranks.history import Change, History, Rank

MS = 1_000_000
N, M = "a" * 64, "b" * 64


def who(process: str, job: str = "job", uid: int = 1000) -> Who:
    return Who(process, uid, job)


def has(
    history: History, process: str, name: str, rank: int, ranks: int, state: State = "joined", *, job: str = "job",
    t: int = 0,
) -> None:  # fmt: skip
    message = m.Communicator(type="communicator", name=name, rank=rank, ranks=ranks, state=state)
    history.reported(t, who(process, job), message)


def made(processes: str, name: str = N) -> History:
    """A communicator of processes of one letter each."""
    history = History()
    for rank, process in enumerate(processes):
        has(history, process, name, rank, len(processes))
    return history


def stopped(history: History, t: int, process: str, number: int = 7) -> None:
    history.reported(t, who(process), m.GroupStopped(type="group_stopped", round=number, counts={}, behind=0))


def held(history: History, t: int, process: str, number: int = 7) -> None:
    history.reported(t, who(process), m.GroupHeld(type="group_held", round=number))


def to_all(history: History, t: int, processes: str, kind: type[i.Stop] | type[i.Hold] | type[i.Take]) -> None:
    for one in processes:
        match kind:
            case i.Stop:
                history.instructed(t, i.Stop(one, 7, {}))
            case i.Hold:
                history.instructed(t, i.Hold(one, 7, ()))
            case i.Take:
                history.instructed(t, i.Take(one, 7))


def rank_of(history: History, process: str, job: str = "job") -> Rank:
    return next(one for one in history.ranks_of(0, job) if one.who.process == process)


def did(history: History, process: str) -> list[tuple[int, str, int | None]]:
    return [(one.t // MS, one.activity, one.waited_for) for one in rank_of(history, process).changes]


def waits(history: History, process: str) -> str | None:
    return history.waits_for(history.ranks_of(0, "job")).get(process)


class TestRounds:
    def test_a_round_that_fits(self) -> None:
        history = made("abc")
        to_all(history, 1 * MS, "abc", i.Stop)
        stopped(history, 2 * MS, "a")
        stopped(history, 3 * MS, "c")
        assert waits(history, "a") == "rank 1 to stop"
        assert waits(history, "b") is None
        stopped(history, 5 * MS, "b")
        to_all(history, 5 * MS, "abc", i.Hold)
        held(history, 6 * MS, "b")
        assert waits(history, "b") == "ranks 0, 2 to prepare the snapshot"
        held(history, 7 * MS, "c")
        held(history, 9 * MS, "a")
        to_all(history, 9 * MS, "abc", i.Take)
        for t, process in ((10, "a"), (11, "b"), (12, "c")):
            history.committed(t * MS, process, 7)
        assert did(history, "a") == [
            (0, "running", None), (1, "stopping", None), (2, "stopped", 1), (5, "preparing", None),
            (9, "holding", None), (9, "taking", None), (10, "running", None),
        ]  # fmt: skip
        assert (6, "holding", 0) in did(history, "b")
        (round,) = history.rounds_of("job")
        assert (round.began, round.first_stopped, round.fitted) == (1 * MS, 2 * MS, 5 * MS)
        assert (round.decided, round.committed, round.given_up) == (9 * MS, 12 * MS, "")
        assert (round.last_stopped, round.last_held) == ("b", "a")

    def test_who_is_behind_goes_on(self) -> None:
        history = made("ab")
        to_all(history, 1 * MS, "ab", i.Stop)
        stopped(history, 2 * MS, "a")
        stopped(history, 3 * MS, "b")
        history.instructed(3 * MS, i.Stop("a", 7, {N: 4}))
        assert waits(history, "b") == "rank 0 to stop"
        assert rank_of(history, "a").activity == "stopping"
        (round,) = history.rounds_of("job")
        assert round.behind == {"a"}

    @pytest.mark.parametrize(
        ("cause", "t", "why"),
        [
            ("busy", 3 * MS, "rank 1 could not: it moves"),
            ("time", 1 * MS + g.PATIENCE, "rank 1 had not come to where"),
            ("broken", 3 * MS, "rank 1 lost its server"), ("gone", 3 * MS, "rank 1 has exited"),
            ("new", 3 * MS, "a communicator was made"),
        ],
    )  # fmt: skip
    def test_it_is_given_up(self, cause: str, t: int, why: str) -> None:
        history = made("ab")
        to_all(history, 1 * MS, "ab", i.Stop)
        stopped(history, 2 * MS, "a")
        match cause:
            case "busy":
                history.reported(t, who("b"), m.GroupBusy(type="group_busy", round=7, why="it moves"))
            case "broken":
                history.changed(t, "b", e.GroupBroken("killed"))
            case "gone":
                history.changed(t, "b", e.SaveState("draining", 0, "the program has exited"))
        history.instructed(t, i.Continue("a", 7))
        assert rank_of(history, "a").activity == "running"
        (round,) = history.rounds_of("job")
        assert why in round.given_up
        assert history._rounds == {}

    def test_who_has_not_prepared(self) -> None:
        history = made("ab")
        to_all(history, 1 * MS, "ab", i.Stop)
        stopped(history, 2 * MS, "a")
        stopped(history, 2 * MS, "b")
        to_all(history, 2 * MS, "ab", i.Hold)
        held(history, 3 * MS, "b")
        history.instructed(2 * MS + g.HOLD_PATIENCE, i.Continue("a", 7))
        assert history.rounds_of("job")[0].given_up == "rank 0 had not prepared the snapshot after 2 s"

    def test_a_server_is_lost_after_the_decision(self) -> None:
        """Its snapshot stands all the same; nobody waits for its word."""
        history = made("ab")
        to_all(history, 1 * MS, "ab", i.Stop)
        to_all(history, 2 * MS, "ab", i.Hold)
        to_all(history, 3 * MS, "ab", i.Take)
        history.committed(4 * MS, "a", 7)
        history.changed(5 * MS, "b", e.GroupBroken("killed"))
        assert history._rounds == {}
        assert history.rounds_of("job")[0].given_up == ""

    def test_a_rank_leaves_its_server_at_a_round(self) -> None:
        history = made("ab")
        to_all(history, 1 * MS, "ab", i.Stop)
        to_all(history, 2 * MS, "ab", i.Hold)
        for process in "ab":
            held(history, 3 * MS, process)
            history.instructed(3 * MS, i.Take(process, 7, True, process == "b", ()))
            history.committed(4 * MS, process, 7)
        assert [rank_of(history, one).activity for one in "ab"] == ["running", "moving"]
        history.changed(9 * MS, "b", e.SaveState("running", 1, "moved"))
        assert did(history, "b")[-2:] == [(3, "moving", None), (9, "running", None)]

    def test_of_an_earlier_daemon(self) -> None:
        history = made("ab")
        held(history, 1 * MS, "a", 3)
        assert rank_of(history, "a").activity == "holding"
        history.instructed(2 * MS, i.Resolve("a", 3))
        assert rank_of(history, "a").activity == "running"


def resumed(*, restored: int, t: int) -> e.SaveRecovery:
    record = e.RecoveryRecord(number=1, cause="killed", fault=1, occurred=0, detected=0, outcome="resumed")
    record.restored, record.replayed, record.resumed = restored, t, t
    return e.SaveRecovery(record)


class TestRecoveries:
    def test_all_recover_together(self) -> None:
        history = made("ab")
        history.changed(1 * MS, "b", e.GroupBroken("killed"))
        history.changed(1 * MS, "b", e.SaveState("recovering", 1, "killed"))
        history.instructed(1 * MS, i.Break("a", "the server of rank 1 was lost"))
        history.changed(2 * MS, "b", e.AwaitGroup())
        assert waits(history, "b") == "the server of rank 0 to end"
        history.changed(8 * MS, "a", e.AwaitGroup())
        history.instructed(8 * MS, i.Recover("a", {"a": (), "b": ()}))
        history.changed(20 * MS, "a", resumed(restored=12 * MS, t=19 * MS))
        assert did(history, "a")[1:] == [
            (1, "ending", None), (8, "waiting", None), (8, "restoring", None), (12, "replaying", None),
            (19, "running", None),
        ]  # fmt: skip
        assert did(history, "b")[1:] == [(1, "ending", None), (2, "waiting", 0), (8, "restoring", None)]

    def test_what_a_lost_server_had_sent_comes_late(self) -> None:
        history = made("ab")
        to_all(history, 1 * MS, "ab", i.Stop)
        history.changed(2 * MS, "a", e.GroupBroken("killed"))
        stopped(history, 3 * MS, "a")
        history.changed(4 * MS, "a", e.AwaitGroup())
        held(history, 5 * MS, "a")
        assert did(history, "a")[-2:] == [(2, "ending", None), (4, "waiting", None)]

    def test_ranks_wait_for_their_communicators(self) -> None:
        history = made("ab")
        for process in "ab":
            history.changed(1 * MS, process, e.GroupBroken("killed"))
            history.changed(2 * MS, process, e.AwaitGroup())
        history.instructed(2 * MS, i.Recover("a", {"a": (), "b": ()}))
        history.meets(3 * MS, who("a"), m.Meet(type="meet", meeting=M, rank=0, ranks=2, offer=""))
        history.answered(3 * MS, "a", [Answer("a", 1, M, 0, missing="1")])
        assert rank_of(history, "a").activity == "restoring"
        assert waits(history, "a") == "rank 1 of a communicator"
        history.answered(4 * MS, "b", [Answer("a", 1, M, 0, offers=("", "")), Answer("b", 1, M, 1, offers=("", ""))])
        assert waits(history, "a") is None

    def test_who_was_restored_before_it_had_its_communicators(self) -> None:
        history = made("a")
        history.changed(5 * MS, "a", e.SaveState("recovering", 0, "killed"))
        history.changed(9 * MS, "a", resumed(restored=4 * MS, t=8 * MS))
        assert did(history, "a")[1:] == [(5, "replaying", None), (8, "running", None)]

    def test_it_is_lost(self) -> None:
        history = made("a")
        history.changed(1 * MS, "a", e.GroupBroken("killed"))
        history.changed(2 * MS, "a", e.SaveState("losing", 0, "no memory"))
        history.changed(3 * MS, "a", e.SaveState("ended", 0, "the program has exited"))
        assert rank_of(history, "a").activity == "lost"


class TestCommunicators:
    def test_their_states(self) -> None:
        history = History()
        states = []
        for process, rank in (("a", 0), ("b", 1)):
            has(history, process, N, rank, 2)
            states.append(history.communicators_of("job")[0].state)
        for process, rank in (("b", 1), ("a", 0)):
            has(history, process, N, rank, 2, "ended")
            states.append(history.communicators_of("job")[0].state)
        assert states == ["joining", "whole", "incomplete", "ended"]

    def test_one_that_another_daemon_saw_begin(self) -> None:
        history = History()
        has(history, "a", N, 0, 2, "ended")
        has(history, "b", N, 1, 2)
        assert history.communicators_of("job")[0].state == "incomplete"

    def test_a_rank_is_that_of_the_largest(self) -> None:
        history = made("abcd")
        has(history, "c", M, 0, 2)
        assert rank_of(history, "c").rank == 2

    def test_a_process_with_two_ranks(self) -> None:
        history = History()
        for rank in (1, 0):
            has(history, "a", N, rank, 2)
        assert history.communicators_of("job")[0].state == "whole"
        has(history, "a", N, 0, 2, "past")
        assert rank_of(history, "a").has == {(1000, N): {1}}

    def test_who_has_exited_has_them_no_more(self) -> None:
        history = made("ab")
        history.finished(1, "a")
        assert history.communicators_of("job")[0].state == "incomplete"
        history.finished(2, "b")
        assert history.communicators_of("job")[0].ended == 2

    def test_ranks_meet(self) -> None:
        history = History()
        meet = m.Meet(type="meet", meeting=N, rank=0, ranks=2, offer="")
        history.meets(1 * MS, who("a"), meet)
        history.answered(1 * MS, "a", [Answer("a", 0, N, 0, missing="1")])
        assert (rank_of(history, "a").activity, waits(history, "a")) == ("joining", "rank 1 of a communicator")
        history.meets(4 * MS, who("b"), m.Meet(type="meet", meeting=N, rank=1, ranks=2, offer=""))
        history.answered(4 * MS, "b", [Answer("a", 0, N, 0, offers=("", "")), Answer("b", 0, N, 1, offers=("", ""))])
        assert did(history, "a")[1:] == [(1, "joining", 1), (4, "running", None)]
        assert did(history, "b")[-2:] == [(4, "joining", None), (4, "running", None)]

    def test_who_gives_up_looking_runs(self) -> None:
        history = History()
        history.meets(1 * MS, who("a"), m.Meet(type="meet", meeting=N, rank=0, ranks=2, offer=""))
        (rank,) = history.ranks_of(1 * MS + h.UNHEARD + 1, "job")
        assert rank.activity == "running"

    def test_a_job_has_the_ranks_that_other_jobs_have(self) -> None:
        """Each rank was started by itself."""
        history = History()
        for rank, process in enumerate("abc"):
            has(history, process, N, rank, 3, job=f"job {process}")
        assert [one.who.process for one in history.ranks_of(0, "job b")] == ["a", "b", "c"]
        assert history.ranks_of(0, "another") == []
        history.instructed(1, i.Stop("a", 7, {}))
        history.instructed(1, i.Stop("b", 7, {}))
        assert [len(history.rounds_of(f"job {one}")) for one in "abc"] == [1, 1, 0]


class TestBounds:
    def test_changes(self) -> None:
        history = made("a")
        for number in range(h.MOST_CHANGES):
            history.instructed(number, i.Stop("a", number + 1, {}))
            history.instructed(number, i.Continue("a", number + 1))
        assert len(rank_of(history, "a").changes) == h.MOST_CHANGES
        assert len(history.rounds_of("job")) == h.MOST_ROUNDS
        assert history._rounds == {}

    def test_of_many_ranks_each_has_fewer(self) -> None:
        history = History()
        for rank in range(1024):
            has(history, str(rank), N, rank, 1024)
        for number in range(1, 20):
            for rank in range(1024):
                history.instructed(number, i.Stop(str(rank), number, {}))
        assert {len(one.changes) for one in history.ranks_of(0, "job")} == {h.LEAST_CHANGES}

    def test_communicators_that_have_ended(self) -> None:
        history = made("a")
        for number in range(100):
            name = f"{number:064x}"
            has(history, "a", name, 0, 1)
            for state in ("ended", "past"):
                has(history, "a", name, 0, 1, state)
        assert len(history.communicators_of("job")) == 1 + h.MOST_COMMUNICATORS
        assert len(rank_of(history, "a").has) == 1

    def test_jobs_that_are_over(self) -> None:
        history = History()
        for number in range(h.MOST_OVER + 3):
            has(history, f"p{number}", f"{number:064x}", 0, 1, job=str(number))
            history.finished(number, f"p{number}")
        assert history.ranks_of(0, "2") == []
        (rank,) = history.ranks_of(0, "3")
        assert rank.over
        assert len(history._jobs) == len(history._ranks) == h.MOST_OVER

    def test_ranks_that_were_started_again(self) -> None:
        history = made("a")
        for number in range(h.MOST_ENDED + 5):
            has(history, f"p{number}", f"{number:064x}", 0, 1)
            history.finished(number, f"p{number}")
        ranks = history.ranks_of(0, "job")
        assert len(ranks) == h.MOST_ENDED + 1
        assert (ranks[0].who.process, ranks[1].who.process) == ("a", f"p{h.MOST_ENDED + 4}")


def test_what_is_no_rank_is_not_observed() -> None:
    history = History()
    history.changed(1, "a", e.SaveState("running", 0, ""))
    history.instructed(1, i.Stop("a", 7, {}))
    history.committed(1, "a", 7)
    history.finished(1, "a")
    assert (history.ranks_of(1, "job"), history._rounds) == ([], {})
    assert Change(1, "running").round == 0
