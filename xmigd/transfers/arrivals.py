"""Programs that come from other nodes.

Invariants:
  Nothing of a program that arrives runs before `going` is on the disk.
  `going` is written only when its node has requested it, which that does only after it has written `committed`, or when
  an operator has decided so by hand.
  What is `dropped` never runs: that is on the disk before anybody hears of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from pydantic import TypeAdapter, ValidationError
from sqlalchemy.orm import Session

from xmigd import log
from xmigd.checkpoints import live
from xmigd.checkpoints.apart import check_mounts
from xmigd.checkpoints.content import HEADER, PIECE, NotWanted, Writing, check_places
from xmigd.checkpoints.making import check_owners
from xmigd.checkpoints.manifest import Chunk, Manifest, contents
from xmigd.checkpoints.pids import end, tree
from xmigd.checkpoints.restoring import FromAhead, Restoring
from xmigd.checkpoints.service import Checkpoints
from xmigd.checkpoints.transit import Transit, in_transit
from xmigd.database.reader import Reader
from xmigd.database.writer import Writer
from xmigd.devices.names import as_one, devices_of, in_turn, together
from xmigd.errors import Conflict, Forbidden, Invalid, NotFound, ProtocolError, Unavailable, XmigError
from xmigd.events.bus import Bus
from xmigd.ids import new_id
from xmigd.ipc import pidfd as pidfds
from xmigd.ipc.channel import Peer
from xmigd.ipc.fds import free
from xmigd.migrations.places import Places
from xmigd.migrations.plan import size
from xmigd.operations.operation import Operation
from xmigd.operations.service import Operations, Outcome, interrupted
from xmigd.process.migration_events import Reason
from xmigd.published import MOST_PORTS, Published, check_network, close, listen
from xmigd.store.objects import Damaged
from xmigd.supervisor.ahead import Wanted
from xmigd.supervisor.process import Process
from xmigd.supervisor.supervisor import Supervisor
from xmigd.text import harmless
from xmigd.transfers import records, repository
from xmigd.transfers.needs import MOST_PROGRAMS, Needs, choose, general, judge, judge_all
from xmigd.transfers.stopped import are_whole, left, written
from xmigd.transfers.wire import LONGEST_PAYLOAD, Payload

KIND = "arrival"  # operations
MOST = 8  # that come at once
SILENT = 120.0  # seconds without a request in which one that has not arrived is given up
WAIT = 5.0  # seconds, at most, that a request for its state waits

logger = log.get("transfers")
_CHUNK = TypeAdapter(Chunk)


class Receiving:
    """What has come of one that is under way. Used by the threads of its connections; what is brought ahead, by the
    loop's. `published`: ports that listen for it; `stack` closes them, too."""

    def __init__(
        self, peer: str, writing: Writing, stack: ExitStack, *, needs: Needs, devices: Sequence[str],
        published: Sequence[Published] = (),
    ) -> None:  # fmt: skip
        """`devices`: of each of its programs."""
        self.peer = peer
        self.needs = needs
        self.devices = devices
        self.published = published
        self.writing = writing
        self.manifest: Manifest | None = None
        self.heard = 0.0  # monotonic seconds: of the last request
        self.ahead = FromAhead([], [])
        self._bringing: asyncio.Task[None] | None = None
        self._enough = threading.Event()
        self._stack = stack
        self._lock = threading.Lock()

    @property
    def asleep(self) -> bool:
        return self.needs.asleep

    def bring(self, work: Callable[[threading.Event], Coroutine[Any, Any, None]]) -> None:
        """Begin it, unless it is under way, or all that is needed has been brought."""
        if not self._enough.is_set() and (self._bringing is None or self._bringing.done()):
            self._bringing = asyncio.get_running_loop().create_task(work(self._enough))

    async def settle(self) -> None:
        """Nothing more is brought ahead."""
        self._enough.set()
        if self._bringing is not None:
            await asyncio.wait([self._bringing])

    def close(self) -> None:
        """Its content may be removed, and its servers end."""
        self._enough.set()
        for server in self.ahead.servers:
            server.close()
        if self._bringing is None or self._bringing.done():
            self.ahead.close()
        else:  # a thread of its has the images
            self._bringing.add_done_callback(lambda _: self.ahead.close())
        with self._lock:
            self._stack.close()


class Arrivals:
    def __init__(
        self, *, checkpoints: Checkpoints, restoring: Restoring, supervisor: Supervisor, operations: Operations,
        writer: Writer, reader: Reader, places: Places, bus: Bus, allowed: Callable[[], Sequence[str]],
    ) -> None:  # fmt: skip
        """`allowed`: peers from which programs are taken; `*`: all that are known."""
        self._checkpoints = checkpoints
        self._restoring = restoring
        self._supervisor = supervisor
        self._operations = operations
        self._writer = writer
        self._reader = reader
        self._places = places
        self._bus = bus
        self._allowed = allowed
        self._loop = asyncio.get_running_loop()
        self._receiving: dict[str, Receiving] = {}
        self._ending: set[asyncio.Task[None]] = set()  # of those for which there is no room
        self._changed = asyncio.Condition()
        self._deciding = asyncio.Lock()  # one decision about an arrival at a time
        operations.register(KIND, self._resolve)

    # --- what peers request -------------------------------------------------------------------------------------------

    def longest(self, peer: str) -> int:
        """Bytes behind a request."""
        return LONGEST_PAYLOAD if self._takes(peer) else 0

    def in_thread(self, peer: str, request: dict[str, Any], payload: Payload) -> tuple[dict[str, Any], bytes] | None:
        """Requests about content. None: it is another one. Raises Conflict, Damaged, Unavailable, ProtocolError."""
        op = request.get("op")
        if op not in ("lacking", "piece", "manifest"):
            return None
        receiving = self._receiving.get(str(request.get("transfer")))
        if receiving is None or receiving.peer != peer:
            raise Conflict(f"nothing of that transfer is expected{self._why_over(request, peer)}", code="transfer_over")
        receiving.heard = time.monotonic()
        try:
            if op == "lacking":
                return {}, self._lacking(receiving.writing, payload)
            if op == "piece":
                name, size = request.get("hash"), request.get("bytes")
                chunk = _CHUNK.validate_python({"at": 0, "bytes": size, "hash": name})
                if chunk.bytes > PIECE or len(payload) > PIECE + HEADER.size:
                    raise ProtocolError("a piece that is too large")
                receiving.writing.take(chunk.hash, chunk.bytes, payload)
                return {}, b""
            receiving.manifest = manifest = Manifest.model_validate_json(payload)
            if request.get("ahead") is True:  # the program runs, and all that it has by now has come
                if isinstance(receiving.writing, Transit):
                    names = {chunk.hash for content in contents(manifest) for chunk in content.chunks}
                    receiving.writing.retain_only(names)
                id = str(request.get("transfer"))
                self._loop.call_soon_threadsafe(receiving.bring, partial(self._bring, id, receiving))
            return {}, b""
        except ValidationError as error:
            raise ProtocolError(f"a request that is none: {error.errors(include_url=False)[0]['msg']}") from None
        except OSError as error:
            raise Unavailable(f"it cannot be stored: {error.strerror}", code="store_failed", hint="make room") from None

    def _why_over(self, request: dict[str, Any], peer: str) -> str:
        """Reads the database."""
        with self._reader.session() as session:
            row = repository.get(session, str(request.get("transfer"))[:32])
        mine = row is not None and (row["direction"], row["peer"]) == ("in", peer)
        return f": {row['why']}" if row is not None and mine and row["why"] else ""

    @staticmethod
    def _lacking(writing: Writing, hashes: Payload) -> bytes:
        if len(hashes) % 32:
            raise ProtocolError("hashes that are none")
        names = (hashes[at : at + 32].hex() for at in range(0, len(hashes), 32))
        return bytes(1 if writing.lacks(name) else 0 for name in names)

    async def in_loop(self, peer: str, request: dict[str, Any], _: Payload) -> dict[str, Any]:
        """All others. Raises XmigError."""
        op, id = request.get("op"), request.get("transfer")
        if not self._takes(peer) and not (isinstance(id, str) and await self._is_of(id, peer)):
            raise Forbidden(f"this node takes no programs from {peer}", code="peer_not_allowed",
                            hint="an operator there names the peer in the setting programs_from")  # fmt: skip
        if op == "plan":
            return await self._plan(_needs(request), _devices(request))
        if not isinstance(id, str) or len(id) != 32 or not id.isalnum() or not id.isascii():
            raise ProtocolError("a request without its transfer")
        if (receiving := self._receiving.get(id)) is not None and receiving.peer == peer:
            receiving.heard = time.monotonic()
        match op:
            case "begin":
                return await self._begin(peer, id, _needs(request), _devices(request), _ports(request))
            case "prepare":
                return await self._prepare(peer, id)
            case "state":
                return await self._state(peer, id, str(request.get("seen", "")))
            case "go":
                return await self.go(id, by=peer)
            case "drop":
                return await self.drop(id, by=peer, why=f"{peer} has given it up")
        raise ProtocolError("a request that is none")

    async def _is_of(self, id: str, peer: str) -> bool:
        """One that was begun when it was allowed is brought to its end."""
        row = await self._row(id[:32])
        return row is not None and (row["direction"], row["peer"]) == ("in", peer)

    def _takes(self, peer: str) -> bool:
        allowed = self._allowed()
        return "*" in allowed or peer in allowed

    async def _plan(self, needs: Needs, named: list[str]) -> dict[str, Any]:
        await self._checkpoints.criu.check()
        known = {place.id: place for place in await self._places.known()}
        own = await asyncio.to_thread(general, needs, self._checkpoints.layout)
        targets = []
        if all(len(one.devices) == 1 for one in needs.programs):
            for name in sorted(name for name, place in known.items() if place.configured):
                # For any of the programs.
                reasons = own + min((judge(one, [name], known) for one in needs.programs), key=len)
                targets.append(
                    {"device": name, "room_bytes": known[name].free_bytes, "reasons": _as_answer(reasons)}
                )  # fmt: skip
        places = _in_turn(needs, named) if named else choose(needs, known)
        against = judge_all(needs, places, known)
        processes: list[dict[str, Any]] = [
            {"device": as_one(devices), "reasons": _as_answer(own + reasons)}
            for devices, reasons in zip(places, against, strict=True)
        ]
        for one in needs.programs[len(places) :]:
            processes.append({"device": None, "reasons": _as_answer([*own, _no_device(one.devices[0].kind)])})
        priority = await asyncio.to_thread(self._restoring.class_of, needs.job, needs.priority, needs.uid)
        return {"targets": targets, "processes": processes, "priority": priority}

    async def _begin(self, peer: str, id: str, needs: Needs, named: list[str], ports: list[str]) -> dict[str, Any]:
        row = await self._row(id)
        if row is not None:
            self._check_of(row, peer)
            if row["state"] != "receiving" or id not in self._receiving:
                raise Conflict("that transfer is over", code="transfer_over")
            return {"device": row["target"], "streams": True}
        if len(self._receiving) >= MOST:
            raise Unavailable(f"{MOST} programs are coming already", code="too_many_transfers", hint="ask again later")
        await self._checkpoints.criu.check()
        devices = [as_one(each) for each in await self._chosen(needs, named)]
        device = together(devices)[:64]
        values = {
            "id": id, "direction": "in", "peer": peer, "state": "receiving", "job_name": needs.job_name,
            "uid": needs.uid, "command": needs.command, "source": f"{peer}/{needs.source}"[:64], "target": device,
            "devices": devices,
        }  # fmt: skip
        stack = ExitStack()
        try:
            published = listen(ports, uid=needs.uid)
            stack.callback(close, published)
            chunks = self._checkpoints.chunks
            # What stays suspended is not waited for.
            content = chunks.writing() if needs.asleep else in_transit(chunks, id, needs.uid)
            writing = stack.enter_context(content)
            await self._write("transfers.add", lambda session: repository.add(session, values))
        except OSError as error:
            stack.close()
            raise Unavailable(f"it cannot be stored: {error.strerror}", code="store_failed") from None
        except BaseException:
            stack.close()
            raise
        receiving = Receiving(peer, writing, stack, needs=needs, devices=devices, published=published)
        self._receiving[id] = receiving
        receiving.heard = time.monotonic()
        self._publish(values)
        return {"device": device, "streams": True}

    def sender(self, id: str) -> str | None:
        """Of the content of one that is under way: the peer."""
        receiving = self._receiving.get(id)
        return None if receiving is None else receiving.peer

    async def _chosen(self, needs: Needs, named: list[str]) -> list[list[str]]:
        """These devices in turn, or those with the most room: of each program. Raises Conflict with what prevents
        it."""
        known = {place.id: place for place in await self._places.known()}
        own = await asyncio.to_thread(general, needs, self._checkpoints.layout)
        places = _in_turn(needs, named) if named else choose(needs, known)
        reasons = list(own)
        several = len(needs.programs) > 1
        for number, against in enumerate(judge_all(needs, places, known), 1):
            whose = f"process {number} of {len(needs.programs)}: " if several else ""
            reasons += [Reason(one.code, f"{whose}{one.text}") for one in against]
        if len(places) < len(needs.programs):
            more = f", which is process {len(places) + 1} of {len(needs.programs)}" if several else ""
            raise Conflict(f"{_no_device(needs.programs[len(places)].devices[0].kind).text}{more}", code="no_room",
                           hint="xmigctl migrate --plan --to NODE says why of each")  # fmt: skip
        if reasons:
            raise Conflict("; ".join(one.text for one in reasons)[:500], code=reasons[0].code)
        return places

    # --- what comes ahead, while the program runs there ---------------------------------------------------------------

    async def _bring(self, id: str, receiving: Receiving, enough: threading.Event) -> None:
        """What has come goes onto the devices, by the servers that the processes will have. Without that, or if it
        fails, it is copied when all has come."""
        brought: Manifest | None = None
        try:
            while (manifest := receiving.manifest) is not None and manifest is not brought and not enough.is_set():
                row = await self._row(id)
                if row is None or not isinstance(receiving.writing, Transit) or not receiving.writing.whole:
                    return  # host memory has no room for what is made of it
                await asyncio.to_thread(self._check_manifest, manifest, row)
                _check_announced(manifest, receiving.needs)
                if enough.is_set():  # meanwhile
                    return
                self._start_ahead(id, receiving, manifest)
                for number, program in enumerate(manifest.programs):
                    images = receiving.ahead.images[number]
                    handles, snapshots = await asyncio.to_thread(
                        live.restore_memory, self._checkpoints.chunks, id, program, lambda _: None, enough, images
                    )
                    receiving.ahead.servers[number].give(handles, snapshots)
                    free([*snapshots, *(handle.fd for handle in handles.values())])
                brought = manifest
        except NotWanted:
            pass
        except (OSError, ValueError, XmigError) as error:
            logger.warning("content does not come ahead", transfer=id[:12], why=harmless(str(error)))
        except Exception:
            logger.exception("content does not come ahead", transfer=id[:12])

    def _start_ahead(self, id: str, receiving: Receiving, manifest: Manifest) -> None:
        """Servers of those programs that have none, or of which it has ended."""

        def no_room(why: str) -> None:
            """Better now than once the program stands still."""
            over = self._loop.create_task(self._over(id, why))
            self._ending.add(over)
            over.add_done_callback(self._ending.discard)

        def wanted(number: int) -> Wanted:
            program = manifest.programs[number]
            return Wanted(
                job=manifest.job_name, device=receiving.devices[number], sm_share=manifest.sm_share or None,
                user=Peer(0, program.uid, program.gid),
                most_bytes=[one.bytes for one in receiving.needs.programs[number].devices],
            )  # fmt: skip

        servers = receiving.ahead.servers
        for number in range(len(manifest.programs)):
            if number == len(servers):
                servers.append(self._supervisor.work_ahead(wanted(number), no_room))
                receiving.ahead.images.append({})
            elif not servers[number].is_there:
                servers[number] = self._supervisor.work_ahead(wanted(number), no_room)

    # --- all of it has come -------------------------------------------------------------------------------------------

    async def _prepare(self, peer: str, id: str) -> dict[str, Any]:
        row = self._check_of(await self._row(id), peer)
        receiving = self._receiving.get(id)
        if row["state"] == "receiving" and receiving is not None:
            manifest = self._check_manifest(receiving.manifest, row)
            if not await self._change(id, {"state": "preparing"}, only_in=("receiving",)):
                return await self._state(peer, id, "receiving")

            async def work(operation: Operation) -> dict[str, Any]:
                return await self._arrive(operation, id, manifest, row, receiving)

            try:
                await self._operations.start(
                    KIND, subject=("transfer", id), owner=row["uid"], requestor=f"node {peer}", work=work,
                    request={"transfer": id}, cancellable=False, why_not="the other node decides about it",
                )  # fmt: skip
            except XmigError as error:
                await self._over(id, error.message)
                raise
        return await self._state(peer, id, row["state"])

    def _check_manifest(self, manifest: Manifest | None, row: dict[str, Any]) -> Manifest:
        """Raises Invalid: it is not what was announced, or cannot be."""
        if manifest is None:
            raise Invalid("there is no manifest", code="peer_lies")
        programs = manifest.programs
        announced = [len(devices_of(one)) for one in row["devices"]]
        if (
            manifest.id != row["id"] or any(one.uid != row["uid"] for one in programs)
            or [len(one.devices) for one in programs] != announced
            or len({one.pid for one in programs}) != len(programs) or len({one.id for one in programs}) != len(programs)
        ):  # fmt: skip
            raise Invalid("the manifest is of another program than was announced", code="peer_lies")
        try:
            for content in contents(manifest):
                check_places(content)
                if any(chunk.bytes > PIECE for chunk in content.chunks):
                    raise Damaged("a piece is too large")
        except Damaged as error:
            raise Invalid(f"the manifest cannot be right: {error.message}", code="peer_lies") from None
        return manifest

    async def _arrive(
        self, operation: Operation, id: str, manifest: Manifest, row: dict[str, Any], receiving: Receiving
    ) -> dict[str, Any]:
        async def keep(made: Sequence[Process], root: int) -> None:
            check_owners(made[0], tree(root))
            first = made[0]
            values = {
                "state": "prepared", "why": f"waits for the decision of {row['peer']}", "job_id": first.job.id,
                "process_id": first.row.id, "processes": [one.row.id for one in made], "pid": root,
                "start_time": pidfds.start_time(root), "pids": written(tree(root)), "took": receiving.ahead.took,
                "content_bytes": receiving.ahead.content_bytes,
                "ahead_bytes": receiving.ahead.content_bytes - receiving.ahead.copied_bytes,
            }  # fmt: skip
            if not await self._change(id, values, only_in=("preparing",)):
                raise Conflict("it was given up meanwhile", code="transfer_over")

        await receiving.settle()
        try:
            for program, device in zip(manifest.programs, row["devices"], strict=True):
                self._restoring.check_place(program, devices_of(device), needs_pid=not manifest.namespaces)
            await asyncio.to_thread(live.check_files, manifest.programs[0].files)
            await asyncio.to_thread(check_mounts, manifest.mounts)
            check_network([one.text for one in receiving.published], manifest.namespaces)
            return await self._restoring.make_again(
                operation, manifest, row["devices"], f"node {row['peer']}", published=receiving.published, keep=keep,
                asleep=receiving.asleep, ahead=None if receiving.asleep else receiving.ahead,
            )  # fmt: skip
        except Exception as error:
            why = error.message if isinstance(error, XmigError) else "it failed inside xmigd; its log says why"
            await self._over(id, why)
            raise
        finally:
            self._receiving.pop(id, None)
            receiving.close()

    async def _state(self, peer: str, id: str, seen: str) -> dict[str, Any]:
        """Once it is another one than was seen, or soon."""
        row = self._check_of(await self._row(id), peer)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT), self._changed:
                while row["state"] == seen:
                    await self._changed.wait()
                    row = self._check_of(await self._row(id), peer)
        return self._shown(row)

    @staticmethod
    def _shown(row: dict[str, Any]) -> dict[str, Any]:
        names = {
            "state": "state", "why": "why", "job": "job_id", "process": "process_id", "device": "target",
            "took": "took", "content_bytes": "content_bytes", "ahead_bytes": "ahead_bytes",
        }  # fmt: skip
        return {name: row[column] for name, column in names.items()}

    # --- decisions ----------------------------------------------------------------------------------------------------

    async def go(self, id: str, *, by: str | None) -> dict[str, Any]:
        """It goes on here: from now on it is this node's. `by`: the peer whose decision it is; None: an operator's.
        Raises Conflict: it has not arrived."""
        async with self._deciding:
            row = self._check_of(await self._row(id), by)
            if row["state"] == "prepared":
                if not await self._is_there(row):
                    await self._over(id, "its program is not there any more")
                    await self._end(row)
                elif await self._change(id, {"state": "going", "why": ""}, only_in=("prepared",)):
                    await self._let_go(row)
            elif row["state"] == "going":
                await self._let_go(row)
            elif row["state"] not in ("running", "dropped"):
                raise Conflict(f"it has not arrived: {row['state']}", code="transfer_not_ready")
            return self._shown(self._check_of(await self._row(id), by))

    async def drop(self, id: str, *, by: str | None, why: str) -> dict[str, Any]:
        """Nothing of it will ever run here, if it does not run already."""
        async with self._deciding:
            row = await self._row(id)
            if row is None and by is not None:  # so that a request to begin it, which is late, is refused
                values = {
                    "id": id, "direction": "in", "peer": by, "state": "dropped", "why": why, "job_name": "", "uid": 0,
                    "command": "", "source": by, "target": "",
                }  # fmt: skip
                await self._write("transfers.add", lambda session: repository.add(session, values))
            row = self._check_of(await self._row(id), by)
            if row["state"] not in repository.OVER and row["state"] != "going":
                await self._over(id, why)
                row = self._check_of(await self._row(id), by)
                if row["pid"] is not None and row["state"] == "dropped":
                    await self._end(row)
            return self._shown(row)

    async def _let_go(self, row: dict[str, Any]) -> None:
        live.let_go_on(left(row))
        if not await self._change(row["id"], {"state": "running", "why": ""}, only_in=("going",)):
            return
        row = await self._row(row["id"]) or row
        with contextlib.suppress(Unavailable):  # figures only
            await self._write("migrations.save", records.arrived(row, row["target"]))
        logger.info("a program of another node goes on here", transfer=row["id"][:12], peer=row["peer"], pid=row["pid"])

    async def _over(self, id: str, why: str) -> None:
        """It is dropped, if nothing of it may run."""
        await self._change(id, {"state": "dropped", "why": why}, only_in=("receiving", "preparing", "prepared"))
        if (receiving := self._receiving.pop(id, None)) is not None:
            receiving.close()
        await asyncio.to_thread(self._checkpoints.forget, new_id())  # what nobody needs

    async def _end(self, row: dict[str, Any]) -> None:
        for name in row["processes"]:
            if (process := self._supervisor.processes.get(name)) is not None:
                process.expect_end()
        await end(left(row))

    async def _is_there(self, row: dict[str, Any]) -> bool:
        """All that stands still, with all that it had: after a restart of this daemon it is found again."""
        found = [await self._checkpoints.found_again(None, name) for name in row["processes"]]
        alive = all(one is not None and one.state not in ("losing", "lost", "ended") for one in found)
        return alive and are_whole(row)

    # --- this daemon's beginning, and time ----------------------------------------------------------------------------

    async def recover(self) -> None:
        """What an earlier daemon has left behind, beside operations. Before peers come."""
        for row in await asyncio.to_thread(self._unfinished):
            if row["state"] == "receiving":
                await self._over(row["id"], "the daemon ended while it was received")
            elif row["state"] == "going":
                await self._let_go(row)

    async def keep(self) -> None:
        """Give up what is silent. Until it is cancelled."""
        while True:
            await asyncio.sleep(SILENT / 8)
            for id, receiving in list(self._receiving.items()):
                row = await self._row(id)
                if row is not None and row["state"] == "receiving" and time.monotonic() - receiving.heard > SILENT:
                    with contextlib.suppress(XmigError):  # the next time, then
                        await self._over(id, f"{receiving.peer} has sent nothing for {SILENT:g} s")

    async def _resolve(self, operation: Operation) -> Outcome:
        """What is prepared stays so. What was made by half is ended: nothing of it has run."""
        id = operation.request.get("transfer", "")
        row = await self._row(id)
        if row is not None and row["state"] == "preparing":
            await self._checkpoints.working.settle(operation)
            await self._over(id, "the daemon ended while it was prepared")
        elif row is not None and row["state"] in ("prepared", "going", "running"):
            await asyncio.to_thread(self._checkpoints.working.forget, operation)
            return Outcome(state="succeeded", result=self._shown(row))
        return interrupted(operation.row)

    # --- small parts --------------------------------------------------------------------------------------------------

    def _unfinished(self) -> list[dict[str, Any]]:
        with self._reader.session() as session:
            return [row for row in repository.unfinished(session) if row["direction"] == "in"]

    async def _row(self, id: str) -> dict[str, Any] | None:
        def read() -> dict[str, Any] | None:
            with self._reader.session() as session:
                return repository.get(session, id)

        return await asyncio.to_thread(read)

    @staticmethod
    def _check_of(row: dict[str, Any] | None, peer: str | None) -> dict[str, Any]:
        """Raises NotFound: it is none of this peer's."""
        if row is None or row["direction"] != "in" or peer not in (None, row["peer"]):
            raise NotFound("there is no such transfer", code="no_such_transfer")
        return row

    async def _change(self, id: str, values: dict[str, Any], *, only_in: tuple[str, ...]) -> bool:
        changed: bool = await self._write(
            repository.name_of(values), lambda session: repository.change(session, id, values, only_in=only_in)
        )
        if changed:
            row = await self._row(id)
            assert row is not None
            self._publish(row)
            async with self._changed:
                self._changed.notify_all()
        return changed

    def _publish(self, row: dict[str, Any]) -> None:
        data = {name: row.get(name) for name in ("direction", "peer", "state", "why", "source", "target")}
        self._bus.publish("transfer.changed", "transfer", row["id"], row.get("job_id"), data, owner=row["uid"])

    async def _write(self, name: Any, work: Callable[[Session], Any]) -> Any:
        """Raises Unavailable."""
        return await self._writer.write(name, work)


def _check_announced(manifest: Manifest, needs: Needs) -> None:
    """Has it no more than was announced? Later it may have grown. Raises Invalid."""
    has = sum(chunk.bytes for one in manifest.programs for memory in one.memory for chunk in memory.content.chunks)
    announced = sum(device.bytes for one in needs.programs for device in one.devices) + needs.program_bytes
    if has > announced:
        raise Invalid(f"it has {size(has)}, and {size(announced)} were announced", code="peer_lies")


def _needs(request: dict[str, Any]) -> Needs:
    """Raises ProtocolError."""
    try:
        return Needs.model_validate(request.get("needs"))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ProtocolError(f"needs that are none: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _devices(request: dict[str, Any]) -> list[str]:
    """That are named. Raises ProtocolError."""
    named = request.get("devices", [])
    most = 8 * MOST_PROGRAMS
    if not isinstance(named, list) or len(named) > most or not all(isinstance(n, str) and len(n) <= 64 for n in named):
        raise ProtocolError("devices that are none")
    return named


def _ports(request: dict[str, Any]) -> list[str]:
    """That are published. Raises ProtocolError."""
    ports = request.get("publish", [])
    if not isinstance(ports, list) or len(ports) > MOST_PORTS or not all(isinstance(one, str) for one in ports):
        raise ProtocolError("ports that are none")
    return ports


def _in_turn(needs: Needs, named: list[str]) -> list[list[str]]:
    """Raises Conflict: that many are not needed."""
    try:
        return in_turn([len(one.devices) for one in needs.programs], named)
    except Invalid as error:
        raise Conflict(error.message, code="wrong_number") from None


def _no_device(kind: str) -> Reason:
    return Reason("no_room", f"this node has no {kind} device with room for it")


def _as_answer(reasons: Sequence[Reason]) -> list[dict[str, str]]:
    return [{"code": one.code, "text": one.text} for one in reasons]
