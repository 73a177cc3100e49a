"""How often one caller may ask: a bucket that fills with time."""

from __future__ import annotations

import time
from collections import OrderedDict

from xmigd.errors import TooManyRequests

MAX_CALLERS = 10_000


class RateLimit:
    """`rate` requests a second, `burst` at once. rate 0: any number."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # caller → (requests left, when)

    def take(self, caller: str) -> None:
        """Raises TooManyRequests."""
        if self._rate == 0:
            return
        now = time.monotonic()
        left, when = self._buckets.get(caller, (self._burst, now))
        left = min(self._burst, left + (now - when) * self._rate)
        if left < 1:
            self._buckets[caller] = (left, now)
            raise TooManyRequests(
                f"{caller} asks more often than {self._rate:g} times a second", hint="ask less often",
                retry_after=(1 - left) / self._rate,
            )  # fmt: skip
        self._buckets[caller] = (left - 1, now)
        self._buckets.move_to_end(caller)
        if len(self._buckets) > MAX_CALLERS:
            self._buckets.popitem(last=False)
