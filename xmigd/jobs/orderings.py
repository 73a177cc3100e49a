"""Pages of lists of jobs: where the next one begins.

What a job is called and when it began does not change, so a cursor of these orders is the last job's own value, and is
good for ever. State and memory do change: of these orders the daemon remembers the whole order of the first page for a
while, so that each job comes once, whatever has become of it meanwhile.
"""

from __future__ import annotations

import base64
import binascii
import json
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xmigd.errors import Gone, Invalid

KEPT = 64  # orders that are remembered
FOR = 600.0  # seconds since they were used last


@dataclass(frozen=True, slots=True)
class Cursor:
    sort: str
    reverse: bool
    value: Any  # of the sorted column; or how many came before, of an order that is remembered
    last: str  # the job's id; or what the order is called

    def text(self) -> str:
        packed = json.dumps([self.sort, self.reverse, self.value, self.last], separators=(",", ":"))
        return base64.urlsafe_b64encode(packed.encode()).decode().rstrip("=")


def parse(text: str, sort: str, reverse: bool) -> Cursor:
    """Raises Invalid: it is not one of this order."""
    try:
        found = json.loads(base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True))
        cursor = Cursor(*found)
        kinds: tuple[type, ...] = {"created": (int, float), "name": (str,)}.get(sort, (int,))
        fits = (cursor.sort, cursor.reverse) == (sort, reverse) and isinstance(cursor.value, kinds)
        if not fits or isinstance(cursor.value, bool) or not isinstance(cursor.last, str) or len(cursor.last) > 64:
            raise ValueError
        if isinstance(cursor.value, int) and not 0 <= cursor.value < 1 << 53:
            raise ValueError
    except (ValueError, TypeError, binascii.Error, RecursionError):
        raise Invalid(
            "cursor: it is not one of this list", code="bad_cursor",
            hint="send it as it was in Link, with the same sort and reverse; or leave it out to begin again",
        ) from None  # fmt: skip
    return cursor


class Orderings:
    """Orders that are remembered. Used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._orders: OrderedDict[tuple[int | None, str], tuple[float, Sequence[str]]] = OrderedDict()

    def keep(self, owner: int | None, ids: Sequence[str]) -> str:
        """What the order of these jobs is called. `owner`: who may use it."""
        name = secrets.token_hex(8)
        with self._lock:
            self._orders[owner, name] = (time.monotonic(), ids)
            while len(self._orders) > KEPT:
                self._orders.popitem(last=False)
        return name

    def get(self, owner: int | None, name: str) -> Sequence[str]:
        """Raises Gone."""
        with self._lock:
            used, ids = self._orders.pop((owner, name), (0.0, None))
            now = time.monotonic()
            if ids is not None and now - used < FOR:
                self._orders[owner, name] = (now, ids)
                return ids
        raise Gone("the list's order is not remembered any more", code="cursor_expired",
                   hint="begin again without cursor; with sort=created a cursor never expires")  # fmt: skip
