"""Requests as another user: the kernel tells the daemon the effective user of whoever connects."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.daemon.node import Node


@contextlib.contextmanager
def become(uid: int, groups: tuple[int, ...] = ()) -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    before, group = os.getgroups(), os.getegid()
    os.setgroups(groups)
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)
        os.setgroups(before)


def request_as(
    node: Node, uid: int, method: str, path: str, *, body: Any = None, groups: tuple[int, ...] = (),
    headers: dict[str, str] | None = None,
) -> tuple[int, Any]:  # fmt: skip
    """Status and body of the answer that this user gets."""
    with become(uid, groups), node.http() as http:
        answer = http.request(method, path, json=body, headers=headers)
    return answer.status_code, answer.json() if answer.content else None
