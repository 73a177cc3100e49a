"""Daemons whose devices fall ill."""

from __future__ import annotations

from tests.recovery.conftest import kernels

__all__ = ["kernels"]
