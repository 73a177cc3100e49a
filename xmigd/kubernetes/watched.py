"""Objects of the API server as they are now: read once, then followed. A thread each.

Invariants:
  Until everything was read once, nobody gets anything: `objects` is None. That the server is gone later changes nothing
  about what was known.
  A watch that was interrupted goes on where it was; if that is too long ago, everything is read again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from xmigd import log
from xmigd.kubernetes.api import Api, ApiError, Gone, NotThere

logger = log.get("kubernetes")

SOONEST, LATEST = 0.2, 15.0  # seconds before another try
ABSENT = 300.0  # seconds after which is looked again for a kind that the server does not have


class Watched:
    """`path`: of the list. `params`: its selectors. `changed` is called by the thread."""

    def __init__(self, api: Api, path: str, changed: Callable[[], None], **params: str) -> None:
        self._api = api
        self._path = path
        self._params = params
        self._changed = changed
        self._lock = threading.Lock()
        self._known: dict[str, dict[str, Any]] | None = None
        self._version = ""
        self._stopped = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name=self._path, daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    @property
    def objects(self) -> list[dict[str, Any]] | None:
        """None: it is not known yet."""
        with self._lock:
            return None if self._known is None else list(self._known.values())

    def _run(self) -> None:
        wait = SOONEST
        while not self._stopped.is_set():
            try:
                if not self._version:
                    self._read()
                self._follow()
                wait = SOONEST
            except Gone:
                self._version = ""
                continue
            except NotThere:
                self._keep({}, "")
                self._stopped.wait(ABSENT)
                continue
            except ApiError as error:
                logger.warning("a watch is interrupted", path=self._path, why=error.message, again_in=wait)
            except Exception:
                logger.exception("a watch failed", path=self._path)
                self._version = ""
            self._stopped.wait(wait)
            wait = min(2 * wait, LATEST)

    def _read(self) -> None:
        found, version = self._api.list(self._path, **self._params)
        self._keep({_key(each): each for each in found}, version)

    def _keep(self, known: dict[str, dict[str, Any]], version: str) -> None:
        with self._lock:
            self._known = known
        self._version = version
        self._changed()

    def _follow(self) -> None:
        for kind, found in self._api.watch(self._path, self._version, **self._params):
            if kind != "BOOKMARK":
                with self._lock:
                    assert self._known is not None
                    if kind == "DELETED":
                        self._known.pop(_key(found), None)
                    else:
                        self._known[_key(found)] = found
                self._changed()
            self._version = str((found.get("metadata") or {}).get("resourceVersion") or self._version)


def _key(found: dict[str, Any]) -> str:
    metadata = found.get("metadata") or {}
    return f"{metadata.get('namespace', '')}/{metadata.get('name', '')}"
