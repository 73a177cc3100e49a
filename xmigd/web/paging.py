"""Where a page of a long list begins, kept in its address: pages have links both ways, without a script or a session.

A page begins after the row that `before` names. `back` names where the pages began by which it was come to, the last
one last; the first page begins nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlencode

from fastapi import Depends, Query

KEPT = 50  # pages that can be gone back one by one


@dataclass(frozen=True, slots=True)
class Pages:
    before: str
    back: tuple[str, ...]

    def older(self, more: object) -> str:
        """The query of the next page, which begins after `more`."""
        return _query(str(more), (*self.back, self.before)[-KEPT:] if self.before else ())

    @property
    def newer(self) -> str:
        """Of the page before this one; empty: it is the first."""
        return _query(self.back[-1], self.back[:-1]) if self.back else ""


def _query(before: str, back: tuple[str, ...]) -> str:
    return urlencode({"before": before} | ({"back": ",".join(back)} if back else {}), safe=",")


def _pages(
    before: Annotated[str, Query(max_length=64, pattern=r"^[A-Za-z0-9_.-]*$")] = "",
    back: Annotated[str, Query(max_length=4096, pattern=r"^[A-Za-z0-9_.,-]*$")] = "",
) -> Pages:
    return Pages(before, tuple(each for each in back.split(",") if each))


ThePages = Annotated[Pages, Depends(_pages)]
