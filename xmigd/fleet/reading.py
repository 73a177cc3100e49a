"""What peers show of themselves to a caller of this node, over the links between daemons, and the answers to their
questions.

A question names whom the caller may see for: a user's number, or everybody, of operators. The peer believes that of
nodes that its operators have named (`fleet_readers`), as a file server believes its clients' machines, and of nobody
else. Answers are kept for each such viewer on their own: nobody is ever shown what another one was.

Invariants:
  No page waits for its peers for longer than `WAIT`. One question of a viewer to a peer is under way at a time.
  What a peer sends is checked before it is kept. What is kept of one peer has a bound of its own.
  Questions are put in portions, so that the answers of a thousand nodes do not keep the loop from recovering programs.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from xmigd import log
from xmigd.errors import XmigError
from xmigd.fleet.schemas import FleetNode, FleetTotals, NodeShown, NodeState
from xmigd.ids import new_id
from xmigd.peers.link import Link
from xmigd.peers.links import PeerLinks
from xmigd.text import harmless

TOPIC = "fleet"
WAIT = 1.5  # seconds that a peer has for its answer, where a page waits for it
PLAN_WAIT = 10.0  # the same, where a plan does
ASK_AGAIN = 3.0  # seconds after which a question that was not answered is put anew
OTHERS = 15.0  # seconds for which an answer counts where its node is not on the page
AT_ONCE = 64  # questions of a portion
SILENT = 1.0  # seconds after which who has not answered counts as silent, if nobody waits any longer
PORTION = 0.05  # seconds after which the next portion follows, if not all of this one are answered
KEPT = 256 << 20  # bytes of answers, of all peers and viewers
KEPT_OF_PEER = 4 << 20
EACH = 512  # bytes that an answer takes beside its content
ANSWERING = 16  # questions of one peer at once

logger = log.get("fleet")

Viewer = tuple[str, int | None]  # peer, and the user whose things they see; None: everything
Own = Callable[[int | None], Awaitable[NodeShown]]


@dataclass(frozen=True, slots=True)
class Seen:
    """Of a peer, by one viewer."""

    state: NodeState
    why: str
    since: float  # Unix seconds
    content: bytes | None = None  # the last answer, as JSON
    at: float = 0.0  # when it came, in Unix seconds
    counts: FleetTotals | None = None  # of it

    @property
    def size(self) -> int:
        return EACH + len(self.content or b"")


@dataclass(frozen=True, slots=True)
class Answered:
    """What was found in an answer."""

    state: NodeState
    why: str = ""
    content: bytes | None = None
    counts: FleetTotals | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """Which nodes a page shows."""

    limit: int
    after: str = ""  # the last node of the page before; empty: it is the first
    name: str = ""  # part of the names of the nodes
    state: NodeState | None = None


class Readings:
    """Lives in the event loop's thread."""

    def __init__(self, links: PeerLinks, own: Own, allowed: Callable[[], Sequence[str]]) -> None:
        """`allowed`: peers whose word about their callers counts here; `*`: all."""
        self._links = links
        self._own = own
        self._allowed = allowed
        self._questions: dict[str, Viewer] = {}
        self._under_way: dict[Viewer, tuple[str, asyncio.Future[None], float]] = {}  # and since when
        self._tried: dict[Viewer, float] = {}  # when it was last answered, or was not in time (monotonic seconds)
        self._seen: dict[str, OrderedDict[int | None, Seen]] = {}  # by peer and user, the oldest first
        self._held: Counter[str] = Counter()  # bytes, by peer
        self._total = 0  # bytes, of all
        self._renewing: set[int | None] = set()  # for whom
        self._answering: dict[str, int] = {}
        self._arrived: dict[str, tuple[Viewer, dict[str, Any]]] = {}  # answers that are to be checked, by question
        self._checking: set[str] = set()  # questions whose answers are being checked
        self._tasks: set[asyncio.Task[None]] = set()
        links.register(TOPIC, self)

    async def read(self, owner: int | None, *, of: Collection[str] | None = None) -> list[FleetNode]:
        """This node and these peers, or all, in their order, for a plan. Takes `PLAN_WAIT` seconds at most, beside this
        node's own part."""
        peers = self._peers()
        names = [name for name in peers if of is None or name in of]
        here = asyncio.ensure_future(self._here(owner))
        await self._ask_all(names, owner, time.monotonic() + PLAN_WAIT, patient=True)
        return [await here, *(await self._nodes([peers[name] for name in names], owner))]

    async def page(self, owner: int | None, page: Page) -> tuple[list[FleetNode], FleetTotals, bool]:
        """The nodes of a page, the totals of all nodes, and whether others follow. Takes `WAIT` seconds at most, beside
        this node's own part."""
        peers, began = self._peers(), time.monotonic()
        ends = began + WAIT
        here = asyncio.ensure_future(self._here(owner))
        await self._ask_all([name for name in peers if (name, owner) not in self._tried], owner, ends)
        own = await here
        states: dict[str, NodeState] = {own.name: "answered"}
        states |= {name: self._brief(link, owner).state for name, link in peers.items()}
        found = [name for name in states if page.name in name and page.state in (None, states[name])]
        if page.after and page.after != own.name:
            found = [name for name in found if name != own.name and name > page.after]
        elif page.after:
            found = [name for name in found if name != own.name]
        listed = found[: page.limit]
        again = [name for name in listed if name in peers and self._tried.get((name, owner), 0.0) < began]
        await self._ask_all(again, owner, ends)
        self._renew([name for name in peers if self._tried.get((name, owner), began) < began - OTHERS], owner)
        shown = {node.name: node for node in await self._nodes([peers[n] for n in listed if n in peers], owner)}
        shown[own.name] = own
        totals = self._totals(own, [self._brief(link, owner) for link in peers.values()])
        return [shown[name] for name in listed], totals, len(found) > len(listed)

    def _renew(self, names: Sequence[str], owner: int | None) -> None:
        """What the totals of later pages have of these peers. Nobody waits for it."""

        async def renew() -> None:
            try:
                await self._ask_all(names, owner, time.monotonic() + WAIT)
            finally:
                self._renewing.discard(owner)

        if names and owner not in self._renewing:
            self._renewing.add(owner)
            self._spawn(renew())

    def _peers(self) -> dict[str, Link]:
        """In the order of their names."""
        found = {link.peer.name: link for link in self._links.links()}
        for name in self._seen.keys() - found.keys():  # one that comes back under its name may be another one
            del self._seen[name]
            self._total -= self._held.pop(name, 0)
        for viewer in [viewer for viewer in self._tried if viewer[0] not in found]:
            del self._tried[viewer]
        return found

    async def _here(self, owner: int | None) -> FleetNode:
        shown, now = await self._own(owner), time.time()
        return FleetNode(
            name=self._links.node, here=True, state="answered", why="", since=now, answered_at=now, age_s=0.0,
            shown=shown,
        )  # fmt: skip

    def _brief(self, link: Link, owner: int | None) -> Seen:
        """What is known of it."""
        seen = self._last((link.peer.name, owner))
        if link.is_up:
            why = "it was connected a moment ago, and was not requested yet"
            return seen or Seen("silent", why, link.changed_at)
        state: NodeState = "refused" if link.state == "refused" else "unreachable"
        if seen is None:
            return Seen(state, link.why, link.changed_at)
        return Seen(state, link.why, link.changed_at, seen.content, seen.at, seen.counts)

    async def _nodes(self, links: Sequence[Link], owner: int | None) -> list[FleetNode]:
        now = time.time()
        seen = [(link.peer.name, self._brief(link, owner)) for link in links]
        return await asyncio.to_thread(lambda: [_node(name, each, now) for name, each in seen])

    def _totals(self, own: FleetNode, seen: Sequence[Seen]) -> FleetTotals:
        assert own.shown is not None
        counts = [counted(own.shown), *(each.counts for each in seen if each.counts is not None)]
        states: Counter[NodeState] = Counter(each.state for each in seen)
        states["answered"] += 1
        ages = [time.time() - each.at for each in seen if each.state == "answered"]
        return FleetTotals(
            nodes=len(seen) + 1, states=dict(states), oldest_s=max(0.0, *ages, 0.0),
            **{name: sum(getattr(each, name) for each in counts) for name in COUNTED},
        )  # fmt: skip

    async def _ask_all(
        self, names: Sequence[str], owner: int | None, ends: float, *, patient: bool = False
    ) -> None:  # fmt: skip
        """Of those that are connected. `ends`: monotonic seconds. `patient`: peers that were silent are waited for,
        too."""
        connected = [name for name in names if self._links.connected(name)]
        # Those that were silent come last: nobody waits for questions that come after them.
        silent = {name for name in connected if self._is_silent((name, owner))}
        waiting: set[asyncio.Future[None]] = set()
        ordered = sorted(connected, key=lambda name: name in silent)
        for at in range(0, len(ordered), AT_ONCE):
            portion = {name: self._ask((name, owner)) for name in ordered[at : at + AT_ONCE]}
            fresh = {answer for name, answer in portion.items() if patient or name not in silent}
            left = ends - time.monotonic()
            if fresh and left > 0:
                await asyncio.wait(fresh, timeout=min(PORTION, left))
            waiting |= {answer for answer in fresh if not answer.done()}
        if waiting and (left := ends - time.monotonic()) > 0:
            await asyncio.wait(waiting, timeout=left)
        now = time.monotonic()
        for name in connected:
            question = self._under_way.get((name, owner))
            if question is not None and now - question[2] >= SILENT and (patient or name not in silent):
                why = f"it has not answered within {now - question[2]:.1f} s"
                self._note((name, owner), Answered("silent", why))

    def _is_silent(self, viewer: Viewer) -> bool:
        """Has it let the last question of this viewer wait?"""
        seen = self._last(viewer)
        return seen is not None and seen.state == "silent"

    def _last(self, viewer: Viewer) -> Seen | None:
        of_peer = self._seen.get(viewer[0])
        return None if of_peer is None else of_peer.get(viewer[1])

    def _ask(self, viewer: Viewer) -> asyncio.Future[None]:
        """Also a question that was put before, and has not been answered."""
        now, found = time.monotonic(), self._under_way.get(viewer)
        if found is not None:
            if now - found[2] < ASK_AGAIN:
                return found[1]
            self._questions.pop(found[0], None)  # whoever waits for its answer takes the next one
        id = new_id()
        future = asyncio.get_running_loop().create_future() if found is None else found[1]
        peer, owner = viewer
        self._questions[id], self._under_way[viewer] = viewer, (id, future, now)
        if not self._links.send(peer, {"topic": TOPIC, "op": "read", "id": id, "owner": owner}):
            self._settle(id)  # there is no session with it yet
        return future

    def _settle(self, id: str) -> None:
        viewer = self._questions.pop(id, None)
        if viewer is None:
            return
        found = self._under_way.get(viewer)
        if found is not None and found[0] == id:
            del self._under_way[viewer]
            if not found[1].done():
                found[1].set_result(None)

    def _note(self, viewer: Viewer, found: Answered) -> None:
        """Of answers for which there is no room any more, those of the peer that has most go first."""
        peer, owner = viewer
        now = time.time()
        self._tried[viewer] = time.monotonic()
        of_peer = self._seen.setdefault(peer, OrderedDict())
        before = of_peer.pop(owner, None)
        since = before.since if before is not None and before.state == found.state else now
        if found.state == "answered":
            seen = Seen(found.state, "", since, found.content, now, found.counts)
        elif before is None or found.state == "not_allowed":  # what it showed before, it may not show any more
            seen = Seen(found.state, found.why, since)
        else:
            seen = Seen(found.state, found.why, since, before.content, before.at, before.counts)
        of_peer[owner] = seen
        more = seen.size - (0 if before is None else before.size)
        self._held[peer] += more
        self._total += more
        while self._held[peer] > KEPT_OF_PEER and len(of_peer) > 1:
            self._forget(peer)
        while self._total > KEPT:
            self._forget(max(self._held, key=self._held.__getitem__))

    def _forget(self, peer: str) -> None:
        """Its oldest answer."""
        owner, seen = self._seen[peer].popitem(last=False)
        self._held[peer] -= seen.size
        self._total -= seen.size
        self._tried.pop((peer, owner), None)

    # --- users of links -----------------------------------------------------------------------------------------------

    def session(self, peer: str) -> None:
        self.down(peer, "")

    def up(self, peer: str) -> None:
        """The next page has a question for it, whenever the last one was."""
        for owner in self._seen.get(peer, ()):
            self._tried.pop((peer, owner), None)

    def down(self, peer: str, why: str) -> None:
        """Whoever waits does not wait on: what a peer is sent when it is back is a new question."""
        for id, viewer in list(self._questions.items()):
            if viewer[0] == peer:
                self._settle(id)

    def received(self, peer: str, body: dict[str, Any]) -> None:
        if body.get("op") == "read":
            self._spawn(self._answer(peer, body))
        elif body.get("op") == "shown":
            id = body.get("id")
            viewer = self._questions.get(id) if isinstance(id, str) else None
            # Nobody else's answer counts, and one answer to each question is looked at.
            if viewer is not None and viewer[0] == peer and id not in self._checking:
                self._checking.add(str(id))
                self._arrived[str(id)] = viewer, body
                if len(self._arrived) == 1:
                    self._spawn(self._check())

    async def _check(self) -> None:
        """All that have arrived, together: a thread for each would cost more than the checking."""
        arrived, self._arrived = self._arrived, {}
        found = await asyncio.to_thread(
            lambda: {id: checked(body, viewer[1]) for id, (viewer, body) in arrived.items()}
        )  # fmt: skip
        for id, (viewer, _) in arrived.items():
            self._checking.discard(id)
            if id in self._questions and self._links.peer(viewer[0]) is not None:
                self._note(viewer, found[id])
            self._settle(id)

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


def checked(body: dict[str, Any], owner: int | None) -> Answered:
    """What an answer is."""
    try:
        if (problem := body.get("problem")) is not None:
            state: NodeState = "not_allowed" if body.get("allowed") is False else "silent"
            return Answered(state, harmless(str(problem), 300))
        shown = NodeShown.model_validate(body.get("shown"))
    except (ValidationError, RecursionError) as error:
        first = error.errors(include_url=False)[0] if isinstance(error, ValidationError) else {"msg": "too deep"}
        where = ".".join(str(each) for each in first.get("loc", ()))
        return Answered("invalid", harmless(f"its answer is none: {where}: {first['msg']}", 300))
    wrong = contradiction(shown, owner)
    if wrong:
        return Answered("invalid", wrong)
    return Answered("answered", content=shown.model_dump_json().encode(), counts=counted(shown))


COUNTED = ("devices", "free_devices", "unhealthy_devices", "jobs")


def counted(shown: NodeShown) -> FleetTotals:
    devices = [each for each in shown.devices if each.state != "not_configured"]
    return FleetTotals(
        devices=len(devices), free_devices=sum(each.state == "ready" and each.processes == 0 for each in devices),
        unhealthy_devices=sum(each.state == "unhealthy" for each in devices), jobs=len(shown.jobs) + shown.left_out,
    )  # fmt: skip


def _node(name: str, seen: Seen, now: float) -> FleetNode:
    shown = None if seen.content is None else NodeShown.model_validate_json(seen.content)
    return FleetNode(
        name=name, here=False, state=seen.state, why=seen.why, since=seen.since,
        answered_at=None if shown is None else seen.at, age_s=None if shown is None else max(0.0, now - seen.at),
        shown=shown,
    )  # fmt: skip


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
