"""Plans of consolidation, and their application as operations.

A plan changes nothing and is not written down: it is worth something for as long as the node is as it was. The last
ones are kept in memory; a restarted daemon has none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from xmigd.consolidation.apply import Application, located
from xmigd.consolidation.guard import Guard, Rate, StepMs
from xmigd.consolidation.kept import KeptPlans
from xmigd.consolidation.plan import Draft, Plan, Seen, changes, check, make_problem, refusals, steps_of
from xmigd.consolidation.schemas import ConsolidationRequest
from xmigd.consolidation.solver import solve
from xmigd.consolidation.undo import left_to_undo, obstacles
from xmigd.database import models
from xmigd.errors import Conflict, NotReady, XmigError
from xmigd.events.bus import Bus
from xmigd.jobs import repository as jobs
from xmigd.metrics.series import INTERVAL, Sampler
from xmigd.migrations import repository
from xmigd.migrations.places import Places
from xmigd.migrations.service import RESOLVED_WITHIN, Moves
from xmigd.operations import repository as operations_repository
from xmigd.operations.operation import Operation
from xmigd.operations.repository import OperationRow
from xmigd.operations.service import Operations, Outcome
from xmigd.prediction.model import Remaining
from xmigd.supervisor.supervisor import Supervisor

KIND = "consolidation"
MEASURED = 60.0  # seconds that a busy share is an average of
LEAST_SAMPLES = 2
ATTEMPTS = 4  # to find a packing whose moves have an order
MOST_SEARCHED = 1000  # operations, for the one that has applied a plan


class Consolidation:
    def __init__(
        self,
        *,
        node: str,
        supervisor: Supervisor,
        operations: Operations,
        moves: Moves,
        places: Places,
        sampler: Sampler,
        readers: Engine,
        bus: Bus,
        step_ms: StepMs,
        remaining: Callable[[Iterable[str]], Awaitable[Mapping[str, Remaining]]],
    ) -> None:
        """`remaining`: how long jobs will still run, of those of which it is known."""
        self._node = node
        self._supervisor = supervisor
        self._operations = operations
        self._moves = moves
        self._places = places
        self._sampler = sampler
        self._readers = readers
        self._bus = bus
        self._step_ms = step_ms
        self._remaining = remaining
        self._plans: KeptPlans[Plan] = KeptPlans("consolidation plan", "xmigctl consolidate plan")
        self._solving = asyncio.Lock()  # one solver at a time, however many plans are requested
        operations.register(KIND, self._resolve)

    # --- plans --------------------------------------------------------------------------------------------------------

    async def plan(self, request: ConsolidationRequest) -> Plan:
        """Changes nothing. Raises NotFound: a device or job that the request names; NotReady."""
        seen = await self._see()
        check(request, seen)
        stuck: set[str] = set()
        for _ in range(ATTEMPTS):
            refused = refusals(request, seen, stuck)
            problem = make_problem(request, seen, refused)
            async with self._solving:
                solution = await solve(problem, request.solver_seconds)
            steps, without = steps_of(problem, solution.packing)
            if not without:
                break
            stuck |= set(without)
        else:
            steps, solution = [], await solve(problem, 0)
        packing = solution.packing if steps else problem.now
        draft = Draft(
            request=request, seen=seen, problem=problem, solution=solution, packing=packing, steps=steps,
            refused=refused,
        )  # fmt: skip
        moving = [seen.processes[name] for name in draft.moving]
        estimates = await asyncio.to_thread(lambda: [self._moves.estimate(one) for one in moving])
        made = draft.plan(dict(zip(draft.moving, estimates, strict=True)))
        self._plans.keep(made)
        return made

    def find(self, plan: str) -> Plan:
        """Raises NotFound."""
        return self._plans.find(plan)

    def listed(self, limit: int) -> Sequence[Plan]:
        """Newest first."""
        return self._plans.listed(limit)

    async def _see(self) -> Seen:
        """Raises NotReady: after a restart, what is not known yet has its room, too."""
        if awaited := self._supervisor.expected:
            raise NotReady(
                f"{len(awaited)} processes of before the restart have not announced themselves yet",
                hint="request it again in a second",
            )
        places = await self._places.known()
        processes = list(self._supervisor.processes.values())
        names = [one.row.id for one in processes]
        steps = {name: self._step_ms(name, MEASURED) for name in names}
        remaining = await self._remaining({one.job.id for one in processes})
        allocated = await asyncio.to_thread(self._allocated, {one.job.id for one in processes})
        return Seen.of(places, processes, {name: self.busy(name) for name in names}, steps, remaining, allocated)

    def _allocated(self, ids: set[str]) -> dict[str, str]:
        with Session(self._readers) as session:
            return jobs.allocated(session, ids)

    def _samples(self, process: str) -> dict[str, list[Any]]:
        return self._sampler.of_process(process).columns(time.time() - MEASURED)

    def busy(self, process: str) -> float | None:
        """The busy share of the last minute; None: it is not known."""
        known = [share for share in self._samples(process)["busy_share"] if share is not None]
        return sum(known) / len(known) if len(known) >= LEAST_SAMPLES else None

    def _rate(self, process: str) -> Rate | None:
        """In the last minute."""
        columns = self._samples(process)
        calls = [each for each in columns["calls_per_s"] if each is not None]
        busy = self.busy(process)
        if len(calls) < LEAST_SAMPLES:
            return None
        seconds = len(calls) * INTERVAL
        return Rate(
            seconds=seconds, records=round(sum(calls) * INTERVAL), busy_s=None if busy is None else busy * seconds,
            step_ms=self._step_ms(process, MEASURED),
        )  # fmt: skip

    # --- their application --------------------------------------------------------------------------------------------

    async def apply(self, plan: Plan, *, guard_seconds: float, requestor: str) -> OperationRow:
        """Raises Conflict: there is nothing to do, or the node is not any more as the plan has it; NotReady."""
        if not plan.steps:
            raise Conflict("the plan moves nothing", code="plan_empty", hint="its refusals say what stays, and why")
        changed = changes(plan, await self._see())
        if changed:
            raise Conflict(
                f"the node has changed since the plan was made: {'; '.join(changed[:5])}", code="plan_stale",
                hint="make a new plan",
            )  # fmt: skip
        guard = self._guard(plan, guard_seconds) if guard_seconds > 0 else None

        async def work(operation: Operation) -> dict[str, Any]:
            application = Application(operation, self._moves, self._supervisor.processes.get, requestor)
            return await application.run(guard)

        moves = [
            {
                "process": move.process, "job": move.job_id, "job_name": move.job_name, "source": move.source,
                "target": move.target,
            }
            for move in plan.answer.moves
        ]  # fmt: skip
        row = await self._operations.start(
            KIND, subject=("node", self._node), requestor=requestor, work=work,
            request={"plan": plan.id, "freed": plan.answer.freed, "moves": moves},
        )  # fmt: skip
        plan.operation = row.id
        return row

    async def undo(self, plan: str, *, requestor: str) -> OperationRow:
        """Back to where they were before the plan, those that live. Also after a restart: by its operation. Raises
        Conflict: there is nothing to undo, or the node has changed so that it cannot be; NotReady."""
        seen = await self._see()
        row = await asyncio.to_thread(self._last_of, plan)
        parts = [] if row is None else [part for part in left_to_undo(row) if part["process"] in seen.processes]
        if row is None or row.active or not parts:
            why = "is under way" if row and row.active else "has no moved process that lives" if row else "is not known"
            raise Conflict(
                f"nothing can be undone of plan {plan[:64]!r}: its application {why}",
                code="nothing_to_undo",
                hint="cancel it if it is under way (xmigctl op cancel); xmigctl op list --kind consolidation has them",
            )
        if changed := obstacles(parts, seen):
            raise Conflict(
                f"the node has changed since the plan was applied: {'; '.join(changed[:5])}", code="plan_stale",
                hint="move processes with xmigctl migrate, or make a new plan",
            )  # fmt: skip

        async def work(operation: Operation) -> dict[str, Any]:
            return await Application(operation, self._moves, self._supervisor.processes.get, requestor).run_back()

        return await self._operations.start(
            KIND, subject=("node", self._node), requestor=requestor, work=work, cancellable=False,
            why_not="its moves are being undone",
            request={"plan": plan, "undoes": row.id, "freed": [], "moves": parts},
        )  # fmt: skip

    def _last_of(self, plan: str) -> OperationRow | None:
        """That has applied this plan, or undone it."""
        with Session(self._readers) as session:
            rows = operations_repository.find(session, kind=KIND, limit=MOST_SEARCHED)
        return next((row for row in rows if row.request.get("plan") == plan), None)

    def _guard(self, plan: Plan, seconds: float) -> Guard:
        """Of all processes on devices to which one comes."""
        targets = {move.target for move in plan.answer.moves}
        watched = [
            (one, device.device) for device in plan.answer.after if device.device in targets for one in device.processes
        ]
        return Guard(
            jobs={one.process: one.job_id for one, _ in watched},
            devices={one.process: device for one, device in watched},
            before={one.process: self._rate(one.process) for one, _ in watched},
            promised=plan.problem.rules.max_slow_down, seconds=seconds, find=self._supervisor.processes.get,
            step_ms=self._step_ms, bus=self._bus,
        )  # fmt: skip

    async def _resolve(self, operation: Operation) -> Outcome:
        """After a restart nothing is moved: each move was resolved by itself. Where every process is, is reported."""
        parts = operation.request.get("moves", [])
        names = [part["process"] for part in parts]
        deadline = time.monotonic() + RESOLVED_WITHIN
        while (await asyncio.to_thread(self._any_moves, names)) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        found = located(parts, await asyncio.to_thread(self._devices_of, names))
        phase = operation.row.phase
        operation.progress(phase, parts=found, done=sum(part["state"] == "moved" for part in found), total=len(found))
        result = {
            "moved": sum(part["state"] == "moved" for part in found), "freed": operation.request.get("freed", []),
            "parts": found, "guard": None,
        }  # fmt: skip
        undone = "undoes" in operation.request and all(part["state"] != "moved" for part in found)
        applied = phase not in ("rolling_back", "rolled_back") and all(part["state"] != "not_moved" for part in found)
        if undone or applied:
            return Outcome(state="succeeded", result=result)
        places = ", ".join(f"{part['process'][:12]}: {part['device'] or 'ended'}" for part in found)
        error = XmigError(
            f"xmigd ended in the middle of it; the processes run where they were or had come to ({places})",
            code="interrupted", phase=phase, hint="make a new plan",
        )  # fmt: skip
        return Outcome(state="failed", error=error, result=result | {"freed": []})

    def _any_moves(self, names: Sequence[str]) -> bool:
        with Session(self._readers) as session:
            for name in set(names):
                process = session.get(models.Process, name)
                over = process is None or process.state in ("ended", "lost")
                if not over and repository.page(session, process_id=name, state="running", limit=1):
                    return True
        return False

    def _devices_of(self, names: Sequence[str]) -> dict[str, str | None]:
        with Session(self._readers) as session:
            rows = {name: session.get(models.Process, name) for name in set(names)}
            return {
                name: None if row is None or row.state in ("ended", "lost") else row.device
                for name, row in rows.items()
            }
