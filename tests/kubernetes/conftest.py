from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import harness
from tests.criu.test_client_dump import criu_program
from tests.kubernetes.cluster import Adapter, Cluster, stand_in
from xmigd.demo.node import Node


@pytest.fixture(scope="module")
def xmig(native_dir: Path) -> Iterator[Node]:
    with harness.own_node(native_dir, devices="cpu:0,cpu:1", port=-1, criu=criu_program() or "criu") as node:
        yield node


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("kubernetes")
    if "KUBE_APISERVER" in os.environ:
        from tests.kubernetes.real import real

        with real(Path(os.environ["KUBE_APISERVER"]), Path(os.environ["ETCD"]), folder) as cluster:
            yield cluster
    else:
        with stand_in(folder) as cluster:
            yield cluster


@pytest.fixture(scope="module")
def adapter(cluster: Cluster, xmig: Node) -> Iterator[Adapter]:
    with Adapter(cluster, xmig) as adapter:
        yield adapter
    if cluster.standin is not None:
        assert cluster.standin.refused == []
