"""What the words of xMIG's own mean."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from xmigd.web.page import ThePage

router = APIRouter()


@router.get("/words")
async def words(page: ThePage) -> Response:
    return await page.show("words.html")
