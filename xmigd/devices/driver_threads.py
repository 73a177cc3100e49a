"""Questions to the driver, each device's in a thread of its own: a driver that hangs keeps nobody waiting for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

ANSWER_WITHIN = 10.0  # seconds; without persistence mode a first question takes some


class Silent(Exception):
    """The driver has not answered a question about this device."""


class DriverThreads:
    """For any thread. Threads that hang do not keep the daemon from its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: dict[str, _Thread] = {}

    def ask(self, device: str, question: Callable[[], T], within: float = ANSWER_WITHIN) -> T:
        """Raises what `question` raises; Silent: there is no answer in time, or an earlier question has none yet."""
        with self._lock:
            thread = self._threads.setdefault(device, _Thread(device))
        return thread.ask(question, within)


class _Thread:
    def __init__(self, device: str) -> None:
        self._lock = threading.Lock()
        self._hung: Future[Any] | None = None  # a question that had no answer in time
        self._questions: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        threading.Thread(target=self._run, name=f"driver-{device}", daemon=True).start()

    def ask(self, question: Callable[[], T], within: float) -> T:
        with self._lock:
            if self._hung is not None and not self._hung.done():
                raise Silent
        answer: Future[T] = Future()
        self._questions.put((question, answer))
        try:
            return answer.result(within)
        except TimeoutError:
            if answer.done():
                raise  # the question's own
            if not answer.cancel():  # it was begun
                with self._lock:
                    self._hung = answer
            raise Silent from None

    def _run(self) -> None:
        while True:
            question, answer = self._questions.get()
            if answer.set_running_or_notify_cancel():
                try:
                    result = question()
                except BaseException as error:
                    answer.set_exception(error)
                else:
                    answer.set_result(result)
