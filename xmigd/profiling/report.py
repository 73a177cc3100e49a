"""A job's profile as the API has it: sums, shares, and estimates that say how they were made."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from xmigd.profiling.pages import Kind
from xmigd.profiling.profiles import Key, Sum, Watched, add_up
from xmigd.profiling.schemas import Estimate, JobProfile, OperationKind, ProfiledOperation, ProfiledProcess

BY_SHAPE = "threads of the launch, waves and occupancy against the threads that the device holds; no counter"
BY_BYTES = "bytes of the calls, mean duration, and the bandwidth that the driver states"
BY_POINTERS = "at most: allocations that the parameters point into, read or written once; no counter"
NAMES: dict[Kind, OperationKind] = {
    Kind.kernel: "kernel", Kind.to_device: "to_device", Kind.to_host: "to_host", Kind.on_device: "on_device",
    Kind.between_devices: "between_devices", Kind.fill: "fill", Kind.graph: "graph", Kind.collective: "collective",
}  # fmt: skip
NOT_KNOWN = "nothing is known to estimate it from"


def report(job: str, watched: Sequence[Watched], every: int, limit: int) -> JobProfile:
    sums = add_up(entry for one in watched for profile in one.profiles for entry in profile.entries)
    total = sum(_total_ns(one) or 0.0 for one in sums.values())
    operations = [_operation(key, one, total) for key, one in sums.items() if key[0] in NAMES]
    operations.sort(key=lambda one: (-(one.total_ms or 0.0), -one.calls, one.name))
    processes = [_process(one) for one in watched]
    steps = [one.step_ms for one in processes if one.step_ms is not None and not one.over]
    idle = [one.idle_share for one in processes if one.idle_share is not None]
    return JobProfile(
        job_id=job, every=every, step_ms=statistics.median(steps) if steps else None,
        idle_share=statistics.fmean(idle) if idle else None, processes=processes, operations=operations[:limit],
        more=max(0, len(operations) - limit),
    )  # fmt: skip


def _process(one: Watched) -> ProfiledProcess:
    profiles, now, over = one.profiles, one.now, not one.pages
    return ProfiledProcess(
        process=one.id, device=one.device, over=over, samples=sum(each.samples for each in profiles),
        dropped=sum(each.dropped for each in profiles), unlisted=sum(each.unlisted for each in profiles),
        live_bytes=one.live_bytes, peak_bytes=one.peak_bytes, idle_share=None if over else now.idle_share,
        step_ms=one.step_ms(), launches_per_step=one.period, link_bytes_per_s=None if over else now.link_bytes_per_s,
        host_bytes_per_s=None if over else now.host_bytes_per_s,
    )  # fmt: skip


def _total_ns(one: Sum) -> float | None:
    return None if one.mean_ns is None else one.mean_ns * one.calls


def _operation(key: Key, one: Sum, all_ns: float) -> ProfiledOperation:
    kind, name, grid, block, shared = key
    total, mean = _total_ns(one), one.mean_ns
    kernel = kind is Kind.kernel
    return ProfiledOperation(
        kind=NAMES[kind], name=name, grid=grid if kernel else None, block=block if kernel else None,
        shared_bytes=shared, calls=one.calls, timed=one.timed, total_ms=None if total is None else total / 1e6,
        mean_us=None if mean is None else mean / 1e3,
        median_us=statistics.median(one.recent_ns) / 1e3 if one.recent_ns else None,
        share=total / all_ns if total is not None and all_ns > 0 else None, bytes=None if kernel else one.bytes,
        occupancy=occupancy(one), compute=compute(one), bandwidth=bandwidth(one),
    )  # fmt: skip


def occupancy(one: Sum) -> float | None:
    """Of a multiprocessor's threads, how many it can hold of this kernel."""
    last = one.last
    if last.kind is not Kind.kernel or not last.blocks_per_processor or not last.threads_per_processor:
        return None
    return min(1.0, last.blocks_per_processor * math.prod(last.block) / last.threads_per_processor)


def compute(one: Sum) -> Estimate:
    """The threads that the launch keeps on the device, on the average over its waves, of those that it can hold."""
    held, last = occupancy(one), one.last
    if held is None or not last.processors:
        return Estimate(share=None, how=NOT_KNOWN)
    waves = math.prod(last.grid) / (last.blocks_per_processor * last.processors)
    return Estimate(share=min(1.0, held * waves / max(1, math.ceil(waves))), how=BY_SHAPE)


def bandwidth(one: Sum) -> Estimate:
    """Of the bandwidth of the device's memory."""
    last, mean = one.last, one.mean_ns
    if not mean or not last.memory_mbps:
        return Estimate(share=None, how=NOT_KNOWN)
    if last.kind in (Kind.on_device, Kind.fill):
        moved = one.bytes / max(one.calls, 1) * (2 if last.kind is Kind.on_device else 1)
        how = BY_BYTES
    elif last.kind is Kind.kernel and last.reachable_bytes:
        moved, how = float(last.reachable_bytes), BY_POINTERS
    else:
        return Estimate(share=None, how=NOT_KNOWN)
    return Estimate(share=min(1.0, moved / mean * 1e3 / last.memory_mbps), how=how)
