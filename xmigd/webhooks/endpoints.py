"""Webhooks: where events are sent to. For operators."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import Path, Request, Response

from xmigd.api import preconditions
from xmigd.api.dependencies import BeforeNumber, Limit, OperatorCaller, provided
from xmigd.api.preconditions import IfMatch
from xmigd.api.routing import make_router
from xmigd.webhooks.schemas import (
    DeadLetterInfo,
    RetryAnswer,
    RetryRequest,
    Tried,
    WebhookChange,
    WebhookInfo,
    WebhookMade,
    WebhookRequest,
)
from xmigd.webhooks.service import Webhooks

router = make_router("/v1/webhooks")
WebhookId = Annotated[str, Path(max_length=64)]
TheWebhooks = Annotated[Webhooks, provided(Webhooks)]

LINKS = {
    name: {"operationId": name, "parameters": {"webhook": "$response.body#/id"}}
    for name in (
        "get_webhook",
        "change_webhook",
        "test_webhook",
        "list_dead_letters",
        "retry_webhook",
        "remove_webhook",
    )
}


@router.get("", operation_id="list_webhooks")
async def list_webhooks(webhooks: TheWebhooks, _: OperatorCaller) -> list[WebhookInfo]:
    """All of them, the newest first, with how far each is. For operators."""
    return await webhooks.listed()


@router.post(
    "",
    operation_id="add_webhook",
    status_code=201,
    responses={201: {"description": "It gets what happens from now on.", "links": LINKS}},
)
async def add_webhook(
    webhooks: TheWebhooks, caller: OperatorCaller, wanted: WebhookRequest, request: Request, response: Response
) -> WebhookMade:
    """Send events to this address from now on, each at least once and signed with the secret, which is shown only here.
    For operators."""
    request.state.secret = True
    info, secret = await webhooks.add(wanted, by=caller.name)
    response.headers["Location"] = f"/v1/webhooks/{info.id}"
    response.headers["Cache-Control"] = "no-store"
    return WebhookMade(**info.model_dump(), secret=secret)


@router.get("/{webhook}", operation_id="get_webhook")
async def get_webhook(webhooks: TheWebhooks, _: OperatorCaller, webhook: WebhookId, response: Response) -> WebhookInfo:
    """One of them. Its `ETag` is for a PATCH. For operators."""
    return _tagged(await webhooks.find(webhook), response)


@router.patch("/{webhook}", operation_id="change_webhook")
async def change_webhook(
    webhooks: TheWebhooks, _: OperatorCaller, webhook: WebhookId, change: WebhookChange, if_match: IfMatch,
    response: Response,
) -> WebhookInfo:  # fmt: skip
    """Change its address, its secret or which events it gets; stop it, or let it go on where it was. For operators."""
    check = lambda version: preconditions.check(if_match, version)  # noqa: E731
    return _tagged(await webhooks.change(webhook, change, check=check), response)


@router.delete("/{webhook}", operation_id="remove_webhook", status_code=204)
async def remove_webhook(webhooks: TheWebhooks, _: OperatorCaller, webhook: WebhookId) -> None:
    """Remove it with its dead letters. For operators."""
    await webhooks.remove(webhook)


@router.post("/{webhook}:test", operation_id="test_webhook")
async def try_webhook(webhooks: TheWebhooks, _: OperatorCaller, webhook: WebhookId) -> Tried:
    """Send it an event `webhook.test` now, once, and say what the target answered. For operators."""
    answer = await webhooks.test(webhook)
    return Tried.model_validate(asdict(answer) | {"delivered": answer.error is None})


@router.get("/{webhook}/dead-letters", operation_id="list_dead_letters")
async def list_dead_letters(
    webhooks: TheWebhooks, _: OperatorCaller, webhook: WebhookId, before: BeforeNumber = None, limit: Limit = 100
) -> list[DeadLetterInfo]:
    """Events that its target has not taken in `webhook_attempts`, or that had to make room because too many waited; the
    newest first. At most 10000 are kept. For operators."""
    return await webhooks.letters(webhook, before=before, limit=limit)


@router.post("/{webhook}:retry", operation_id="retry_webhook", status_code=202)
async def retry_webhook(
    webhooks: TheWebhooks, _: OperatorCaller, webhook: WebhookId, request: RetryRequest
) -> RetryAnswer:
    """Send dead letters again, the oldest first, each once. Those that the target takes are dead letters no more. For
    operators."""
    return RetryAnswer(queued=await webhooks.retry(webhook, request.letters))


def _tagged(info: WebhookInfo, response: Response) -> WebhookInfo:
    response.headers["ETag"] = preconditions.etag(info.version)
    return info
