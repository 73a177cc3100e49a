from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet.nodes import FleetNode, running


@pytest.fixture(scope="package")
def nodes(native_dir: Path) -> Iterator[list[FleetNode]]:
    """`two` and `three` show themselves to `one`, which shows itself to nobody. `two` takes orders from `one`."""
    settings = {
        "one": {}, "two": {"fleet_readers": "one", "fleet_controllers": "one"}, "three": {"fleet_readers": "*"},
    }  # fmt: skip
    with running(native_dir, **settings) as made:
        yield made
