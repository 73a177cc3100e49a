"""Policies, and the circuit breaker."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Path, Response

from xmigd.api import preconditions
from xmigd.api.context import AnyCaller, Node, OperatorCaller, TheNode
from xmigd.api.preconditions import IfMatch
from xmigd.api.schemas import BreakerInfo, PolicyInfo
from xmigd.policies.service import BreakerPolicy

router = APIRouter(prefix="/v1")
Name = Annotated[str, Path(max_length=64)]
Change = Annotated[
    dict[str, float | int | None],
    Body(description="values that change, by name; null: back to the setting", max_length=32,
         examples=[{"max_attempts": 3}]),
]  # fmt: skip


@router.get("/policies", operation_id="list_policies")
async def list_policies(node: TheNode, _: AnyCaller) -> list[PolicyInfo]:
    """What operators have set, and what the settings say."""
    return [PolicyInfo.model_validate(state) for state in node.policies.states()]


@router.get("/policies/{name}", operation_id="get_policy")
async def get_policy(node: TheNode, _: AnyCaller, name: Name, response: Response) -> PolicyInfo:
    """One policy. Its `ETag` is for a PATCH."""
    state = node.policies.state(name)
    response.headers["ETag"] = preconditions.etag(state.version)
    return PolicyInfo.model_validate(state)


@router.patch("/policies/{name}", operation_id="change_policy")
async def change_policy(
    node: TheNode, caller: OperatorCaller, name: Name, change: Change, if_match: IfMatch, response: Response
) -> PolicyInfo:
    """Change some values of a policy. It applies without a restart."""
    state = await node.policies.change(
        name, change, by=caller.name, check=lambda version: preconditions.check(if_match, version)
    )
    data: dict[str, Any] = {"settings": state.settings, "by": caller.name}
    node.bus.publish("policy.changed", "policy", name, None, data)
    response.headers["ETag"] = preconditions.etag(state.version)
    return PolicyInfo.model_validate(state)


def _breaker(node: Node) -> BreakerInfo:
    breaker = node.breaker
    policy = node.policies.group("circuit-breaker", BreakerPolicy)
    return BreakerInfo.model_validate(
        {
            "state": breaker.state, "why": breaker.why, "changed_at": breaker.changed_at,
            "actions": breaker.actions(), "max_actions": policy.max_actions, "window_seconds": policy.window_seconds,
        }
    )  # fmt: skip


@router.get("/circuit-breaker", operation_id="get_breaker")
async def get_breaker(node: TheNode, _: AnyCaller) -> BreakerInfo:
    """Whether automation acts, and what it has done within the window."""
    return _breaker(node)


@router.post("/circuit-breaker:reset", operation_id="reset_breaker")
async def reset_breaker(node: TheNode, caller: OperatorCaller) -> BreakerInfo:
    """Close the circuit breaker: automation acts again. What it did before counts no more."""
    await node.breaker.reset(caller.name)
    return _breaker(node)
