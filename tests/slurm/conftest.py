from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import harness
from tests.criu.test_client_dump import criu_program
from tests.slurm.cluster import Cluster


@pytest.fixture(scope="session")
def slurm() -> Path:
    """The folder with Slurm's programs."""
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons start jobs as root only")
    script = harness.ROOT / "packaging" / "setup" / "slurm.sh"
    found = subprocess.run([script], capture_output=True, text=True, check=False)
    if found.returncode != 0:
        pytest.skip(found.stderr.strip().splitlines()[-1])
    return Path(found.stdout.strip())


@pytest.fixture(scope="session")
def cluster(slurm: Path, native_dir: Path) -> Iterator[Cluster]:
    """Two nodes of Slurm, and one xmigd with two cpu devices."""
    criu = criu_program() or "criu"
    with (
        harness.own_node(native_dir, devices="cpu:0,cpu:1", port=-1, criu=criu) as node,
        tempfile.TemporaryDirectory(prefix="xmig-slurm-") as folder,  # not the daemon's: that is closed to others
        Cluster(slurm, Path(folder), node, ("n1", "n2")) as cluster,
    ):
        yield cluster
