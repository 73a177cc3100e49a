"""What ranks hold, compared: which difference is a finding, and which is not."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from xmigd.groups.replicas import (
    CHANGES,
    CHUNK,
    CONFIRMED,
    CONFIRMED_OF_TWO,
    CONSTANT,
    FEW,
    OF_TWO,
    Content,
    Finding,
    Replicas,
    Seen,
)

BASE = 0x2000_0000_0000
ZEROS = 99
Hashes = Sequence[int | None]  # of a rank, by chunk; None: it has none


class Ranks:
    """Named a, b, c …, with so many chunks. What they hold is the same everywhere, and new at each round, where nothing
    else is given."""

    def __init__(self, ranks: int, chunks: int = 1) -> None:
        self.names = [chr(ord("a") + number) for number in range(ranks)]
        self.replicas = Replicas(self.names)
        self.chunks = chunks
        self.work = [0] * ranks
        self.fresh = itertools.count(1000)

    def at(self, chunk: int) -> int:
        return BASE + chunk * CHUNK

    def look(
        self,
        held: Mapping[int, Hashes] | None = None,
        *,
        busy: Iterable[int] = (),
        allocated: Mapping[int, int] | None = None,
    ) -> Seen:
        """`held`: of a chunk, by rank. `busy`: ranks that have done more than others. `allocated`: bytes, by rank."""
        rows = [[next(self.fresh)] * len(self.names) for _ in range(self.chunks)]
        for chunk, hashes in (held or {}).items():
            rows[chunk] = list(hashes)  # type: ignore[arg-type]
        contents = []
        for rank in range(len(self.names)):
            self.work[rank] += 100 + (rank + 1) * (rank in busy)
            there = [chunk for chunk in range(self.chunks) if rows[chunk][rank] is not None]
            size = (allocated or {}).get(rank, self.chunks * CHUNK)
            contents.append(
                Content(
                    [self.at(chunk) for chunk in there], [rows[chunk][rank] for chunk in there], ZEROS,
                    [BASE, size, 1], self.work[rank],
                )
            )  # fmt: skip
        return self.replicas.look(contents)

    def learn(self, rounds: int | None = None) -> Ranks:
        """Until the classes are believed in."""
        for _ in range(1 + CHANGES * (OF_TWO if len(self.names) == 2 else 1) if rounds is None else rounds):
            assert self.look().findings == ()
        return self


def test_a_rank_differs_and_does_so_again() -> None:
    ranks = Ranks(3, 2).learn()
    seen = ranks.look({1: (7, 8, 7)})
    assert (seen.findings, seen.suspected, seen.watched) == ((), 1, 2)
    seen = ranks.look({1: (9, 10, 9)})
    assert seen.findings == (Finding(("b",), ("a", "c"), (ranks.at(1),)),)
    assert ranks.look({1: (11, 12, 11)}).findings == (), "it is found once"


def test_two_ranks_differ() -> None:
    ranks = Ranks(2, 2).learn()
    for number in range(CONFIRMED_OF_TWO - 1):
        assert ranks.look({0: (7 + number, 70 + number)}).findings == ()
    assert ranks.look({0: (50, 51)}).findings == (Finding(("a", "b"), (), (ranks.at(0),)),)


def test_several_ranks_differ_each_in_its_way() -> None:
    ranks = Ranks(5).learn()
    ranks.look({0: (1, 2, 1, 3, 1)})
    found = ranks.look({0: (4, 5, 4, 6, 4)}).findings
    assert found == (Finding(("b",), ("a", "c", "e"), (BASE,)), Finding(("d",), ("a", "c", "e"), (BASE,)))


def test_what_never_changes_is_believed_in_later() -> None:
    ranks = Ranks(3, 2)
    for _ in range(CONSTANT):
        assert ranks.look({1: (5, 5, 5)}).watched <= 1
    assert ranks.look({1: (5, 5, 5)}).watched == 2
    ranks.look({1: (5, 5, 6)})
    assert ranks.look({1: (5, 5, 6)}).findings == (Finding(("c",), ("a", "b"), (ranks.at(1),)),)


def test_zeros_and_patterns_prove_nothing() -> None:
    """Whoever has not used a buffer yet has what all others have there."""
    ranks = Ranks(3, 3)
    for _ in range(3 * CONSTANT):
        ranks.look({0: (ZEROS,) * 3, 1: (5,) * 3, 2: (5,) * 3})
    for number in range(CONFIRMED + 1):
        held = {0: (20 + number, ZEROS, ZEROS), 1: (5, 30 + number, 5), 2: (5, 5, 5)}
        assert ranks.look(held).findings == ()


def test_a_rank_that_has_zeros_has_cleared_it_or_has_got_other_memory() -> None:
    ranks = Ranks(3).learn()
    for number in range(CONFIRMED + 1):
        assert ranks.look({0: (number, number, ZEROS)}).findings == ()


def test_a_rank_that_has_something_where_others_have_zeros() -> None:
    """They have cleared what it uses. What they write there later says nothing of it."""
    ranks = Ranks(3).learn()
    ranks.look({0: (7, ZEROS, ZEROS)}, busy=[0])
    for number in range(CONFIRMED + 1):
        assert ranks.look({0: (10 + number, 50 + number, 50 + number)}).findings == ()


def test_a_rank_that_has_done_more() -> None:
    ranks = Ranks(3, 2).learn()
    assert ranks.look({1: (7, 8, 7)}, busy=[1]).suspected == 0
    for number in range(CONFIRMED + 1):
        assert ranks.look({1: (10 + number, 20 + number, 10 + number)}).findings == ()


def test_a_rank_that_does_more_all_the_time_says_nothing_of_others() -> None:
    """It writes the log. Who does the same as one of two others can be judged by them."""
    ranks = Ranks(3)
    for _ in range(CHANGES + 1):
        ranks.look(busy=[0])
    ranks.look({0: (7, 8, 7)}, busy=[0])
    assert ranks.look({0: (9, 10, 9)}, busy=[0]).findings == (Finding(("b",), ("a", "c"), (BASE,)),)


def test_a_rank_of_which_it_is_not_known_what_it_has_done() -> None:
    ranks = Ranks(3).learn()
    ranks.work[1] = -1000  # another server, of which nothing is known
    assert ranks.look({0: (7, 8, 7)}).suspected == 0


def test_a_rank_with_other_allocations() -> None:
    ranks = Ranks(3).learn()
    for number in range(CONFIRMED + 1):
        assert ranks.look({0: (number, 50 + number, number)}, allocated={1: 1000}).findings == ()


def test_a_rank_frees_memory() -> None:
    ranks = Ranks(3, 2).learn()
    assert ranks.look({1: (7, None, 7)}).suspected == 0
    for number in range(CONFIRMED + 1):
        assert ranks.look({1: (10 + number, 20 + number, 10 + number)}).findings == ()


def test_some_do_something_else_together() -> None:
    ranks = Ranks(5).learn()
    for number in range(CONFIRMED + 1):
        assert ranks.look({0: (number, number, number, 70 + number, 70 + number)}).findings == ()


def test_nobody_has_a_majority() -> None:
    """Gradients before they are summed."""
    ranks = Ranks(4).learn()
    for number in range(CONFIRMED + 1):
        assert ranks.look({0: (number, number, 70 + number, 90 + number)}).findings == ()


def test_a_rank_whose_memory_mostly_differs() -> None:
    ranks = Ranks(3, 2 * FEW + 2).learn()
    seen = ranks.look({chunk: (500 + chunk, 700 + chunk, 500 + chunk) for chunk in range(FEW + 2)})
    assert (seen.unlike, seen.suspected) == (("b",), 0)
    for number in range(CONFIRMED):
        held = {chunk: (800 + number + 50 * chunk, 600 + chunk, 800 + number + 50 * chunk) for chunk in range(FEW + 2)}
        assert ranks.look(held).findings == ()


def test_equality_that_comes_and_goes_takes_longer() -> None:
    ranks = Ranks(3).learn()
    ranks.look({0: (7, 8, 7)})
    assert ranks.look().suspected == 0
    for _ in range(2 * CHANGES - 2):
        assert ranks.look().watched == 0
    assert ranks.look().watched == 1
    ranks.look({0: (7, 8, 7)})
    assert ranks.look({0: (9, 10, 9)}).findings != ()


def test_who_is_equal_again_is_watched_again() -> None:
    """It was restored: it takes as long as at first."""
    ranks = Ranks(3).learn()
    for number in range(CONFIRMED):
        ranks.look({0: (number, 50 + number, number)})
    for _ in range(CHANGES + 1):
        ranks.look()
    ranks.look({0: (7, 8, 7)})
    assert ranks.look({0: (9, 10, 9)}).findings == (Finding(("b",), ("a", "c"), (BASE,)),)


def test_ranks_of_two_kinds() -> None:
    """Tensor-parallel: a and c hold the same, b and d something else. Each class is its own."""
    ranks = Ranks(6)
    for number in range(CHANGES + 1):
        ranks.look({0: (number, 50 + number) * 3})
    ranks.look({0: (7, 8, 7, 8, 7, 9)})
    found = ranks.look({0: (17, 18, 17, 18, 17, 19)}).findings
    assert found == (Finding(("f",), ("b", "d"), (BASE,)),)


# What a rank's chunk does at a round, of those that are no finding whatever comes before and after them.
WAYS = ["equal", "same", "own", "zeros", "odd", "freed"]


@given(
    ranks=st.integers(3, 6),
    rounds=st.lists(st.tuples(st.sampled_from(WAYS), st.sampled_from(WAYS), st.integers(0, 5)), max_size=60),
)
def test_what_is_done_on_purpose_is_never_found(ranks: int, rounds: list[tuple[str, str, int]]) -> None:
    """Two chunks of three and more ranks, in any order: equal and new, equal and the same, each rank its own, zeros,
    one rank other than the others because it has done more, memory that one has not. Whoever has become odd stays so
    for as long as nobody writes all."""
    world = Ranks(ranks, 2).learn()
    odd: dict[int, set[int]] = {0: set(), 1: set()}
    last = [1, 2]
    for number, (first, second, who) in enumerate(rounds):
        held: dict[int, Hashes] = {}
        busy = set()
        for chunk, way in enumerate((first, second)):
            rank = who % ranks
            if way in ("equal", "zeros"):
                last[chunk] = ZEROS if way == "zeros" else 1000 * (number + 2) + chunk
            if way == "own":
                held[chunk] = [1000 * (number + 2) + 10 * one + chunk for one in range(ranks)]
                continue
            if way == "odd":
                odd[chunk].add(rank)
                busy.add(rank)
            row: list[int | None] = [
                1000 * (number + 2) + 10 * one + 500 + chunk if one in odd[chunk] else last[chunk]
                for one in range(ranks)
            ]
            if way == "freed":
                row[rank] = None
                odd[chunk].add(rank)  # and has something else when it has it again
            held[chunk] = row
        assert world.look(held, busy=busy).findings == ()


@given(
    ranks=st.integers(3, 6), chunks=st.integers(1, 5), bad=st.integers(0, 5), where=st.integers(0, 4),
    before=st.lists(st.booleans(), max_size=8), stays=st.booleans(),
)  # fmt: skip
def test_what_goes_wrong_in_memory_that_is_believed_in_is_found(
    ranks: int, chunks: int, bad: int, where: int, before: list[bool], stays: bool
) -> None:
    """By the second round, whatever the others do: where, and whose it is. `stays`: the content does not change."""
    world = Ranks(ranks, chunks)
    bad, where = bad % ranks, where % chunks
    content = 5
    for changes in [*before, *[True] * (CHANGES + 1)]:
        content += changes
        world.look({where: (content,) * ranks})
    for number in range(CONFIRMED):
        content += not stays
        seen = world.look({where: [content + 300 * (one == bad) for one in range(ranks)]})
        others = tuple(name for rank, name in enumerate(world.names) if rank != bad)
        wanted = (Finding((world.names[bad],), others, (world.at(where),)),)
        assert seen.findings == (wanted if number == CONFIRMED - 1 else ())
