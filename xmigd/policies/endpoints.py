"""Policies, and the circuit breaker."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Body, Path, Response

from xmigd.api import preconditions
from xmigd.api.dependencies import AnyCaller, OperatorCaller, provided
from xmigd.api.preconditions import IfMatch
from xmigd.api.routing import make_router
from xmigd.events.bus import Bus
from xmigd.policies.breaker import Breaker
from xmigd.policies.schemas import BreakerInfo, PolicyInfo
from xmigd.policies.service import BreakerPolicy, Policies

router = make_router("/v1")
Name = Annotated[str, Path(max_length=64)]
ThePolicies = Annotated[Policies, provided(Policies)]
TheBreaker = Annotated[Breaker, provided(Breaker)]
TheBus = Annotated[Bus, provided(Bus)]
Change = Annotated[
    dict[str, float | int | None],
    Body(description="values that change, by name; null: back to the setting", max_length=32,
         examples=[{"max_attempts": 3}]),
]  # fmt: skip


@router.get("/policies", operation_id="list_policies")
async def list_policies(policies: ThePolicies, _: AnyCaller) -> list[PolicyInfo]:
    """What operators have set, and what the settings say."""
    return [PolicyInfo.model_validate(state) for state in policies.states()]


@router.get("/policies/{name}", operation_id="get_policy")
async def get_policy(policies: ThePolicies, _: AnyCaller, name: Name, response: Response) -> PolicyInfo:
    """One policy. Its `ETag` is for a PATCH."""
    state = policies.state(name)
    response.headers["ETag"] = preconditions.etag(state.version)
    return PolicyInfo.model_validate(state)


@router.patch("/policies/{name}", operation_id="change_policy")
async def change_policy(
    policies: ThePolicies,
    bus: TheBus,
    caller: OperatorCaller,
    name: Name,
    change: Change,
    if_match: IfMatch,
    response: Response,
) -> PolicyInfo:
    """Change some values of a policy. It applies without a restart."""
    state = await policies.change(
        name, change, by=caller.name, check=lambda version: preconditions.check(if_match, version)
    )
    data: dict[str, Any] = {"settings": state.settings, "by": caller.name}
    bus.publish("policy.changed", "policy", name, None, data)
    response.headers["ETag"] = preconditions.etag(state.version)
    return PolicyInfo.model_validate(state)


def _breaker(breaker: Breaker, policies: Policies) -> BreakerInfo:
    policy = policies.group("circuit-breaker", BreakerPolicy)
    return BreakerInfo.model_validate(
        {
            "state": breaker.state, "why": breaker.why, "changed_at": breaker.changed_at,
            "actions": breaker.actions(), "max_actions": policy.max_actions, "window_seconds": policy.window_seconds,
        }
    )  # fmt: skip


@router.get("/circuit-breaker", operation_id="get_breaker")
async def get_breaker(breaker: TheBreaker, policies: ThePolicies, _: AnyCaller) -> BreakerInfo:
    """Whether automation acts, and what it has done within the window."""
    return _breaker(breaker, policies)


@router.post("/circuit-breaker:reset", operation_id="reset_breaker")
async def reset_breaker(breaker: TheBreaker, policies: ThePolicies, caller: OperatorCaller) -> BreakerInfo:
    """Close the circuit breaker: automation acts again. What it did before counts no more."""
    await breaker.reset(caller.name)
    return _breaker(breaker, policies)
