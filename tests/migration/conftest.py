from __future__ import annotations

from tests.daemon.conftest import make_node, node, peer_native
from tests.recovery.conftest import kernels, outputs, start, undisturbed

__all__ = ["kernels", "make_node", "node", "outputs", "peer_native", "start", "undisturbed"]
