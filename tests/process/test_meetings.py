"""Where ranks meet: offers in, answers out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from xmigd.groups.meetings import MOST_OF_USER, PATIENCE, Answer, Meetings, Offer

ALICE, BOB = 1000, 1001


def offer(rank: int, ranks: int = 2, text: str = "here", meeting: str = "m") -> Offer:
    return Offer(meeting, rank, ranks, text)


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
            Answer("a", 0, "m", 0, offers=("x", "y")), Answer("b", 0, "m", 1, offers=("x", "y")),
        ]  # fmt: skip

    def test_who_repeats_gets_the_same_answer(self) -> None:
        meetings = Meetings()
        meetings.attend(0, "a", 0, ALICE, offer(0))
        assert meetings.attend(1, "a", 0, ALICE, offer(0)) == [Answer("a", 0, "m", 0, missing="1")]
        meetings.attend(2, "b", 0, ALICE, offer(1))
        assert meetings.attend(3, "a", 0, ALICE, offer(0)) == [Answer("a", 0, "m", 0, offers=("here", "here"))]

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
