from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from xmigd.database import migrate
from xmigd.database.engine import make_engine, prepare_folder
from xmigd.native import NCCL_SHIM, NVML_SHIM, SHIM

from .node import Node

MakeNode = Callable[..., Node]


def in_memory() -> str | None:
    """A place for databases on no disk, if there is room: who reads waits for a disk for some seconds, and then no
    longer."""
    place = "/dev/shm"
    if not os.access(place, os.W_OK | os.X_OK) or shutil.disk_usage(place).free < 1 << 29:
        return None
    return place


@pytest.fixture(scope="session")
def peer_native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A native folder whose server only uses the control protocol."""
    folder = tmp_path_factory.mktemp("native")
    server = folder / "xmig-server"
    server.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).parent / "peer_server.py"} "$@"\n')
    server.chmod(server.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    for parent in [folder, *folder.parents][:3]:
        parent.chmod(parent.stat().st_mode | 0o755)
    for shim in (SHIM, NVML_SHIM, NCCL_SHIM):
        (folder / shim).write_bytes(b"")
    return folder


@pytest.fixture
def make_node(peer_native: Path) -> Iterator[MakeNode]:
    # Not pytest's own folder: the path of a socket may have 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="xmig-", dir=in_memory()))
    folder.chmod(0o755)
    nodes: list[Node] = []

    def make(native: Path | None = None, **settings: str) -> Node:
        node = Node(folder, native or peer_native, **settings)
        nodes.append(node)
        return node

    yield make
    for node in nodes:
        node.close()
    print(nodes[0].log.read_text() if nodes and nodes[0].log.exists() else "no log")  # shown when the test fails
    shutil.rmtree(folder)


@pytest.fixture
def node(make_node: MakeNode) -> Node:
    node = make_node()
    node.start()
    return node


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "xmig.db"


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    prepare_folder(path)
    engine = make_engine(path, writer=True)
    migrate.upgrade(path, engine)
    yield engine
    engine.dispose()


@pytest.fixture
def reading(path: Path, engine: Engine) -> Iterator[Engine]:
    reading = make_engine(path)
    yield reading
    reading.dispose()
