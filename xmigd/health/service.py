"""Health: what sensors and agents find is written down, published, and answered.

Findings come from NVML (its state, read every few seconds, and its events), from the kernel's log, and from agents of
others through the API. What is done goes through the circuit breaker and the audit, as everything that xMIG does by
itself, and no further than the policy `devices` allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from xmigd import log
from xmigd.database.reader import Reader
from xmigd.database.writer import Writer
from xmigd.devices.service import Devices
from xmigd.errors import Invalid, XmigError
from xmigd.events.bus import Bus
from xmigd.health import grades, repository
from xmigd.health.grades import Found, Rung
from xmigd.health.kernel_log import KernelLog
from xmigd.health.schemas import FindingInfo, Report
from xmigd.health.sensor import Sensor
from xmigd.migrations.drains import Drains
from xmigd.migrations.places import Places
from xmigd.policies.breaker import Action, Breaker
from xmigd.policies.service import DevicePolicy
from xmigd.security.audit import XMIGD, Audit
from xmigd.security.callers import Caller

logger = log.get("health")

ACTIONS: dict[Rung, Action] = {Rung.cordon: "cordon", Rung.drain: "drain", Rung.lose: "lose"}
DATABASE_WAIT = 1.0  # seconds, when the database takes no writes
TWICE_WITHIN = 5.0  # seconds: NVML and the kernel's log report the same Xid


class Health:
    """Lives in the event loop's thread."""

    def __init__(
        self, *, sensor: Sensor, devices: Devices, drains: Drains, places: Places, breaker: Breaker, audit: Audit,
        writer: Writer, reader: Reader, bus: Bus, policy: Callable[[], DevicePolicy],
    ) -> None:  # fmt: skip
        self._sensor = sensor
        self._devices = devices
        self._drains = drains
        self._places = places
        self._breaker = breaker
        self._audit = audit
        self._writer = writer
        self._reader = reader
        self._bus = bus
        self._policy = policy
        self._xids: dict[tuple[str, int], float] = {}  # when each was last reported
        self._answering: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by device: one after the other
        self._tasks: set[asyncio.Task[Any]] = set()

    # --- what callers see ---------------------------------------------------------------------------------------------

    def page(self, device: str, *, before: int | None, limit: int) -> Sequence[FindingInfo]:
        """Newest first. Raises NotFound."""
        self._devices.check_known(device)
        with self._reader.session() as session:
            rows = repository.page(session, device, before=before, limit=limit)
            return [FindingInfo.model_validate(row) for row in rows]

    async def report(self, device: str, report: Report, *, caller: Caller) -> FindingInfo:
        """What an agent has found, or a drill. Raises NotFound; Invalid: the Xid is the program's affair."""
        await asyncio.to_thread(self._devices.check_known, device)
        if report.xid is not None:
            graded = grades.of_xid(report.xid)
            if graded is None:
                raise Invalid(
                    f"Xid {report.xid} is no finding of a device", code="not_of_the_device",
                    hint="its program is recovered by itself; of Xid 154, the recovery action says more",
                )  # fmt: skip
            found = graded
        else:
            found = Found(report.code or "", report.text or "", Rung[report.rung or "report"])
        return await self._add(device, found, caller.name)

    # --- what sensors find --------------------------------------------------------------------------------------------

    async def run(self, every: float, kernel_log: Path) -> None:
        """Until it is cancelled. `every`: seconds between two readings; 0: nothing is read."""
        await self._go_on()
        if every <= 0 or not self._sensor.devices:
            return
        loop = asyncio.get_running_loop()
        heard = KernelLog(kernel_log, lambda bus, xid: self._of_the_kernel(bus, xid))
        self._sensor.watch(lambda device, xid: loop.call_soon_threadsafe(self._xid, device, xid, "nvml"))
        try:
            await asyncio.gather(*(self._follow(device, every) for device in self._sensor.devices))
        finally:
            heard.close()
            self._sensor.stop()

    async def _go_on(self) -> None:
        """Answer what an earlier daemon has written down, and not answered."""

        def unanswered() -> list[FindingInfo]:
            with self._reader.session() as session:
                rows = repository.open_ones(session)
                return [FindingInfo.model_validate(row) for row in rows if row.answer is None]

        try:
            for info in await asyncio.to_thread(unanswered):
                with contextlib.suppress(XmigError):
                    await self._answer_to(info)
        except Exception:  # what comes from now on is found all the same
            logger.exception("findings of an earlier daemon were not answered")

    async def _follow(self, device: str, every: float) -> None:
        while True:
            try:
                await self._seen(device, await asyncio.to_thread(self._sensor.read, device))
            except XmigError as error:  # the database takes no writes: again, with the next reading
                logger.error("a finding is not written down", device=device, why=error.message)
            except Exception:
                logger.exception("a reading failed")
            await asyncio.sleep(every)

    async def _seen(self, device: str, found: Sequence[Found]) -> None:
        """All that NVML reports now: what it has reported before and does not any more is over."""
        rows = await asyncio.to_thread(self._open_of_nvml, device)
        codes = {each.code for each in found}
        over = [number for code, number in rows.items() if code not in codes]
        if over:
            await self._write(lambda session: repository.close(session, device, XMIGD.name, only=over))
            self._bus.publish("device.health", "device", device, None, {"closed": over})
        for each in found:
            if each.code not in rows:
                await self._add(device, each, "nvml")

    def _open_of_nvml(self, device: str) -> dict[str, int]:
        """Its state; an Xid is an event, and does not end by itself."""
        with self._reader.session() as session:
            rows = repository.open_ones(session, device)
            return {row.code: row.id for row in rows if row.source == "nvml" and not row.code.startswith("xid_")}

    def _of_the_kernel(self, bus: str, xid: int) -> None:
        device = self._sensor.device_at(bus)
        if device is not None:
            self._xid(device, xid, "kernel")

    def _xid(self, device: str, xid: int, source: str) -> None:
        now = time.monotonic()
        last = self._xids.get((device, xid), -TWICE_WITHIN)
        self._xids[device, xid] = now
        found = grades.of_xid(xid)
        if found is None or now < last + TWICE_WITHIN:
            return
        task = asyncio.get_running_loop().create_task(self._add_surely(device, found, source))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _add_surely(self, device: str, found: Found, source: str) -> None:
        """An Xid is reported once, and nobody who could ask again waits for the answer."""
        while True:
            try:
                await self._add(device, found, source)
            except XmigError as error:
                logger.error("a finding waits for the database", device=device, code=found.code, why=error.message)
                await asyncio.sleep(DATABASE_WAIT)
            except Exception:
                logger.exception("a finding was not answered", device=device, code=found.code)
                return
            else:
                return

    # --- what is done -------------------------------------------------------------------------------------------------

    async def _add(self, device: str, found: Found, source: str) -> FindingInfo:
        """Written down before anything is done. Raises Unavailable."""

        def write(session: Session) -> tuple[FindingInfo, bool]:
            row, new = repository.add(session, device, found, source[:255])
            return FindingInfo.model_validate(row), new

        written: tuple[FindingInfo, bool] = await self._write(write)
        info, new = written
        if not new:
            return info
        logger.warning("a device reports a fault", device=device, code=found.code, why=found.text, source=source)
        data = {"finding": info.id, "code": info.code, "text": info.text, "rung": info.rung, "source": info.source}
        self._bus.publish("device.health", "device", device, None, data)
        return await self._answer_to(info)

    async def _answer_to(self, info: FindingInfo) -> FindingInfo:
        async with self._answering[info.device]:
            answer = await self._answer(info.device, Rung[info.rung], info.text)
        await self._write(lambda session: repository.answered(session, info.id, answer))
        self._bus.publish("device.health", "device", info.device, None, {"finding": info.id, "answer": answer})
        return info.model_copy(update={"answer": answer})

    async def _answer(self, device: str, wanted: Rung, why: str) -> str:
        """What was done, or why nothing."""
        rung = min(wanted, Rung(self._policy().health_rung))
        if rung is Rung.report:
            return "reported" if wanted is Rung.report else "reported: the policy allows no more"
        try:
            known = {place.id: place for place in await self._places.known()}
            others = [p for p in known.values() if p.configured and p.healthy and not p.cordoned and p.id != device]
            if rung is not Rung.lose and not others:
                logger.warning("a failing device is left as it is", device=device, why="it is the only one")
                return "nothing: it is the only device that takes processes"
            self._breaker.check()
            intent = await self._audit.intent(XMIGD, f"{rung.name} {device}", detail={"why": why})
            self._breaker.acted(ACTIONS[rung], "device", device, why)
            outcome, answer = "done", rung.name
            try:
                if rung is Rung.cordon:
                    await self._places.cordon(device, why, XMIGD.name)
                elif rung is Rung.drain:
                    operation = await self._drains.drain(device, reason=why, requestor=XMIGD.name)
                    answer = f"drain, operation {operation.id}"
                else:
                    await self._devices.lose(device, why, caller=XMIGD)
            except XmigError as error:
                outcome, answer = error.code, f"{rung.name} failed: {error.message}"
            self._audit.outcome(intent, XMIGD, f"{rung.name} {device}", outcome)
        except XmigError as error:  # the circuit breaker is open, or nothing can be written down
            logger.warning("a failing device is left as it is", device=device, why=error.message)
            return f"nothing: {error.message}"
        logger.warning("a failing device was answered", device=device, why=why, answer=answer)
        return answer

    async def _write(self, write: Callable[[Session], Any]) -> Any:
        return await self._writer.write("health.findings", write)
