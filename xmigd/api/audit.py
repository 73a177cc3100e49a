"""The audit."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from xmigd.api.context import BeforeNumber, Limit, OperatorCaller, TheNode
from xmigd.api.schemas import AuditInfo

router = APIRouter(prefix="/v1/audit")


@router.get("", operation_id="list_audit")
def list_audit(
    node: TheNode,
    _: OperatorCaller,
    requestor: Annotated[str | None, Query(max_length=255)] = None,
    before: BeforeNumber = None,
    limit: Limit = 100,
) -> list[AuditInfo]:
    """Who asked for what, and how it went, newest first. For operators."""
    rows = node.audit.page(before=before, limit=limit, requestor=requestor)
    return [AuditInfo.model_validate(row) for row in rows]
