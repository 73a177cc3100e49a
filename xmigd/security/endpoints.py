"""The audit, and bearer tokens for callers on the network."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query, Request, Response

from xmigd.api.dependencies import AnyCaller, BeforeNumber, Limit, OperatingCaller, OperatorCaller, provided
from xmigd.api.routing import make_router
from xmigd.database import models
from xmigd.errors import Forbidden
from xmigd.security.audit import Audit
from xmigd.security.schemas import AuditInfo, TokenInfo, TokenMade, TokenRequest
from xmigd.security.tokens import Tokens
from xmigd.users import user_name

router = make_router("/v1")
TheAudit = Annotated[Audit, provided(Audit)]
TheTokens = Annotated[Tokens, provided(Tokens)]


@router.get("/audit", operation_id="list_audit")
def list_audit(
    audit: TheAudit,
    _: OperatorCaller,
    requestor: Annotated[str | None, Query(max_length=255)] = None,
    before: BeforeNumber = None,
    limit: Limit = 100,
) -> list[AuditInfo]:
    """Who requested what, and how it went, newest first. For operators."""
    rows = audit.page(before=before, limit=limit, requestor=requestor)
    return [AuditInfo.model_validate(row) for row in rows]


LINKS = {"revoke_token": {"operationId": "revoke_token", "parameters": {"token": "$response.body#/id"}}}


@router.post(
    "/tokens",
    operation_id="create_token",
    status_code=201,
    responses={201: {"description": "It is valid.", "links": LINKS}},
)
async def create_token(
    tokens: TheTokens, caller: OperatingCaller, wanted: TokenRequest, request: Request, response: Response
) -> TokenMade:
    """Make a token; it is shown only here. Operators make them for everybody and for the node, others for themselves
    and not of scope `admin`. One of scope `admin` is always the node's."""
    uid = wanted.uid if caller.is_operator else caller.uid
    if wanted.scope == "admin":
        caller.check_operator()
        if wanted.uid is not None:
            raise Forbidden(
                "a token of scope admin is the node's, nobody's own", code="admin_token_of_user", hint="leave out uid"
            )
    elif not caller.is_operator and wanted.uid not in (None, caller.uid):
        caller.check_operator()
    if caller.token is not None and not caller.is_operator:
        raise Forbidden(
            "a token makes no tokens, unless it is of scope admin", code="token_from_token",
            hint="use the local socket of the daemon's machine",
        )  # fmt: skip
    request.state.secret = True
    token, secret = await tokens.create(
        name=wanted.name, scope=wanted.scope, uid=uid, lifetime=wanted.lifetime, creator=caller
    )
    response.headers["Location"] = f"/v1/tokens/{token.id}"
    response.headers["Cache-Control"] = "no-store"
    return TokenMade(**TokenInfo.model_validate(token).model_dump(), token=secret)


@router.get("/tokens", operation_id="list_tokens")
def list_tokens(tokens: TheTokens, caller: AnyCaller) -> list[TokenInfo]:
    """Tokens, newest first, without what their holders have to say."""
    return [_shown(token, tokens.last_used(token)) for token in tokens.find(owner=caller.owner)]


def _shown(token: models.Token, used: float | None) -> TokenInfo:
    info = TokenInfo.model_validate(token)
    info.user, info.last_used_at = None if token.uid is None else user_name(token.uid), used
    return info


@router.delete("/tokens/{token}", operation_id="revoke_token", status_code=204)
async def revoke_token(tokens: TheTokens, caller: OperatingCaller, token: Annotated[str, Path(max_length=32)]) -> None:
    """Revoke a token. From the answer on nobody gets in with it; whoever listens is disconnected."""
    if caller.owner is None:
        caller.check_operator()
    await tokens.revoke(token, owner=caller.owner)
