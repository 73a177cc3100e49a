"""Makes a program that fails smaller: delta debugging (Zeller and Hildebrandt, 2002) on its calls, each try made valid.

A call is left out together with whatever is not valid without it: what used its memory, what was ordered by it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.differential.model import valid
from tests.differential.program import Op, Program


def shrink(program: Program, fails: Callable[[Program], bool], most: int = 2000) -> Program:
    """The smallest found with at most this many tries. ``fails``: does it still?"""
    best = list(program.ops)
    tries = 0

    def still(ops: list[Op]) -> bool:
        nonlocal tries, best
        ops = valid(program, ops)
        if len(ops) >= len(best) or tries >= most:
            return False
        tries += 1
        if not fails(replace(program, ops=ops)):
            return False
        best = ops
        return True

    def snapshot(size: int) -> bool:
        at, found = 0, False
        while at < len(best):
            if still(best[:at] + best[at + size :]):
                found = True
            else:
                at += size
        return found

    size = max(1, len(best) // 2)
    while tries < most:
        if not snapshot(size) and size == 1:
            break
        size = max(1, size // 2)
    return replace(program, ops=best)
