"""Ranks of two nodes: what one of them reports to the leader, and what is decided for its ranks, takes its time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from xmigd.groups import instructions as i
from xmigd.groups.ties import Who
from xmigd.process import events as e
from xmigd.process import migration_events as v

from .group_world import GroupWorld

FAR = (2, 3)


class FarWorld(GroupWorld):
    """As a link does it: each message arrives once, and in the order in which it was sent, in each direction."""

    def __init__(self) -> None:
        self.to_leader: deque[tuple[str, tuple[Any, ...]]] = deque()
        self.from_leader: deque[Callable[[], None]] = deque()
        self.leaving: set[int] = set()  # far ranks, until it is decided, as far as their node knows
        self.held_by: dict[int, int | None] = {}  # far ranks, in the last round: by which server
        self.short: set[int] = set()  # of these it has given up what was made ahead
        self.arrives = True
        super().__init__()
        self.arrives = False

    def group(self, method: str, *arguments: Any) -> None:
        if method == "held":
            self.held_by[int(arguments[0])] = self.machines[int(arguments[0])].active
        if self.arrives or not arguments or not self._is_far(arguments[0]):
            super().group(method, *arguments)
        elif method == "communicator" and arguments[-1] == "joined":
            who = arguments[0]
            if not self.machines[int(who.process)].grouped:  # at once: it must not be replaced alone
                self.tell(int(who.process), e.Grouped, on=True)
            self.to_leader.append((method, arguments))
        elif method == "hand_over":
            self.leaving.add(int(arguments[0]))
            self.to_leader.append((method, arguments))
        elif method == "move_over":
            self._stays_there(int(arguments[0]), "it is over")
            self.to_leader.append((method, arguments))
        elif method != "stay":  # what was to be suspended `refuses`; what was to move is `move_over`
            self.to_leader.append((method, arguments))

    def changed(self, rank: int, instruction: e.Instruction) -> None:
        if rank in FAR and not self.arrives:
            self.to_leader.append(("changed", (rank, instruction)))
        else:
            super().changed(rank, instruction)

    @staticmethod
    def _is_far(about: Any) -> bool:
        name = about.process if isinstance(about, Who) else about
        return isinstance(name, str) and int(name) in FAR

    def do_group(self, instruction: i.Instruction) -> None:
        if isinstance(instruction, i.Recover):
            decided = max(self.journals[int(one)].decided for one in instruction.members)
            self.recovered += 1
            made = ("recovered", self.recovered)
            for one, gone in instruction.members.items():
                self._bring(int(one), lambda r=int(one), g=gone: self._go(r, decided, g, made))  # type: ignore[misc]
        elif isinstance(instruction, i.Stays | i.Settled):
            GroupWorld.do_group(self, instruction)
        else:
            if isinstance(instruction, i.Take) and instruction.leaves and int(instruction.process) in FAR:
                self.hands_over.pop(int(instruction.process), None)
                self.left.add(instruction.process)
            self._bring(int(instruction.process), lambda: GroupWorld.do_group(self, instruction))

    def _go(self, rank: int, decided: int, gone: tuple[str, ...], made: tuple[str, int]) -> None:
        self.made_after[rank] = made
        self.tell(rank, e.GroupGo, decided=decided, gone=gone)

    def _bring(self, rank: int, what: Callable[[], None]) -> None:
        if rank in FAR and not self.arrives:
            self.from_leader.append(what)
        else:
            what()

    # Moves, as supervisor/following.py has them.

    def move_over(self, process: str) -> None:
        super().move_over(process)
        GroupWorld.group(self, "stay", process, "it is over")

    def stays(self, rank: int, why: str) -> None:
        if rank not in FAR:
            super().stays(rank, why)
        elif self.hands_over.pop(rank, None) is not None:
            self._bring(rank, lambda: self._stays_there(rank, why))

    def _stays_there(self, rank: int, why: str) -> None:
        active = self.machines[rank].active
        if rank in self.leaving:
            self.leaving.discard(rank)
            if active is not None:
                self.tell(rank, v.HandoverFailed, server=active, text=why)

    def moves_with(self, take: i.Take) -> bool:
        rank = int(take.process)
        if rank not in FAR:
            return super().moves_with(take)
        if self.machines[rank].active != self.held_by[rank]:
            return False  # another server was meant
        can = rank not in self.short
        if take.leaves:
            can = can and rank in self.leaving and take.communicators == (self.target_of(rank),)
            self.leaving.discard(rank)
        if not can:
            why = "it was given up meanwhile"
            self.changed(rank, e.GroupBroken(why))
            self.to_leader.append(("broken", (take.process, why)))
            self.tell(rank, e.GroupLost, reason=why)
        return can

    def give_up(self, rank: int) -> None:
        """Memory of the other node is needed, and what its ranks have made ahead is forgotten there."""
        self.short.add(rank)
        self.to_leader.append(("gave_up", (str(rank),)))

    def gave_up(self, process: str) -> None:
        """The leader has what was made with it forgotten; from now on it is made once more."""
        for rank in list(self.hands_over):
            GroupWorld.group(self, "stay", str(rank), "what was made for it is void")
        self._bring(int(process), lambda: self.short.discard(int(process)))

    def hear(self) -> bool:
        """The leader, the next message. False: there is none."""
        if not self.to_leader:
            return False
        method, arguments = self.to_leader.popleft()
        if method == "changed":
            GroupWorld.changed(self, *arguments)
        else:
            GroupWorld.group(self, method, *arguments)
        return True

    def obey(self) -> bool:
        """The other node, the next message. False: there is none."""
        if not self.from_leader:
            return False
        self.from_leader.popleft()()
        return True

    def quieten(self) -> bool:
        return super().quieten() or self.hear() or self.obey()
