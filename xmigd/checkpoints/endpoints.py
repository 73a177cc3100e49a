"""Checkpoints: jobs' whole states, from which they can be restored."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query, Response

from xmigd.api.dependencies import AnyCaller, BeforeId, Id, Limit, OperatingCaller, OperatorCaller, provided
from xmigd.api.routing import make_router
from xmigd.checkpoints.restoring import Restoring
from xmigd.checkpoints.schemas import (
    CheckpointInfo,
    CheckpointRequest,
    ExportRequest,
    ImportRequest,
    RestoreRequest,
)
from xmigd.checkpoints.service import Checkpoints
from xmigd.operations.endpoints import ACCEPTED, accepted
from xmigd.operations.schemas import OperationInfo
from xmigd.processes.service import Processes

router = make_router("/v1")
TheCheckpoints = Annotated[Checkpoints, provided(Checkpoints)]
TheRestoring = Annotated[Restoring, provided(Restoring)]
TheProcesses = Annotated[Processes, provided(Processes)]
CheckpointId = Annotated[str, Path(max_length=64)]
InDoubtQuery = Annotated[
    bool,
    Query(description="instead: parts of this node of which only the job's first node knows whether all others exist"),
]


@router.post("/checkpoints", operation_id="create_checkpoint", status_code=202, responses=ACCEPTED)
async def create_checkpoint(
    checkpoints: TheCheckpoints, processes: TheProcesses, caller: OperatingCaller, request: CheckpointRequest,
    response: Response,
) -> OperationInfo:  # fmt: skip
    """Write down all that a job is: device memory, program, open files' positions. The program stands still meanwhile,
    and goes on, unless it is to stop there."""
    if request.process is not None:
        process = processes.controlled(caller, request.process)
    else:
        process = processes.of_job(caller, request.job or "")[0]
    row = await checkpoints.create(process, stop=request.stop, requestor=caller.name, keep_bits=request.keep_bits)
    return accepted(row, response)


@router.get("/checkpoints", operation_id="list_checkpoints")
def list_checkpoints(
    checkpoints: TheCheckpoints, caller: AnyCaller, job: Id = None, before: BeforeId = None, limit: Limit = 100,
    in_doubt: InDoubtQuery = False,
) -> list[CheckpointInfo]:  # fmt: skip
    """The newest first."""
    return checkpoints.page(job=job, owner=caller.owner, before=before, limit=limit, whole=not in_doubt)


@router.get("/checkpoints/{checkpoint}", operation_id="get_checkpoint")
def get_checkpoint(checkpoints: TheCheckpoints, caller: AnyCaller, checkpoint: CheckpointId) -> CheckpointInfo:
    """One of them."""
    return checkpoints.find(caller, checkpoint)


@router.delete("/checkpoints/{checkpoint}", operation_id="remove_checkpoint", status_code=204)
async def remove_checkpoint(checkpoints: TheCheckpoints, caller: OperatingCaller, checkpoint: CheckpointId) -> None:
    """Remove it, with the content that no other one has."""
    await checkpoints.remove(caller, checkpoint)


@router.post("/checkpoints/{checkpoint}:discard", operation_id="discard_part", status_code=204)
async def discard_part(checkpoints: TheCheckpoints, caller: OperatorCaller, checkpoint: CheckpointId) -> None:
    """Remove this node's part of a checkpoint of several nodes that is in doubt, because the node that decides about it
    is gone for good. If it is not gone, and has decided that the checkpoint is whole, nobody can restore it any more.
    For operators."""
    await checkpoints.discard(caller, checkpoint)


@router.post("/checkpoints/{checkpoint}:verify", operation_id="verify_checkpoint", status_code=202, responses=ACCEPTED)
async def verify_checkpoint(
    checkpoints: TheCheckpoints, caller: OperatingCaller, checkpoint: CheckpointId, response: Response
) -> OperationInfo:
    """Read all of it and compare it with its hashes."""
    return accepted(await checkpoints.verify(caller, checkpoint, requestor=caller.name), response)


@router.post(
    "/checkpoints/{checkpoint}:restore", operation_id="restore_checkpoint", status_code=202, responses=ACCEPTED
)
async def restore_checkpoint(
    restoring: TheRestoring, caller: OperatingCaller, checkpoint: CheckpointId, request: RestoreRequest,
    response: Response,
) -> OperationInfo:  # fmt: skip
    """Make the programs again where they were, in a job of their own, on these devices or on those that they had."""
    row = await restoring.restore(
        caller, checkpoint, request.devices, own_files=request.own_files, publish=request.publish,
        nodes=request.nodes, requestor=caller.name,
    )  # fmt: skip
    return accepted(row, response)


@router.post("/checkpoints/{checkpoint}:export", operation_id="export_checkpoint", status_code=202, responses=ACCEPTED)
async def export_checkpoint(
    checkpoints: TheCheckpoints, caller: OperatorCaller, checkpoint: CheckpointId, response: Response,
    request: ExportRequest | None = None,
) -> OperationInfo:  # fmt: skip
    """Write it into one file, which another node can import. The answer says where it is. The key of an encrypted file
    is read by the daemon, and never a part of a request. For operators."""
    key_file = None if request is None else request.key_file
    return accepted(await checkpoints.export(caller, checkpoint, key_file, requestor=caller.name), response)


@router.post("/checkpoints:import", operation_id="import_checkpoint", status_code=202, responses=ACCEPTED)
async def import_checkpoint(
    checkpoints: TheCheckpoints, caller: OperatorCaller, request: ImportRequest, response: Response
) -> OperationInfo:
    """Take a checkpoint out of a file that another node has exported. Its programs run as the users that the file says
    when it is restored. For operators."""
    return accepted(await checkpoints.take(request.file, request.key_file, requestor=caller.name), response)
