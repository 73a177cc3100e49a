"""Who wants to hear of something, known after who tells it: so that objects are made in the order of what they need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Subscribers(Generic[T]):
    """Called one after the other, in the thread that tells."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[T], None]] = []

    def add(self, callback: Callable[[T], None]) -> None:
        self._callbacks.append(callback)

    def __call__(self, value: T) -> None:
        for callback in self._callbacks:
            callback(value)
