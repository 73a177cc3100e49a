"""When checkpoints of a job are made without a request."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Response

from xmigd.api import preconditions
from xmigd.api.dependencies import AnyCaller, OperatingCaller, provided
from xmigd.api.preconditions import IfMatch
from xmigd.api.routing import make_router
from xmigd.checkpoints.policies import CheckpointPolicies
from xmigd.checkpoints.schemas import CheckpointPolicyInfo, PolicyRequest

router = make_router("/v1/jobs/{job}/checkpoint-policy")
JobId = Annotated[str, Path(max_length=64)]
ThePolicies = Annotated[CheckpointPolicies, provided(CheckpointPolicies)]


@router.get("", operation_id="get_checkpoint_policy")
async def get_checkpoint_policy(
    policies: ThePolicies, caller: AnyCaller, job: JobId, response: Response
) -> CheckpointPolicyInfo:
    """What applies to the job, when the next checkpoint is due, and what went wrong. Its `ETag` is for PUT and
    DELETE."""
    info = await policies.get(caller, job)
    response.headers["ETag"] = preconditions.etag(info.version)
    return info


@router.put("", operation_id="set_checkpoint_policy")
async def set_checkpoint_policy(
    policies: ThePolicies, caller: OperatingCaller, job: JobId, policy: PolicyRequest, if_match: IfMatch,
    response: Response,
) -> CheckpointPolicyInfo:  # fmt: skip
    """Give the job a policy of its own instead of what the settings say. All of it is replaced."""
    info = await policies.set(caller, job, policy, lambda version: preconditions.check(if_match, version))
    response.headers["ETag"] = preconditions.etag(info.version)
    return info


@router.delete("", operation_id="remove_checkpoint_policy", status_code=204)
async def remove_checkpoint_policy(
    policies: ThePolicies, caller: OperatingCaller, job: JobId, if_match: IfMatch
) -> None:
    """Back to what the settings say. Checkpoints that the policy made stay."""
    await policies.remove(caller, job, lambda version: preconditions.check(if_match, version))
