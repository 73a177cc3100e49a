"""What is done behind the job, in a thread of its own: whenever there is something to do, and again after a failure."""

from __future__ import annotations

import abc
import threading
from typing import Any

from xmigd.errors import XmigError

FIRST_RETRY = 1.0  # seconds after a failure; twice as many after each further one


class Behind(abc.ABC):
    """`name`: of its thread. `every`: seconds after which it looks although nobody has woken it; None: never."""

    def __init__(self, name: str, *, longest_retry: float, every: float | None, logger: Any) -> None:
        self._thread_name = name
        self._longest_retry = longest_retry
        self._every = every
        self._logger = logger
        self._woken = threading.Event()
        self._stopping = threading.Event()
        self._failures = 0

    def start(self) -> None:
        threading.Thread(target=self._run, name=self._thread_name, daemon=True).start()

    def stop(self) -> None:
        """Does not wait for it."""
        self._stopping.set()
        self._woken.set()

    def wake(self) -> None:
        """There is something to do."""
        self._woken.set()

    @abc.abstractmethod
    def _look(self) -> None:
        """Do what is to be done. Raises OSError, XmigError: it is tried again."""

    @abc.abstractmethod
    def _report(self, error: Exception, wait: float) -> None:
        """It has failed, and is tried again after so many seconds."""

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._woken.clear()
            try:
                self._look()
                self._failures = 0
            except Exception as error:
                if self._stopping.is_set():
                    return
                if not isinstance(error, OSError | XmigError):
                    self._logger.exception("work behind the jobs failed", work=self._thread_name)
                wait = min(FIRST_RETRY * 2.0 ** min(self._failures, 20), self._longest_retry)
                self._failures += 1
                self._report(error, wait)
                self._stopping.wait(wait)
                continue
            self._woken.wait(self._every)
