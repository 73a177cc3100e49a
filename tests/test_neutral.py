"""What of the server knows no vendor: docs/decisions/0041."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

SHIM = Path(__file__).parents[1] / "shim"
# Folders and files of the server that may not know CUDA, nor what does.
NEUTRAL = (
    "channel", "faults", "memory", "migration", "records", "recovery", "snapshot",
    "clock.h", "contexts.h", "execution.h", "options.h", "options.cc", "peers.h", "peers.cc", "services.h",
)  # fmt: skip
# These do: the driver's header and table, devices that have one, records' arguments, and folders that are not neutral.
VENDORS = re.compile(
    r"cuda\.h|driver_table\.h|ops\.h|device/(?!runtime\.h).*|api/.*|server/(cuda|executor|control)/.*|server/measure\.h"
)
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
NAMES = re.compile(r"\b(CU[a-z]\w*|CU_\w+|CUDA_\w+|cu[A-Z]\w*\()")


def sources() -> list[Path]:
    """Everything that is neutral, and the headers of ours that it includes, however far away."""
    found: list[Path] = []
    todo: list[Path] = []
    for name in NEUTRAL:
        path = SHIM / "server" / name
        todo.extend(sorted(path.rglob("*.*")) if path.is_dir() else [path])
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found.append(path)
        todo.extend(SHIM / name for name in includes(path) if (SHIM / name).exists() and not VENDORS.fullmatch(name))
    return found


def includes(path: Path) -> Iterator[str]:
    return (found[1] for found in INCLUDE.finditer(path.read_text()))


def test_neutral_parts_include_nothing_of_a_vendor() -> None:
    wrong = [
        f"{path.relative_to(SHIM)} includes {name}"
        for path in sources()
        for name in includes(path)
        if VENDORS.fullmatch(name)
    ]
    assert not wrong


def test_neutral_parts_name_nothing_of_a_vendor() -> None:
    """A precompiled header, or one that is included by chance, would let a name through."""
    wrong: list[str] = []
    for path in sources():
        code = re.sub(r"//[^\n]*", "", path.read_text())
        wrong.extend(f"{path.relative_to(SHIM)}: {found[0]}" for found in NAMES.finditer(code))
    assert not wrong


def test_the_check_finds_what_it_looks_for() -> None:
    assert len(sources()) > 60
    handlers = SHIM / "server" / "cuda" / "handlers"
    assert any(VENDORS.fullmatch(name) for name in includes(handlers / "handlers.h"))
    assert NAMES.search((handlers / "copies.cc").read_text())
