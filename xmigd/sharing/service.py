"""How a job shares its devices."""

from __future__ import annotations

from xmigd.devices.names import devices_of
from xmigd.processes.service import Processes
from xmigd.security.callers import Caller
from xmigd.sharing.neighbours import Neighbours
from xmigd.sharing.rotation import Rotation
from xmigd.sharing.schemas import JobSharing, ProcessSharing


class Sharing:
    def __init__(self, *, processes: Processes, neighbours: Neighbours, rotation: Rotation) -> None:
        self._processes = processes
        self._neighbours = neighbours
        self._rotation = rotation

    def of_job(self, caller: Caller, job: str) -> JobSharing:
        """Raises NotFound: none of its programs runs."""
        processes = self._processes.of_job(caller, job)
        waits = self._rotation.waits(job)
        names = {name: each for each in processes for name in devices_of(each.row.device)}
        return JobSharing(
            job=job, priority=processes[0].job.priority, memory_quota=processes[0].job.memory_quota,
            quota_used={name: each.quota_used(name) for name, each in names.items() if each.quota is not None},
            sm_share=processes[0].job.sm_share, waits_ms=None if waits is None else waits * 1e3,
            processes=[
                ProcessSharing(
                    process=each.row.id, device=each.row.device, mps=each.is_mps_client,
                    without_mps=each.without_mps, shares=self._neighbours.shares(each.row.id),
                    held_kernels=shown.held, held_ms=shown.held_ns / 1e6, overdue_kernels=shown.overdue,
                )
                for each in processes
                for shown in [self._neighbours.waiting(each.row.id)]
            ],
        )  # fmt: skip
