"""Who is resumed together: all of them, or nobody."""

from __future__ import annotations

from xmigd.groups.resumptions import LetIn, NotResumed, Resumptions


def test_all_are_let_in_at_once() -> None:
    resumptions = Resumptions()
    resumptions.begin(["a", "b", "c"])
    assert resumptions.restored("b") == []
    assert resumptions.restored("a") == []
    assert resumptions.restored("c") == [LetIn("a"), LetIn("b"), LetIn("c")]
    assert resumptions.members("a") == set()


def test_one_fails() -> None:
    resumptions = Resumptions()
    resumptions.begin(["a", "b"])
    assert resumptions.restored("a") == []
    (other,) = resumptions.failed("b", "no room")
    assert other == NotResumed("a", "another rank is not resumed: no room")
    assert resumptions.failed("a", "it is taken back") == []
    assert isinstance(resumptions.restored("a")[0], NotResumed)


def test_a_program_ends_meanwhile() -> None:
    """The others do not wait for it."""
    resumptions = Resumptions()
    resumptions.begin(["a", "b"])
    assert resumptions.restored("a") == []
    assert resumptions.gone("b") == [LetIn("a")]
    resumptions.begin(["a"])
    assert resumptions.gone("a") == []
