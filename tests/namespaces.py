"""Nodes with a network of their own, for tests that can make them."""

from __future__ import annotations

import os

import pytest

from xmigd.demo.namespaces import PLACES, NetworkNode, nodes
from xmigd.errors import StartError

__all__ = ["PLACES", "NetworkNode", "needs_networks", "nodes"]


def _why_not() -> str:
    """Empty: networks can be made here."""
    if os.geteuid() != 0:
        return "only root can make networks"
    try:
        with nodes(1):
            return ""
    except (StartError, OSError) as error:
        return f"no networks can be made here: {error}"


_reason = _why_not()
needs_networks = pytest.mark.skipif(bool(_reason), reason=_reason or "networks can be made")
