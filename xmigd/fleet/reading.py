"""What peers show of themselves to a caller of this node, over the links between daemons, and the answers to their
questions.

A question names whom the caller may see for: a user's number, or everybody, of operators. The peer believes that of
nodes that its operators have named (`fleet_readers`), as a file server believes its clients' machines, and of nobody
else. Answers are kept for each such viewer on their own: nobody is ever shown what another one was.

Invariants:
  No page waits for a peer for longer than `WAIT`. One question of a viewer to a peer is under way at a time.
  What a peer sends is checked before it is kept.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from pydantic import ValidationError

from xmigd import log
from xmigd.errors import XmigError
from xmigd.fleet.schemas import FleetNode, NodeShown, NodeState
from xmigd.ids import new_id
from xmigd.peers.link import Link
from xmigd.peers.links import PeerLinks
from xmigd.text import harmless

TOPIC = "fleet"
WAIT = 1.5  # seconds that a peer has for its answer, where a page waits for it
PLAN_WAIT = 10.0  # the same, where a plan does
ASK_AGAIN = 3.0  # seconds after which a question that was not answered is put anew
KEPT = 512  # last answers, of all peers and viewers
ANSWERING = 16  # questions of one peer at once

logger = log.get("fleet")

Viewer = tuple[str, int | None]  # peer, and the user whose things they see; None: everything
Own = Callable[[int | None], Awaitable[NodeShown]]


class Readings:
    """Lives in the event loop's thread."""

    def __init__(self, links: PeerLinks, own: Own, allowed: Callable[[], Sequence[str]]) -> None:
        """`allowed`: peers whose word about their callers counts here; `*`: all."""
        self._links = links
        self._own = own
        self._allowed = allowed
        self._questions: dict[str, Viewer] = {}
        self._under_way: dict[Viewer, tuple[str, asyncio.Future[str], float]] = {}  # and since when
        self._last: OrderedDict[Viewer, tuple[NodeShown, float]] = OrderedDict()
        self._answering: dict[str, int] = {}
        self._taking: set[str] = set()  # questions whose answers are being checked
        self._tasks: set[asyncio.Task[None]] = set()
        links.register(TOPIC, self)

    async def read(self, owner: int | None, *, wait: float = WAIT) -> list[FleetNode]:
        """Of this node and all peers, in their order. Takes `wait` seconds at most, beside this node's own part."""
        peers = self._links.links()
        names = {link.peer.name for link in peers}
        for viewer in [each for each in self._last if each[0] not in names]:
            del self._last[viewer]  # one that comes back under its name may be another one
        why = dict.fromkeys(names, "")
        began = {link.peer.name: self._ask((link.peer.name, owner)) for link in peers if link.is_up}
        here = asyncio.ensure_future(self._own(owner))
        # A peer that has let earlier questions of this viewer wait is not waited for again.
        fresh = [answer for answer, since in began.values() if time.monotonic() - since < wait]
        if fresh:
            await asyncio.wait(fresh, timeout=wait)
        for name, (answer, _) in began.items():
            why[name] = answer.result() if answer.done() else "silent"
        now = time.time()
        shown = await here
        own = FleetNode(
            name=self._links.node, here=True, state="answered", why="", answered_at=now, age_s=0.0, shown=shown
        )  # fmt: skip
        return [own, *(self._node(link, owner, why[link.peer.name], now, wait) for link in peers)]

    def _node(self, link: Link, owner: int | None, outcome: str, now: float, wait: float) -> FleetNode:
        """`outcome`: empty: there was no question; `ok`; `silent`; or state and reason of an answer that is none."""
        name = link.peer.name
        state, _, reason = outcome.partition(" ")
        if state == "ok":
            state, reason = "answered", ""
        elif state == "silent":
            reason = reason or f"it has not answered within {wait:g} s"
        elif not link.is_up:
            state, reason = ("refused" if link.state == "refused" else "unreachable"), link.why
        elif not state:
            state, reason = "silent", "it was connected a moment ago, and was not requested yet"
        last = self._last.get((name, owner))
        return FleetNode(
            name=name, here=False, state=cast(NodeState, state), why=reason,
            answered_at=None if last is None else last[1],
            age_s=None if last is None else max(0.0, now - last[1]), shown=None if last is None else last[0],
        )  # fmt: skip

    def _ask(self, viewer: Viewer) -> tuple[asyncio.Future[str], float]:
        """And since when (monotonic seconds): also one that was put before, and has not been answered."""
        now, found = time.monotonic(), self._under_way.get(viewer)
        if found is not None:
            if now - found[2] < ASK_AGAIN:
                return found[1:]
            self._questions.pop(found[0], None)  # whoever waits for its answer takes the next one
        id = new_id()
        future = asyncio.get_running_loop().create_future() if found is None else found[1]
        peer, owner = viewer
        self._questions[id], self._under_way[viewer] = viewer, (id, future, now)
        if not self._links.send(peer, {"topic": TOPIC, "op": "read", "id": id, "owner": owner}):
            self._settle(id, "unreachable there is no session with it yet")
        return future, now

    def _settle(self, id: str, outcome: str) -> None:
        viewer = self._questions.pop(id, None)
        if viewer is None:
            return
        found = self._under_way.get(viewer)
        if found is not None and found[0] == id:
            del self._under_way[viewer]
            if not found[1].done():
                found[1].set_result(outcome)

    # --- users of links -----------------------------------------------------------------------------------------------

    def session(self, peer: str) -> None:
        self.down(peer, "")

    def up(self, peer: str) -> None:
        pass

    def down(self, peer: str, why: str) -> None:
        """Whoever waits does not wait on: what a peer is sent when it is back is a new question."""
        for id, viewer in list(self._questions.items()):
            if viewer[0] == peer:
                self._settle(id, "unreachable the connection is lost")

    def received(self, peer: str, body: dict[str, Any]) -> None:
        if body.get("op") == "read":
            self._spawn(self._answer(peer, body))
        elif body.get("op") == "shown":
            id = body.get("id")
            viewer = self._questions.get(id) if isinstance(id, str) else None
            if viewer is not None and viewer[0] == peer and id not in self._taking:  # nobody else's answer counts
                self._taking.add(str(id))  # one answer to each question is looked at
                self._spawn(self._take(str(id), viewer, body))

    async def _take(self, id: str, viewer: Viewer, body: dict[str, Any]) -> None:
        try:
            self._settle(id, await self._checked(viewer, body))
        finally:
            self._taking.discard(id)

    async def _checked(self, viewer: Viewer, body: dict[str, Any]) -> str:
        """The outcome of an answer; one that is right is kept."""
        problem = body.get("problem")
        if problem is not None:
            if body.get("allowed") is not False:
                return f"silent {harmless(str(problem), 300)}"
            self._last.pop(viewer, None)  # what it showed before, it may not show any more
            return f"not_allowed {harmless(str(problem), 300)}"
        try:
            shown = await asyncio.to_thread(NodeShown.model_validate, body.get("shown"))
        except (ValidationError, RecursionError) as error:
            first = error.errors(include_url=False)[0] if isinstance(error, ValidationError) else {"msg": "too deep"}
            where = ".".join(str(each) for each in first.get("loc", ()))
            why = harmless(f"its answer is none: {where}: {first['msg']}", 300)
            return f"invalid {why}"
        wrong = contradiction(shown, viewer[1])
        if wrong:
            return f"invalid {wrong}"
        self._last[viewer] = shown, time.time()
        self._last.move_to_end(viewer)
        while len(self._last) > KEPT:
            self._last.popitem(last=False)
        return "ok"

    async def _answer(self, peer: str, body: dict[str, Any]) -> None:
        id, owner = body.get("id"), body.get("owner", -1)
        if not isinstance(id, str) or len(id) > 64:
            return
        if not (owner is None or (type(owner) is int and 0 <= owner < 1 << 32)):
            self._send(peer, {"id": id, "problem": "the question names no user"})
            return
        allowed = self._allowed()
        if "*" not in allowed and peer not in allowed:
            text = f"it shows nothing to callers of {peer}: its setting fleet_readers does not name that node"
            self._send(peer, {"id": id, "problem": text, "allowed": False})
            return
        if self._answering.get(peer, 0) >= ANSWERING:
            self._send(peer, {"id": id, "problem": "it answers other questions of this node"})
            return
        self._answering[peer] = self._answering.get(peer, 0) + 1
        try:
            shown = await self._own(owner)
            content = await asyncio.to_thread(shown.model_dump_json)
            self._send(peer, {"id": id, "shown": json.loads(content)})
        except (XmigError, ValueError) as error:
            self._send(peer, {"id": id, "problem": f"it cannot answer: {error}"[:300]})
        finally:
            self._answering[peer] -= 1

    def _send(self, peer: str, body: dict[str, Any]) -> None:
        self._links.send(peer, {"topic": TOPIC, "op": "shown"} | body)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def contradiction(shown: NodeShown, owner: int | None) -> str:
    """What of an answer cannot be, though each of its parts could; empty: nothing."""
    devices = [each.id for each in shown.devices]
    if len(set(devices)) != len(devices):
        return "it lists a device twice"
    jobs = [job.id for job in shown.jobs]
    if len(set(jobs)) != len(jobs):
        return "it lists a job twice"
    processes = [one.id for job in shown.jobs for one in job.processes]
    if len(set(processes)) != len(processes):
        return "it lists a process twice"
    if owner is not None and any(job.uid != owner for job in shown.jobs):
        return "it lists jobs of other users"
    return ""
