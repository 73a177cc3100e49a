from __future__ import annotations

import pytest

from tests.daemon.conftest import make_node, node, peer_native
from tests.migration.world import MoveWorld
from tests.recovery.conftest import kernels, outputs, start, undisturbed

__all__ = ["kernels", "make_node", "node", "outputs", "peer_native", "start", "undisturbed"]


@pytest.fixture
def world() -> MoveWorld:
    world = MoveWorld()
    world.run()
    return world
