"""The folders of shim, of its client and of its server include each other in one order, that of docs/architecture.md.

What a sentence "Folders of `x` include each other in one order: ..." names first may include what it names later, and
never the other way. `a` with `b`: both may include the other. `a` beside `b`: neither does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import ROOT

SHIM = ROOT / "shim"
PARTS = ["shim", "shim/client", "shim/server"]
INCLUDE = re.compile(r'^\s*#\s*include\s+["<]([^">]+)[">]', re.MULTILINE)
# The driver's functions as the client has them, which files call by headers that are generated.
DEFINED = re.compile(r"^CUresult (cu[A-Z]\w*)\(", re.MULTILINE)
CALLED = re.compile(r"(?:(?<![\w:.>])|\bclient::)(cu[A-Z]\w*)\s*\(")
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


class Order:
    def __init__(self, part: str, sentence: str) -> None:
        self.height: dict[str, int] = {}
        self.free: set[int] = set()  # layers within which folders include each other
        for depth, layer in enumerate(sentence.split(",")):
            self.free |= {-depth} if " with " in layer else set()
            self.height |= dict.fromkeys(re.findall(r"`([\w/]+)`", layer), -depth)
        assert self.height, f"docs/architecture.md gives no order of the folders of {part}"

    def allows(self, above: str, below: str) -> bool:
        if above == below:
            return True
        return self.height[above] > self.height[below] or (
            self.height[above] == self.height[below] and self.height[above] in self.free
        )


def order_of(part: str) -> Order:
    text = " ".join((ROOT / "docs" / "architecture.md").read_text().split())
    found = re.search(rf"Folders of `{part}` include each other in one order:([^.]*)\.", text)
    assert found, f"docs/architecture.md gives no order of the folders of {part}"
    return Order(part, found[1])


def sources(part: Path) -> list[Path]:
    return sorted(path for path in part.rglob("*") if path.suffix in {".h", ".cc", ".c"})


def included(path: Path) -> Iterator[Path]:
    """The files of shim that a file includes, from shim; generated ones are none."""
    for name in INCLUDE.findall(path.read_text()):
        for folder in (SHIM, SHIM / "include", path.parent):
            if (folder / name).is_file():
                yield (folder / name).resolve()
                break


def reached(path: Path, part: Path, seen: set[Path]) -> Iterator[str]:
    """The folders of a part from which a file includes. One that lies in none of them stands for what it includes."""
    for other in included(path):
        if part not in other.parents or other in seen:
            continue
        inside = other.relative_to(part).parts
        if len(inside) > 1:
            yield inside[0]
        else:
            yield from reached(other, part, seen | {other})


@pytest.mark.parametrize("part", PARTS)
def test_the_order_names_every_folder(part: str) -> None:
    folders = {path.name for path in (ROOT / part).iterdir() if path.is_dir() and sources(path)}
    assert set(order_of(part).height) == folders


@pytest.mark.parametrize("part", PARTS)
def test_no_include_goes_up(part: str) -> None:
    order, top = order_of(part), ROOT / part
    wrong = [
        f"{path.relative_to(ROOT)} includes from {folder}"
        for path in sources(top)
        if path.parent != top
        for folder in reached(path, top, {path})
        if not order.allows(path.relative_to(top).parts[0], folder)
    ]
    assert not wrong


def test_no_call_of_a_driver_function_goes_up() -> None:
    order, top = order_of("shim/client"), SHIM / "client"
    texts = {path: COMMENT.sub("", path.read_text()) for path in sources(top)}
    where = {name: path.relative_to(top).parts[0] for path, text in texts.items() for name in DEFINED.findall(text)}
    wrong = [
        f"{path.relative_to(ROOT)} calls {name} of {where[name]}"
        for path, text in texts.items()
        for name in CALLED.findall(DEFINED.sub("", text))
        if name in where and not order.allows(path.relative_to(top).parts[0], where[name])
    ]
    assert not wrong
