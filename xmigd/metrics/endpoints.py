"""Numbers: for Prometheus, and for charts."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from xmigd.api.dependencies import AnyCaller, provided
from xmigd.api.routing import make_router
from xmigd.devices.service import Devices
from xmigd.errors import Forbidden
from xmigd.metrics.schemas import SeriesInfo
from xmigd.metrics.series import INTERVAL, Sampler, Series
from xmigd.metrics.service import Metrics
from xmigd.processes.service import Processes

router = make_router()
Since = Annotated[float, Query(ge=0, le=1e12, allow_inf_nan=False, description="samples after this time")]
Id = Annotated[str, Path(max_length=64)]
TheSampler = Annotated[Sampler, provided(Sampler)]


@router.get(
    "/metrics",
    operation_id="get_metrics",
    response_class=Response,
    responses={
        200: {"description": "Prometheus's text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    },
)
def get_metrics(metrics: Annotated[Metrics, provided(Metrics)], caller: AnyCaller) -> Response:
    """Metrics for Prometheus: of all jobs, so for operators and tokens of the node."""
    if caller.owner is not None:
        raise Forbidden(
            "the metrics are of everybody's jobs", code="operators_only", hint="use a token of the node (uid null)"
        )
    return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _shown(series: Series, since: float) -> SeriesInfo:
    return SeriesInfo(interval_s=INTERVAL, samples=series.columns(since))


@router.get("/v1/processes/{process}/series", operation_id="get_process_series")
async def get_process_series(
    sampler: TheSampler,
    processes: Annotated[Processes, provided(Processes)],
    caller: AnyCaller,
    process: Id,
    since: Since = 0.0,
) -> SeriesInfo:
    """The last half hour of a process, a list for each value: memory, journal, calls a second, what snapshots cost."""
    await processes.check_seen(process, caller)
    return _shown(sampler.of_process(process), since)


@router.get("/v1/devices/{device}/series", operation_id="get_device_series")
def get_device_series(
    sampler: TheSampler, devices: Annotated[Devices, provided(Devices)], _: AnyCaller, device: Id, since: Since = 0.0
) -> SeriesInfo:
    """The last half hour of a device, a list for each value: memory and utilisation."""
    devices.check_known(device)
    return _shown(sampler.of_device(device), since)
