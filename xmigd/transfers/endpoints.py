"""Transfers: jobs that move to another node, or come from one. They are begun as migrations."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path

from xmigd.api.dependencies import AnyCaller, BeforeId, Id, Limit, OperatorCaller, provided
from xmigd.api.routing import make_router
from xmigd.transfers.schemas import DecisionRequest, TransferInfo
from xmigd.transfers.service import Transfers

router = make_router("/v1")
TheTransfers = Annotated[Transfers, provided(Transfers)]
TransferId = Annotated[str, Path(max_length=64)]


@router.get("/transfers", operation_id="list_transfers")
def list_transfers(
    transfers: TheTransfers, caller: AnyCaller, job: Id = None, before: BeforeId = None, limit: Limit = 100
) -> list[TransferInfo]:
    """The newest first. Each is listed on both nodes, with the same id."""
    return transfers.page(job=job, owner=caller.owner, before=before, limit=limit)


@router.get("/transfers/{transfer}", operation_id="get_transfer")
def get_transfer(transfers: TheTransfers, caller: AnyCaller, transfer: TransferId) -> TransferInfo:
    """One of them."""
    return transfers.find(caller, transfer)


@router.post("/transfers/{transfer}:decide", operation_id="decide_transfer")
async def decide_transfer(
    transfers: TheTransfers, caller: OperatorCaller, transfer: TransferId, request: DecisionRequest
) -> TransferInfo:
    """Where its program goes on, if the other node is gone for good and cannot say. If it is not gone, two copies of
    the program may run, or none. For operators."""
    return await transfers.decide(caller, transfer, request.goes_on)
