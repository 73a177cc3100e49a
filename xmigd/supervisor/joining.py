"""What a job of several nodes is suspended or resumed with: a request that comes from another one of its nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from xmigd.supervisor import node_messages as n
from xmigd.supervisor.process import Process


@dataclass(frozen=True, slots=True)
class Join:
    """These processes of this node are to be suspended, or resumed on their devices, with others that have begun. What
    is under way of them already is meant."""

    what: n.What
    to: n.To
    processes: tuple[Process, ...]
    node: str  # where it was requested, or the one that leads


JoinHere = Callable[[Join], None]
