"""Plans that nobody has applied yet: the last ones, in memory. A restarted daemon has none."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from xmigd.errors import NotFound

KEPT = 50


class HasId(Protocol):
    @property
    def id(self) -> str: ...


P = TypeVar("P", bound=HasId)


class KeptPlans(Generic[P]):
    """`kind`: of plans, as errors name it. `command`: that makes a new one."""

    def __init__(self, kind: str, command: str) -> None:
        self._kind = kind
        self._command = command
        self._plans: OrderedDict[str, P] = OrderedDict()

    def keep(self, plan: P) -> None:
        self._plans[plan.id] = plan
        while len(self._plans) > KEPT:
            self._plans.popitem(last=False)

    def find(self, id: str) -> P:
        """Raises NotFound."""
        found = self._plans.get(id)
        if found is None:
            raise NotFound(
                f"there is no {self._kind} {id[:40]!r}",
                hint=f"xmigd keeps the last {KEPT} until it is restarted; make a new one: {self._command}",
            )
        return found

    def listed(self, limit: int) -> Sequence[P]:
        """Newest first."""
        return list(reversed(self._plans.values()))[:limit]
