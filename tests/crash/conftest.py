from __future__ import annotations

from pathlib import Path

import pytest

from tests import harness


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.compile_kernels(tmp_path_factory.mktemp("kernels"))
