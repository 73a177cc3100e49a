"""Jobs that leave for another node.

A job leaves as a whole, with all of its processes; of ranks that share communicators all stand at the same snapshot.
What the program has goes ahead in rounds, as pieces that the peer lacks, while the program runs. Then the program
stops, the last pieces go, the peer makes the program again and leaves it stopped, and says so. Then this node decides.

Invariants:
  Until `committed` is on the disk the program is this node's: whatever fails, it goes on here.
  From then on it stays stopped here until the peer has answered: `running`, and its copy here is ended, or `dropped`,
  which the peer never takes back, and it goes on here. Or an operator decides by hand.
  `go` is requested only after `committed`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError
from sqlalchemy.orm import Session

from xmigd import log
from xmigd.checkpoints import live
from xmigd.checkpoints.content import Writing
from xmigd.checkpoints.making import Making, of_the_store
from xmigd.checkpoints.manifest import Manifest, contents
from xmigd.checkpoints.pids import end
from xmigd.checkpoints.service import Checkpoints
from xmigd.checkpoints.transit import Transit, in_transit
from xmigd.database.reader import Reader
from xmigd.database.writer import Writer
from xmigd.errors import Conflict, NotFound, ProtocolError, Unavailable, XmigError
from xmigd.events.bus import Bus
from xmigd.ids import new_id
from xmigd.ipc import pidfd as pidfds
from xmigd.jobs import repository as jobs
from xmigd.operations.operation import Operation
from xmigd.operations.repository import OperationRow
from xmigd.operations.service import Operations, Outcome, interrupted
from xmigd.published import check_network
from xmigd.schemas import EXACT
from xmigd.supervisor.process import Process
from xmigd.supervisor.supervisor import Supervisor
from xmigd.text import harmless
from xmigd.transfers import records, repository
from xmigd.transfers.calls import Calls
from xmigd.transfers.needs import Needs, needs_of
from xmigd.transfers.stopped import left, written
from xmigd.transfers.streams import Streams
from xmigd.transfers.wire import Closing
from xmigd.waiting import happens

KIND = "transfer"  # operations
MOST_ROUNDS = 4  # ahead
SMALL = 16 << 20  # bytes: with less than that left, another round ahead is not worth its time
SHRINKS = 0.7  # of the round before: with more than that left, neither
RETRY = 0.5, 5.0  # seconds between two requests to a peer that does not answer, at first and at last
INFORM_EVERY = 5.0  # seconds between attempts to tell peers outcomes

logger = log.get("transfers")

Answer = TypeVar("Answer")
Decision = Literal["here", "there"]
Permit = Callable[[], Awaitable[None]]  # raises XmigError: it may not, and stays


@dataclass(slots=True)
class Leaving:
    """One that is under way."""

    id: str
    processes: Sequence[Process]  # all of the job, in the order in which they began
    root: int  # from which all descend
    peer: str
    devices: Sequence[str]  # that are requested, in turn; none: the peer chooses
    needs: Needs
    max_standstill_ms: float | None
    streams: Streams
    publish: Sequence[str] = ()  # ports at the peer, of the job's network
    permit: Permit | None = None  # right before the point of no return: may it go?
    stopped_at: float | None = None  # monotonic seconds

    def may_stand_still(self) -> float | None:
        """For so many seconds more. None: there is no bound now."""
        if self.stopped_at is None or self.max_standstill_ms is None:
            return None
        return self.max_standstill_ms / 1e3 - (time.monotonic() - self.stopped_at)

    def check_standstill(self) -> None:
        """Raises Conflict: the program would stand still for longer than it may."""
        left = self.may_stand_still()
        if left is not None and left < 0 and self.max_standstill_ms is not None:
            ms = self.max_standstill_ms - left * 1e3
            raise Conflict(f"the program stood still for {ms:.0f} ms, and may for {self.max_standstill_ms:g} ms",
                           code="downtime", process_location="source")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """What a peer has answered, which is not to be believed yet."""

    processes: Sequence[Process]
    targets: list[Any]  # its devices, each with what prevents any of them there
    places: list[Any]  # of each of them: the device that it would get, and what prevents that
    priority: Any  # the class that the job would have there


class Departures:
    def __init__(
        self, *, checkpoints: Checkpoints, supervisor: Supervisor, operations: Operations, writer: Writer,
        reader: Reader, bus: Bus, calls: Calls, node: str,
    ) -> None:  # fmt: skip
        self._checkpoints = checkpoints
        self._supervisor = supervisor
        self._operations = operations
        self._writer = writer
        self._reader = reader
        self._bus = bus
        self._calls = calls
        self._node = node
        self._owes = asyncio.Event()  # somebody does not know yet what became of a transfer
        self._decisions: dict[str, asyncio.Future[Decision]] = {}
        operations.register(KIND, self._resolve)

    # --- what is requested --------------------------------------------------------------------------------------------

    def peers(self) -> list[str]:
        """All that are known."""
        return self._calls.peers()

    async def plan(self, process: Process, peer: str, devices: Sequence[str] = ()) -> Plan:
        """For its job. `devices`: those that its processes get in turn; none: the peer chooses. Changes nothing. Raises
        Conflict, Unavailable, NotFound."""
        self._calls.check_known(peer)
        making, needs = await self._needs(process)
        request = {"op": "plan", "needs": needs.model_dump(mode="json"), "devices": list(devices)}
        answer = await self._calls.call(peer, request)
        targets, places = answer.get("targets"), answer.get("processes")
        if not isinstance(targets, list) or not isinstance(places, list) or len(places) != len(making.processes):
            raise ProtocolError(f"{peer} answers what is no plan")
        return Plan(making.processes, targets, places, answer.get("priority"))

    async def move(
        self, process: Process, peer: str, devices: Sequence[str] | Mapping[str, str], *,
        max_downtime_ms: float | None, requestor: str, id: str | None = None, permit: Permit | None = None,
        publish: Sequence[str] = (),
    ) -> OperationRow:  # fmt: skip
        """Its job. `devices`: those that its processes get in turn, or, by process, those of all of them; none: the
        peer chooses. `id`: of the transfer; `permit`: called right before the point of no return. `publish`:
        ports at the peer, of the job's network. Raises Conflict, Invalid, NotFound, Unavailable: it cannot go there."""
        self._calls.check_known(peer)
        making, needs = await self._needs(process)
        check_network(publish, making.namespaces)
        if isinstance(devices, Mapping):
            devices = _in_order(making.processes, devices)
        process = making.processes[0]
        id = id or new_id()
        leaving = Leaving(
            id, making.processes, making.root, peer, devices, needs, max_downtime_ms, Streams(self._calls, peer, id),
            publish, permit,
        )  # fmt: skip
        # It may not be there any more, or may not want it: that is known before anything is written down.
        begun = await self._calls.call(peer, self._begin(leaving))
        leaving.streams.apart = begun.get("streams") is True  # peers of an earlier version have none
        target = str(begun.get("device", ""))[:64]
        values = {
            "id": id, "direction": "out", "peer": peer, "state": "copying", "job_id": process.job.id,
            "job_name": process.job.name, "process_id": process.row.id, "uid": process.row.uid,
            "command": process.row.command, "source": needs.source, "target": f"{peer}/{target}"[:64],
            "pid": making.root, "start_time": pidfds.start_time(making.root),
            "processes": [one.row.id for one in making.processes],
            "devices": [one.row.device for one in making.processes],
        }  # fmt: skip

        async def work(operation: Operation) -> dict[str, Any]:
            self._publish(values)
            return await self._work(operation, leaving)

        try:
            return await self._operations.start(
                KIND, subject=("process", process.row.id), job_id=process.job.id, owner=process.job.uid,
                requestor=requestor, work=work, request={"transfer": id, "peer": peer},
                also=lambda session: repository.add(session, values),
            )  # fmt: skip
        except BaseException:
            with contextlib.suppress(XmigError):
                await self._calls.call(peer, {"op": "drop", "transfer": id})
            raise

    async def decide(self, id: str, decision: Decision) -> None:
        """By hand, of one whose peer is gone for good. Raises Conflict: it is not undecided."""
        waiting = self._decisions.get(id)
        if waiting is None or waiting.done():
            raise Conflict("that transfer waits for no decision", code="transfer_over", hint="xmigctl transfer list")
        waiting.set_result(decision)

    async def _needs(self, process: Process) -> tuple[Making, Needs]:
        """Of its job. Raises Conflict: it cannot be moved at all, Unavailable, NotFound."""
        await self._checkpoints.criu.check()
        if process.job.nodes is not None:
            raise Conflict("the job has ranks on several nodes", code="several_nodes")
        await asyncio.to_thread(self._check_not_of_slurm, process.job.id)
        processes = self._supervisor.processes_of(process.job.id)
        wanted = "suspended" if all(one.state == "suspended" for one in processes) else "running"
        for one in processes:
            if one.state != wanted or one.paused or one.machine.move is not None:
                what = "paused" if one.paused else "being moved" if one.machine.move else one.state
                whose = "the process" if one is process else f"process {one.row.id[:12]} of its job"
                raise Conflict(f"{whose} is {what}", code="not_running", hint="wait until it runs, or resume it")
        making = self._checkpoints.making(process, stop=False)
        making.check_room()
        await self._checkpoints.check_movable(making.processes[0], making.root)
        needs = await asyncio.to_thread(needs_of, making.processes, making.root, self._checkpoints.layout)
        return making, needs

    def _check_not_of_slurm(self, job: str) -> None:
        """Elsewhere it would be outside of its allocation, and here Slurm would hear that it was killed. Raises
        Conflict."""
        with self._reader.session() as session:
            row = jobs.find(session, job)
            found = None if row is None else jobs.number_of_slurm(row.external_id)
        if found is not None:
            number = harmless(found, 40)
            raise Conflict(
                f"it is Slurm's job {number}, which has no allocation on another node; for Slurm it would have failed",
                code="scheduled", hint=f"scontrol requeue {number}: with --xmig-checkpoint it goes on when it has this "
                "node again, and on another one it begins anew",
            )  # fmt: skip

    @staticmethod
    def _begin(leaving: Leaving) -> dict[str, Any]:
        return {
            "op": "begin", "transfer": leaving.id, "devices": list(leaving.devices), "publish": list(leaving.publish),
            "needs": leaving.needs.model_dump(mode="json"),
        }  # fmt: skip

    # --- the work -----------------------------------------------------------------------------------------------------

    async def _work(self, operation: Operation, leaving: Leaving) -> dict[str, Any]:
        record = records.Record(leaving.processes, leaving.needs.source, f"{leaving.peer}/", operation.id)
        try:
            with contextlib.ExitStack() as stack:
                with of_the_store("it cannot be stored"):
                    chunks, uid = self._checkpoints.chunks, leaving.processes[0].row.uid
                    fits = self._checkpoints.making(leaving.processes[0], stop=False).has_room_in_transit()
                    content = in_transit(chunks, leaving.id, uid) if fits else chunks.writing()
                    writing = stack.enter_context(content)
                stack.callback(leaving.streams.close)
                making = await self._send(operation, leaving, writing, record)
            return await self._switch(operation, leaving, making, record)
        except Exception as error:
            await self._write(record.failed(error))
            raise
        finally:
            await asyncio.to_thread(self._checkpoints.forget, new_id())  # what was only for this

    async def _send(self, operation: Operation, leaving: Leaving, writing: Writing, record: records.Record) -> Making:
        """Everything is at the peer, which has made the program again. Here it stands still. Raises XmigError: it goes
        on here."""
        making: Making | None = None
        stays = isinstance(writing, Transit)
        try:
            asleep = leaving.needs.asleep  # nothing changes, and nobody waits
            for number in range(1, 1 if asleep else MOST_ROUNDS + 1):
                record.phase("copying")
                if record.is_small(SMALL, SHRINKS):
                    break
                ahead = self._making(leaving, stop=False, once_more=stays and number > 1)
                manifest = await self._round(operation, leaving, ahead, writing, record, number)
                document = await asyncio.to_thread(_document, manifest)  # what has come goes onto the peer's devices
                await self._request(operation, leaving, {"op": "manifest", "ahead": True}, document)
            record.phase("committing")
            leaving.stopped_at = None if asleep else time.monotonic()
            making = self._making(leaving, stop=True, once_more=stays and record.rounds > 0)
            manifest = await self._round(operation, leaving, making, writing, record, record.rounds + 1)
            record.phase("handing_over")
            operation.progress("handing_over")
            document, began = await asyncio.to_thread(_document, manifest), time.monotonic()
            await self._request(operation, leaving, {"op": "manifest"}, document)
            there = _figures(await self._prepared(operation, leaving))
            making.took |= there.took | {"prepare_ms": (time.monotonic() - began) * 1e3}
            if leaving.permit is not None:
                await leaving.permit()
                leaving.check_standstill()
            operation.point_of_no_return(f"{leaving.peer} has it")
            committed: dict[str, Any] = {
                "state": "committed", "rounds": record.iterations(), "pids": written(making.pids),
                "took": {name: round(ms, 3) for name, ms in making.took.items()}, "content_bytes": there.content_bytes,
                "ahead_bytes": there.ahead_bytes,
            }  # fmt: skip
            await self._change(leaving.id, committed, only_in=("copying",))
        except Exception as error:
            if making is not None:
                await making.go_on()
            why = error.message if isinstance(error, XmigError) else "it failed inside xmigd; its log says why"
            await self._change(leaving.id, {"state": "failed", "why": why}, only_in=("copying",))
            self._owes.set()
            if isinstance(error, XmigError) and error.process_location is None:
                error.process_location = "source"
            raise
        return making

    def _making(self, leaving: Leaving, *, stop: bool, once_more: bool) -> Making:
        """`once_more`: the last round's copy is in host memory still."""
        making = self._checkpoints.making(leaving.processes[0], stop=stop)
        self._check_same(leaving)
        making.check_room(once_more=once_more)
        return making

    def _check_same(self, leaving: Leaving) -> None:
        """Has the job the processes that were announced? Raises Conflict."""
        known = {one.row.id for one in self._supervisor.processes_of(leaving.processes[0].job.id)}
        if known != {one.row.id for one in leaving.processes}:
            raise Conflict("processes of the job began or ended while it was moved", code="job_changed",
                           hint="ask for it again, once all of them run")  # fmt: skip

    async def _round(
        self, operation: Operation, leaving: Leaving, making: Making, writing: Writing, record: records.Record,
        number: int,
    ) -> Manifest:  # fmt: skip
        """Write the program down, and send what the peer lacks of it."""
        operation.check_cancelled("source")
        began = time.monotonic()
        with self._checkpoints.working.images(operation) as images:
            programs = await making.write_down(operation, writing, images, operation.reporter)
        self._check_same(leaving)  # one that had just begun was dumped without what it has on its device
        manifest = making.manifest(leaving.id, self._node, programs)
        operation.check_cancelled("source")
        leaving.check_standstill()
        pieces = [chunk for content in contents(manifest) for chunk in content.chunks]
        total = sum(piece.bytes for piece in pieces)
        operation.progress("sending", total_bytes=total, round=number)
        loop, sending = asyncio.get_running_loop(), time.monotonic()

        def sent(count: int) -> None:
            loop.call_soon_threadsafe(lambda: operation.progress("sending", processed_bytes=count))

        copied = await _unless_given_up(operation, leaving, partial(leaving.streams.send, writing, pieces, sent))
        writing.sent()
        making.took["send_ms"] = (time.monotonic() - sending) * 1e3
        record.round(copied, total, (time.monotonic() - began) * 1e3)
        return manifest

    async def _prepared(self, operation: Operation, leaving: Leaving) -> dict[str, Any]:
        """Wait until the peer has the program, stopped; what it says then. Raises Conflict: it cannot, Unavailable."""
        answer = await self._request(operation, leaving, {"op": "prepare"})
        while answer.get("state") == "preparing":
            answer = await self._request(operation, leaving, {"op": "state", "seen": "preparing"})
        if answer.get("state") != "prepared":
            raise Conflict(f"{leaving.peer} cannot take it: {answer.get('why')}"[:500], code="not_prepared")
        return answer

    async def _request(
        self, operation: Operation, leaving: Leaving, body: dict[str, Any], payload: bytes = b""
    ) -> dict[str, Any]:  # fmt: skip
        """Before the decision. Raises as `_unless_given_up`."""
        body = body | {"transfer": leaving.id}
        return await _unless_given_up(
            operation, leaving, lambda closing: self._calls.request(leaving.peer, body, closing, payload)
        )

    async def _switch(
        self, operation: Operation, leaving: Leaving, making: Making, record: records.Record
    ) -> dict[str, Any]:
        """It is decided. Raises Conflict: the peer does not have it any more, and it goes on here."""
        answer = await self._outcome(operation, leaving.id, leaving.peer)
        standstill = None if leaving.stopped_at is None else (time.monotonic() - leaving.stopped_at) * 1e3
        if answer is None:
            await making.go_on()
            raise self._stays(leaving.peer)
        row = await asyncio.to_thread(self._row, leaving.id)
        assert row is not None
        await self._end_here(leaving.processes, row)
        result = await self._is_over(leaving.id, leaving.peer, answer, standstill)
        await self._write(record.done(result["device"], standstill))
        processes = [one.row.id for one in leaving.processes]
        return result | {
            "processes": processes,
            "rounds": record.rounds,
            "processed_bytes": record.copied,
            "downtime_ms": standstill,
            "took": {name: round(ms, 3) for name, ms in making.took.items()},
        }

    @staticmethod
    def _stays(peer: str) -> Conflict:
        return Conflict(f"{peer} does not have it any more; it goes on here", code="transfer_dropped",
                        process_location="source")  # fmt: skip

    async def _outcome(self, operation: Operation, id: str, peer: str) -> dict[str, Any] | None:
        """What became of it, however long that takes to find out. None: it is this node's again, as is on the disk."""
        decided = self._decisions[id] = asyncio.get_running_loop().create_future()
        operation.progress("switching")
        delay = RETRY[0]
        try:
            while True:
                try:
                    answer = await self._calls.call(peer, {"op": "go", "transfer": id})
                except XmigError as error:
                    why = error.message
                else:
                    if answer.get("state") == "running":
                        return answer
                    if answer.get("state") == "dropped":
                        await self._is_ours_again(id, f"{peer} has dropped it")
                        return None
                    why = f"{peer} answers {str(answer.get('state'))[:40]!r}"
                operation.progress("waiting", why=why)
                waits = f"it is stopped here, and waits for {peer} to say whether it runs there: {why}"
                with contextlib.suppress(Unavailable):  # a note only
                    await self._change(id, {"why": waits[:500]}, only_in=("committed",))
                logger.warning("a transfer waits for its peer", transfer=id[:12], peer=peer, why=why)
                await asyncio.wait([decided], timeout=delay)
                if decided.done():
                    decision = decided.result()
                    logger.warning("a transfer was decided by hand", transfer=id[:12], peer=peer, decision=decision)
                    if decision == "there":
                        return {}
                    await self._is_ours_again(id, "decided by hand: it goes on here")
                    return None
                delay = min(2 * delay, RETRY[1])
        finally:
            self._decisions.pop(id, None)

    async def _is_ours_again(self, id: str, why: str) -> None:
        """On the disk, before anything of it goes on, however long that takes."""
        while True:
            try:
                await self._change(id, {"state": "failed", "why": why}, only_in=("committed",))
                return
            except Unavailable as error:
                logger.error("a transfer's outcome cannot be written yet", transfer=id[:12], why=error.message)
                await asyncio.sleep(RETRY[1])

    async def _is_over(self, id: str, peer: str, answer: dict[str, Any], standstill: float | None) -> dict[str, Any]:
        job, device = (str(answer.get(name) or "")[:64] for name in ("job", "device"))
        values: dict[str, Any] = {"state": "done", "why": "", "peer_job": job[:32] or None, "peer_informed": True}
        if standstill is not None:
            values["standstill_ms"] = standstill
        await self._change(id, values, only_in=("committed",))
        logger.info("a program goes on at a peer", transfer=id[:12], peer=peer, job=job[:12], device=device)
        return {
            "transfer": id, "node": peer, "job": job, "device": device, "target": f"{peer}/{device}",
            "process_location": "target",
        }  # fmt: skip

    async def _end_here(self, processes: Sequence[Process], row: dict[str, Any]) -> None:
        """It runs elsewhere: what is here, stopped, ends."""
        for one in processes:
            one.expect_end()
        killing = asyncio.ensure_future(end(left(row)))
        await asyncio.sleep(0)
        for one in processes:
            one.let_go_on()
        await killing

    # --- after a restart, and beside ----------------------------------------------------------------------------------

    async def _resolve(self, operation: Operation) -> Outcome:
        id = operation.request.get("transfer", "")
        await self._checkpoints.working.settle(operation)
        row = await asyncio.to_thread(self._row, id)
        if row is None:
            return interrupted(operation.row)
        found = [await self._checkpoints.found_again(operation, name) for name in row["processes"]]
        processes = [one for one in found if one is not None]
        if row["state"] == "committed":
            answer = await self._outcome(operation, id, row["peer"])
            if answer is not None:
                await self._end_here(processes, row)
                return Outcome(state="succeeded", result=await self._is_over(id, row["peer"], answer, None))
            self._go_on_here(processes, row)
            return Outcome(state="failed", error=self._stays(row["peer"]))
        if row["state"] == "done":
            await self._end_here(processes, row)
            return Outcome(state="succeeded", result={"transfer": id, "node": row["peer"], "job": row["peer_job"]})
        self._go_on_here(processes, row)
        await self._change(id, {"state": "failed", "why": "xmigd ended in the middle of it"}, only_in=("copying",))
        return interrupted(operation.row, "source")

    def _go_on_here(self, processes: Sequence[Process], row: dict[str, Any]) -> None:
        live.let_go_on(left(row))
        for one in processes:
            one.let_go_on()

    async def keep(self) -> None:
        """Tell peers of what has failed, until they know. Until it is cancelled."""
        while True:
            await happens(self._owes, INFORM_EVERY)
            self._owes.clear()
            for row in await asyncio.to_thread(self._owed):
                await self._inform(row["id"], row["peer"], row["state"])

    async def _inform(self, id: str, peer: str, state: str) -> None:
        """It waits for nobody: what is not known now, the next attempt says."""
        try:
            if state == "failed":
                await self._calls.call(peer, {"op": "drop", "transfer": id})
            await self._change(id, {"peer_informed": True}, only_in=repository.OVER)
        except NotFound:  # the peer is not known any more
            await self._change(id, {"peer_informed": True}, only_in=repository.OVER)
        except XmigError as error:
            logger.info("a peer does not know yet what became of a transfer", peer=peer, why=error.message)

    def _owed(self) -> list[dict[str, Any]]:
        with self._reader.session() as session:
            rows = repository.unfinished(session)
            return [row for row in rows if row["direction"] == "out" and row["state"] in repository.OVER]

    # --- small parts --------------------------------------------------------------------------------------------------

    def _row(self, id: str) -> dict[str, Any] | None:
        with self._reader.session() as session:
            return repository.get(session, id)

    async def _change(self, id: str, values: dict[str, Any], *, only_in: tuple[str, ...]) -> None:
        """Raises Unavailable: it is not on the disk."""

        def work(session: Session) -> dict[str, Any] | None:
            repository.change(session, id, values, only_in=only_in)
            return repository.get(session, id)

        row = await self._writer.write(repository.name_of(values), work)
        if row is not None and "state" in values:
            self._publish(row)

    async def _write(self, work: Callable[[Session], Any]) -> None:
        with contextlib.suppress(Unavailable):  # figures only
            await self._writer.write("migrations.save", work)

    def _publish(self, row: dict[str, Any]) -> None:
        data = {name: row.get(name) for name in ("direction", "peer", "state", "why", "source", "target")}
        self._bus.publish("transfer.changed", "transfer", row["id"], row.get("job_id"), data, owner=row["uid"])


async def _unless_given_up(operation: Operation, leaving: Leaving, calls: Callable[[Closing], Answer]) -> Answer:
    """What these calls of the peer return, in a thread. Their connections are closed as soon as the operation is
    cancelled, or the program has stood still for as long as it may: a slow link, or a peer that hangs, delays neither.
    Raises Cancelled, Conflict, or as they do."""
    operation.check_cancelled("source")
    leaving.check_standstill()
    closing = Closing()
    calling = asyncio.ensure_future(asyncio.to_thread(calls, closing))
    cancelled = asyncio.ensure_future(operation.cancelled.wait())
    try:
        left = leaving.may_stand_still()
        timeout = None if left is None else left + 1e-3  # not before it is over
        await asyncio.wait([calling, cancelled], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        cancelled.cancel()
    if not calling.done():
        closing.close()
        await asyncio.wait([calling])
        calling.exception()  # that it was closed
        operation.check_cancelled("source")
        leaving.check_standstill()
    return calling.result()


def _document(manifest: Manifest) -> bytes:
    return manifest.model_dump_json().encode()


class _Figures(BaseModel):
    """Of what a peer has answered, which may be anything."""

    took: dict[Literal["read_ms", "criu_ms", "server_ms"], Annotated[float, Field(ge=0, le=1e9)]] = {}
    content_bytes: Annotated[int, Field(ge=0, le=EXACT)] | None = None
    ahead_bytes: Annotated[int, Field(ge=0, le=EXACT)] | None = None


def _figures(answer: dict[str, Any]) -> _Figures:
    try:
        return _Figures.model_validate(answer)
    except ValidationError:  # nothing depends on them
        return _Figures()


def _in_order(processes: Sequence[Process], devices: Mapping[str, str]) -> list[str]:
    """The device of each. Raises Conflict: they are of other processes."""
    if {one.row.id for one in processes} != set(devices):
        raise Conflict("the job has other processes than devices were named for", code="job_changed",
                       hint="ask for it again, once all of them run")  # fmt: skip
    return [devices[one.row.id] for one in processes]
