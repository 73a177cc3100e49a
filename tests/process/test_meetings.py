"""Where ranks meet: offers in, answers out."""

from __future__ import annotations

import random
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from xmigd.groups.meetings import MOST_OF_USER, PATIENCE, Answer, Meetings, Offer, name_of

ALICE, BOB = 1000, 1001


def offer(rank: int, ranks: int = 2, text: str = "here", meeting: str = "m", answer: str = "") -> Offer:
    return Offer(meeting, rank, ranks, text, answer)


def whole(process: str, rank: int, *offers: str) -> Answer:
    return Answer(process, 0, "m", rank, offers=offers, answer=name_of(offers))


class TestAllGone:
    def test_all_may_meet_again_when_all_have_ended(self) -> None:
        """Restored from a checkpoint, they are other processes and have the same names for what they make."""
        meetings = Meetings()
        for process, rank in (("a", 0), ("b", 1)):
            meetings.attend(0, process, 0, ALICE, offer(rank))
        meetings.gone("a")
        assert "another process" in meetings.attend(1, "c", 0, ALICE, offer(0))[0].refused
        meetings.gone("b")
        assert len(meetings) == 0
        assert meetings.attend(2, "c", 0, ALICE, offer(0)) == [Answer("c", 0, "m", 0, missing="1")]


class TestAttend:
    def test_all_get_all_offers_once_the_last_has_come(self) -> None:
        meetings = Meetings()
        assert meetings.attend(0, "a", 0, ALICE, offer(0, text="x")) == [Answer("a", 0, "m", 0, missing="1")]
        assert meetings.attend(1, "b", 0, ALICE, offer(1, text="y")) == [
            whole("a", 0, "x", "y"), whole("b", 1, "x", "y"),
        ]  # fmt: skip

    def test_who_repeats_gets_the_same_answer(self) -> None:
        meetings = Meetings()
        meetings.attend(0, "a", 0, ALICE, offer(0))
        assert meetings.attend(1, "a", 0, ALICE, offer(0)) == [Answer("a", 0, "m", 0, missing="1")]
        meetings.attend(2, "b", 0, ALICE, offer(1))
        assert meetings.attend(3, "a", 0, ALICE, offer(0)) == [whole("a", 0, "here", "here")]

    def test_another_daemon_of_its_node_may_have_another_number_for_its_server(self) -> None:
        meetings = Meetings()
        meetings.attend(0, "a", 1, ALICE, offer(0))
        meetings.attend(1, "b", 0, ALICE, offer(1))
        assert meetings.attend(2, "a", 0, ALICE, offer(0)) == [whole("a", 0, "here", "here")]

    def test_one_process_may_have_several_ranks(self) -> None:
        meetings = Meetings()
        meetings.attend(0, "a", 0, ALICE, offer(0))
        assert [one.process for one in meetings.attend(0, "a", 0, ALICE, offer(1))] == ["a", "a"]

    def test_a_new_server_takes_the_place_of_the_one_before(self) -> None:
        meetings = Meetings()
        meetings.attend(0, "a", 0, ALICE, offer(0, text="old"))
        meetings.attend(1, "a", 0, ALICE, offer(0, text="new"))
        assert meetings.attend(2, "b", 0, ALICE, offer(1))[0].offers == ("new", "here")

    def test_not_when_the_others_have_gone_on(self) -> None:
        meetings = Meetings()
        meetings.attend(0, "a", 0, ALICE, offer(0))
        meetings.attend(0, "b", 0, ALICE, offer(1))
        (answer,) = meetings.attend(1, "a", 0, ALICE, offer(0, text="new"))
        assert "gone on" in answer.refused

    def test_who_does_not_fit_is_refused_with_a_reason(self) -> None:
        meetings = Meetings()
        meetings.attend(0, "a", 0, ALICE, offer(0))
        assert "another process" in meetings.attend(0, "b", 0, ALICE, offer(0))[0].refused
        assert "2" in meetings.attend(0, "b", 0, ALICE, offer(1, ranks=3))[0].refused
        assert "another user" in meetings.attend(0, "b", 0, BOB, offer(1))[0].refused
        assert meetings.attend(0, "b", 0, ALICE, offer(1))[0].offers != ()

    def test_what_nobody_repeats_is_forgotten(self) -> None:
        meetings = Meetings()
        meetings.attend(0, "a", 0, ALICE, offer(0))
        meetings.attend(PATIENCE + 1, "b", 0, ALICE, offer(0, meeting="other"))
        assert len(meetings) == 1

    def test_a_user_has_only_so_many(self) -> None:
        meetings = Meetings()
        for number in range(MOST_OF_USER):
            meetings.attend(0, "a", 0, ALICE, offer(0, meeting=str(number)))
        assert "more than" in meetings.attend(0, "a", 0, ALICE, offer(0, meeting="more"))[0].refused
        assert meetings.attend(0, "b", 0, BOB, offer(0, meeting="his"))[0].refused == ""

    def test_many_missing_ranks_are_counted(self) -> None:
        missing = Meetings().attend(0, "a", 0, ALICE, offer(0, ranks=1000))[0].missing
        assert missing.endswith("16 and 983 more")


class TestOver:
    def test_once_all_report_that_they_are_answered(self) -> None:
        meetings, name = Meetings(), name_of(("x", "y"))
        for process, rank, text in (("a", 0, "x"), ("b", 1, "y")):
            meetings.attend(0, process, 0, ALICE, offer(rank, text=text))
        assert meetings.attend(1, "a", 0, ALICE, offer(0, text="x", answer=name)) == []
        assert meetings.attend(2, "b", 0, ALICE, offer(1, text="y", answer=name)) == [
            Answer("a", 0, "m", 0, over=True), Answer("b", 0, "m", 1, over=True),
        ]  # fmt: skip
        assert meetings.attend(3, "a", 0, ALICE, offer(0, text="x", answer=name)) == [
            Answer("a", 0, "m", 0, over=True)
        ], "it was on its way"


class TestNewDaemon:
    """What servers repeat is all that it has."""

    def test_it_answers_whom_the_one_before_did_not(self) -> None:
        meetings, name = Meetings(), name_of(("x", "y"))
        assert meetings.attend(0, "a", 0, ALICE, offer(0, text="x", answer=name)) == []
        assert meetings.attend(0, "b", 0, ALICE, offer(1, text="y")) == [whole("b", 1, "x", "y")]
        assert len(meetings.attend(1, "b", 0, ALICE, offer(1, text="y", answer=name))) == 2

    def test_not_before_all_are_heard(self) -> None:
        meetings, name = Meetings(), name_of(("x", "y"))
        assert meetings.attend(0, "b", 0, ALICE, offer(1, text="y")) == [Answer("b", 0, "m", 1, missing="0")]
        assert meetings.attend(0, "a", 0, ALICE, offer(0, text="x", answer=name)) == [whole("b", 1, "x", "y")]

    def test_nobody_is_led_elsewhere(self) -> None:
        """A rank has given up, and offers something else: the other waits with the unique id that it was given."""
        meetings = Meetings()
        assert meetings.attend(0, "b", 0, ALICE, offer(1, answer=name_of(("id", "here")))) == []
        (answer,) = meetings.attend(0, "a", 0, ALICE, offer(0, text="other id"))
        assert (answer.process, "gone on" in answer.refused) == ("a", True)
        (answer,) = meetings.attend(1, "a", 0, ALICE, offer(0, text="id"))
        assert answer == whole("a", 0, "id", "here"), "what the others know is let in"

    @given(st.integers(1, 4), st.randoms(use_true_random=False))
    def test_all_are_answered_alike_whenever_daemons_end(self, ranks: int, chance: random.Random) -> None:
        """Messages of a daemon that ends are lost, in both directions."""
        meetings, sent = Meetings(), deque[Answer]()
        answers: dict[int, Answer] = {}
        repeats = set(range(ranks))

        def repeat(rank: int) -> None:
            name = answers[rank].answer if rank in answers else ""
            sent.extend(meetings.attend(0, str(rank), 0, ALICE, offer(rank, ranks, f"at {rank}", answer=name)))

        def deliver() -> None:
            answer = sent.popleft()
            if answer.over:
                repeats.discard(answer.rank)
                assert len(answers) == ranks, "who waits needs the others"
            elif answer.offers and answer.rank not in answers:
                answers[answer.rank] = answer
            assert not answer.refused

        for _ in range(chance.randint(0, 60)):
            what = chance.random()
            if what < 0.15:
                meetings = Meetings()
                sent.clear()
            elif what < 0.6 and sent:
                deliver()
            elif repeats:
                repeat(chance.choice(sorted(repeats)))
        stopped = ranks - len(repeats)
        for _ in range(3):
            for rank in sorted(repeats):
                repeat(rank)
            while sent:
                deliver()
        assert {one.offers for one in answers.values()} == {tuple(f"at {rank}" for rank in range(ranks))}
        assert len(answers) == ranks
        assert not repeats or stopped, "those who go on for ever do so without another one"


class TestGone:
    def test_its_ranks_are_missing_again(self) -> None:
        meetings = Meetings()
        meetings.attend(0, "a", 0, ALICE, offer(0, ranks=3))
        meetings.attend(0, "b", 0, ALICE, offer(1, ranks=3))
        meetings.gone("a")
        assert meetings.attend(0, "b", 0, ALICE, offer(1, ranks=3))[0].missing == "0, 2"
        meetings.gone("b")
        assert len(meetings) == 0


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.sampled_from("xy"), st.booleans()), max_size=40)
)
def test_offers_that_were_given_out_never_change(steps: list[tuple[str, int, str, bool]]) -> None:
    """As long as one of those is there who have them."""
    meetings = Meetings()
    given_out: set[tuple[str, ...]] = set()
    for t, (process, rank, text, gone) in enumerate(steps):
        if gone:
            meetings.gone(process)
            if len(meetings) == 0:
                given_out.clear()
            continue
        for answer in meetings.attend(t, process, 0, ALICE, offer(rank, 3, text)):
            if answer.offers:
                given_out.add(answer.offers)
    assert len(given_out) <= 1
