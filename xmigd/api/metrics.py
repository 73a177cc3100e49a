"""Numbers: for Prometheus, and for charts."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Query
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.responses import Response

from xmigd.api.context import AnyCaller, Node, TheNode
from xmigd.api.schemas import SeriesInfo
from xmigd.database import models
from xmigd.errors import Forbidden, NotFound
from xmigd.metrics.collector import NodeCollector
from xmigd.metrics.series import INTERVAL, Series
from xmigd.processes import repository as processes

router = APIRouter()
Since = Annotated[float, Query(ge=0, le=1e12, allow_inf_nan=False, description="samples after this time")]
Id = Annotated[str, Path(max_length=64)]


@router.get(
    "/metrics",
    operation_id="get_metrics",
    response_class=Response,
    responses={
        200: {"description": "Prometheus's text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    },
)
def get_metrics(node: TheNode, caller: AnyCaller) -> Response:
    """Metrics for Prometheus: of all jobs, so for operators and tokens of the node."""
    if caller.owner is not None:
        raise Forbidden(
            "the metrics are of everybody's jobs", code="operators_only", hint="use a token of the node (uid null)"
        )
    now = CollectorRegistry()
    now.register(NodeCollector(node))
    return Response(generate_latest(node.counts.registry) + generate_latest(now), media_type=CONTENT_TYPE_LATEST)


def _shown(series: Series, since: float) -> SeriesInfo:
    return SeriesInfo(interval_s=INTERVAL, samples=series.columns(since))


@router.get("/v1/processes/{process}/series", operation_id="get_process_series")
async def get_process_series(node: TheNode, caller: AnyCaller, process: Id, since: Since = 0.0) -> SeriesInfo:
    """The last half hour of a process, a list for each value: memory, journal, calls a second, what cuts cost."""
    live = node.supervisor.processes.get(process)
    if live is None and not await asyncio.to_thread(_is_known, node, process, caller.owner):
        raise NotFound(f"there is no process {process!r}", hint="GET /v1/processes lists them")
    if live is not None:
        caller.check_sees(live.job.uid, "process", process, hint="GET /v1/processes lists them")
    return _shown(node.sampler.of_process(process), since)


def _is_known(node: Node, process: str, owner: int | None) -> bool:
    with node.read() as session:
        return bool(processes.page(session, process_id=process, owner=owner))


@router.get("/v1/devices/{device}/series", operation_id="get_device_series")
def get_device_series(node: TheNode, _: AnyCaller, device: Id, since: Since = 0.0) -> SeriesInfo:
    """The last half hour of a device, a list for each value: memory and utilisation."""
    with node.read() as session:
        if session.get(models.Device, device) is None:
            raise NotFound(f"there is no device {device!r}", hint="GET /v1/devices lists them")
    return _shown(node.sampler.of_device(device), since)
