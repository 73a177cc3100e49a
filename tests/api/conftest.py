from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from sqlalchemy import Engine

from tests.daemon.conftest import in_memory, make_node, node, peer_native
from tests.daemon.node import Node
from xmigd.database import migrate
from xmigd.database.engine import make_engine, prepare_folder
from xmigd.database.writer import Writer

__all__ = ["make_node", "node", "peer_native"]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    path = tmp_path / "state" / "xmig.db"
    prepare_folder(path)
    engine = make_engine(path, writer=True)
    migrate.upgrade(path, engine)
    yield engine
    engine.dispose()


@pytest.fixture
def readers(tmp_path: Path, engine: Engine) -> Iterator[Engine]:
    readers = make_engine(tmp_path / "state" / "xmig.db")
    yield readers
    readers.dispose()


@pytest.fixture
def writer(engine: Engine) -> Iterator[Writer]:
    writer = Writer(engine)
    yield writer
    writer.close()


@pytest.fixture(scope="module")
def daemon(peer_native: Path) -> Iterator[Node]:
    """One daemon for all tests of a module."""
    folder = Path(tempfile.mkdtemp(prefix="xmig-", dir=in_memory()))
    folder.chmod(0o755)
    daemon = Node(folder, peer_native, XMIG_OPERATORS_GROUP="60001")
    daemon.start()
    yield daemon
    daemon.close()
    shutil.rmtree(folder)


@pytest.fixture
def http(daemon: Node) -> Iterator[httpx.Client]:
    with daemon.http() as client:
        yield client
