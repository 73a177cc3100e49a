"""What is written on the command line becomes numbers and choices without pydantic, where that is plain.

typer (0.29) makes a pydantic adapter for each parameter of a command, also for one that nobody gave: loading pydantic
takes longer than the command. What is not plain, or wrong, goes typer's own way and gets its messages. With another
typer everything does.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import typer.core

_NO = object()


class _Quick:
    def __init__(self, descriptor: Any, build: Any) -> None:
        self._descriptor = descriptor
        self._build = build

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        several = param.multiple or param.nargs == -1
        if value is None:
            return () if several else None
        if not several and param.nargs == 1:
            found = _plain(value, self._descriptor.annotation, self._descriptor.parameter_info)
            if found is not _NO:
                return found
        return self._build(self._descriptor).coerce(value, param, ctx)


def _plain(value: Any, wanted: Any, about: Any) -> Any:
    if not isinstance(wanted, type) or getattr(about, "parser", None) or getattr(about, "click_type", None):
        return _NO
    if type(value) is wanted:  # a default, or text that stays text
        return value
    if issubclass(wanted, Enum) and isinstance(value, str):
        return next((each for each in wanted if each.value == value), _NO)
    if wanted is int and isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 16:
        number = int(value)
        low, high = about.min, about.max
        return number if (low is None or number >= low) and (high is None or number <= high) else _NO
    return _NO


def install() -> None:
    core: Any = typer.core
    build = getattr(core, "build_runtime_param", None)
    if build is not None and not getattr(build, "is_quick", False):
        core.build_runtime_param = quick = _quick(build)
        quick.is_quick = True


def _quick(build: Any) -> Any:
    return lambda descriptor: _Quick(descriptor, build)
