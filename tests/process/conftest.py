from __future__ import annotations

import pytest

from .move_world import MoveWorld


@pytest.fixture
def world() -> MoveWorld:
    world = MoveWorld()
    world.run()
    return world
