"""Carries the machine's calls out: with the helper, NVML and the host's memory; writes down and tells how far it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from xmigd import log
from xmigd.driver_checkpoint import node
from xmigd.driver_checkpoint.link import Helper, HelperLost
from xmigd.driver_checkpoint.machine import Call, Checkpointing, Kind, Result, State
from xmigd.driver_checkpoint.node import Gpus, Program
from xmigd.driver_checkpoint.plan import device_map
from xmigd.errors import Unavailable
from xmigd.host_memory import available_memory
from xmigd.migrations.plan import size

logger = log.get("driver_checkpoint")

LOCK_TIMEOUT_MS = 10_000  # the driver waits so long for submitted work; then the program goes on
SPARE = 256 << 20  # bytes that are left over: of the host's memory, and of a GPU's
WAIT = 1.0  # seconds between two looks for room on the way back


@dataclass
class Journey:
    """One program, from where, to where, and what is known of it on the way."""

    kind: Kind
    program: Program
    source: str  # GPU's identifier
    target: str
    needed_bytes: int
    machine: Checkpointing = field(default_factory=lambda: Checkpointing("move"))
    phases: list[tuple[str, int]] = field(default_factory=list)  # name, CLOCK_MONOTONIC ns
    locked_at: int | None = None
    unlocked_at: int | None = None


Changed = Callable[[Journey], None]


class Engine:
    """See the module's docstring. One journey per helper at a time."""

    def __init__(
        self,
        helper: Helper,
        *,
        look: Callable[[], Gpus] = node.look,
        host_memory: Callable[[], int] = available_memory,
        wait: float = WAIT,
        spare: int = SPARE,
    ) -> None:
        self._helper = helper
        self._look = look
        self._host_memory = host_memory
        self._wait = wait
        self._spare = spare

    async def travel(self, journey: Journey, changed: Changed, *, abandoned: bool = False) -> Checkpointing:
        """Until it is over. Raises nothing that the machine does not know: errors are its outcome."""
        machine = journey.machine = Checkpointing(journey.kind)
        answer = await self._state(journey)
        call = machine.begin(answer.state, abandoned=abandoned)
        self._note(journey, changed)
        while call is not None:
            if call.name == "lock":
                journey.locked_at = time.monotonic_ns()
            result = await self._carry_out(journey, call)
            call = machine.after(result)
            if result.state == "running" and journey.locked_at is not None and call is None:
                journey.unlocked_at = time.monotonic_ns()
            self._note(journey, changed)
        logger.info("a checkpointed move is over", pid=journey.program.pid, outcome=machine.outcome,
                    location=machine.location, why=machine.why)  # fmt: skip
        return machine

    def _note(self, journey: Journey, changed: Changed) -> None:
        phase = journey.machine.phase
        if not journey.phases or journey.phases[-1][0] != phase:
            journey.phases.append((phase, time.monotonic_ns()))
        changed(journey)

    async def _carry_out(self, journey: Journey, call: Call) -> Result:
        pid = journey.program.pid
        if call.name == "wait":
            await asyncio.sleep(self._wait)
            return await self._state(journey)
        if call.name == "room":
            return await self._room(journey, call.where)
        if not self._is_the_same(journey):
            return Result("gone")
        arguments: dict[str, object] = {}
        if call.name == "lock":
            arguments["timeout_ms"] = LOCK_TIMEOUT_MS
        elif call.name == "restore":
            gpus = await asyncio.to_thread(self._look)
            target = journey.source if call.where == "source" else journey.target
            arguments["pairs"] = [] if target == journey.source else device_map(gpus, journey.source, target)
        try:
            answer = await self._helper.call(call.name, pid, **arguments)
        except (HelperLost, Unavailable) as error:
            logger.warning("the helper died during a call", call=call.name, pid=pid, why=str(error))
            after = await self._state(journey)
            return Result(after.state, f"the helper died during {call.name}", code="helper_lost")
        if answer["state"] is None:
            return Result((await self._state(journey)).state, answer["error"] or "the driver does not know its state")
        return Result(answer["state"], _meaning(call, answer["error"]))

    async def _state(self, journey: Journey) -> Result:
        """Whatever happens to helpers: the driver's word on where the process is, or that it has ended."""
        while self._is_the_same(journey):
            try:
                answer = await self._helper.call("state", journey.program.pid)
            except (HelperLost, Unavailable) as error:
                logger.warning("the helper does not answer; trying again", why=str(error))
                await asyncio.sleep(self._wait)
                continue
            if answer["state"] is not None:
                return Result(answer["state"])
            await asyncio.sleep(self._wait)
        return Result("gone")

    async def _room(self, journey: Journey, where: str) -> Result:
        state: State = (await self._state(journey)).state
        needed = journey.needed_bytes + self._spare
        if where == "host":
            free, place, code = self._host_memory(), "the host's memory", "no_host_memory"
        else:
            wanted = journey.source if where == "source" else journey.target
            gpus = await asyncio.to_thread(self._look)
            found = next((gpu for gpu in gpus.all if gpu.uuid == wanted), None)
            if found is None:
                return Result(state, f"{wanted} is not there any more", code="no_such_device")
            free, place, code = found.free_bytes, found.device, "no_room"
        if free < needed:
            return Result(state, f"{place} has room for {size(free)}, {size(needed)} are needed", code)
        return Result(state)

    def _is_the_same(self, journey: Journey) -> bool:
        found = node.program(journey.program.pid)
        return found is not None and found.start_time == journey.program.start_time


def _meaning(call: Call, error: str | None) -> str | None:
    """The driver's error, with what it means where it is known."""
    if error is None:
        return None
    known = {
        ("lock", "CUDA_ERROR_NOT_READY"): f"its work did not end within {LOCK_TIMEOUT_MS / 1000:.0f} s",
        ("checkpoint", "CUDA_ERROR_NOT_SUPPORTED"): "it uses what the driver cannot save (managed memory, MPS, IPC)",
        ("restore", "CUDA_ERROR_OUT_OF_MEMORY"): "the memory ran out during the restore",
    }
    more = known.get((call.name, error))
    return f"{call.name}: {more} ({error})" if more else f"{call.name}: {error}"
