from __future__ import annotations

from tests.recovery.conftest import kernels, start

__all__ = ["kernels", "start"]
