"""Names in CRIU's list of files, ports that are published, and what is refused."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests import harness
from xmigd.checkpoints import own_files
from xmigd.checkpoints.manifest import OpenFile
from xmigd.checkpoints.own_files import copy_files, remove, renamed
from xmigd.cli.apart import check
from xmigd.cli.exits import CommandError
from xmigd.errors import Conflict, Invalid
from xmigd.published import close, further, listen, parse
from xmigd.store.objects import Damaged


def entry(name: bytes) -> bytes:
    file = b"\x08\x01" + b"\x32" + bytes([len(name)]) + name + b"\x38\x58"  # id, name, mnt_id
    content = b"\x08\x01\x10\x07" + b"\x1a" + bytes([len(file)]) + file  # type, id, reg
    return struct.pack("<I", len(content)) + content


def test_names_are_replaced() -> None:
    image = b"\x19\x43\x56\x54\x38\x31\x30\x56" + entry(b"/srv/log") + entry(b"/srv/log.1")
    found = renamed(image, {b"/srv/log": b"/srv/log.copy"})
    assert found == image[:8] + entry(b"/srv/log.copy") + entry(b"/srv/log.1")
    assert renamed(image, {}) == image
    with pytest.raises(Damaged):
        renamed(image[:-1], {})


@pytest.fixture
def lock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IO[bytes]]:
    with open(tmp_path_factory.mktemp("criu") / "lock", "wb") as lock:
        yield lock


def test_copies_end_where_the_program_was(tmp_path: Path, lock: IO[bytes]) -> None:
    log, read = tmp_path / "log", tmp_path / "read"
    log.write_text("before after")
    read.write_text("only read")
    files = [
        OpenFile(path=str(log), bytes=6, writable=True),
        OpenFile(path=str(read), bytes=9, writable=False),
    ]
    made = copy_files(files, "x", uid=os.geteuid(), gid=os.getegid(), lock=lock)
    assert made == {str(log): f"{log}.x"}
    assert (tmp_path / "log.x").read_text() == "before"
    with pytest.raises(Conflict) as caught:  # it would overwrite something
        copy_files(files, "x", uid=os.geteuid(), gid=os.getegid(), lock=lock)
    assert caught.value.code == "file_not_copied"
    assert (tmp_path / "log.x").read_text() == "before"
    remove(made)
    assert not (tmp_path / "log.x").exists()


def test_a_file_that_became_shorter_is_not_filled_with_zeros(tmp_path: Path, lock: IO[bytes]) -> None:
    log = tmp_path / "log"
    log.write_text("rotated")
    with pytest.raises(Conflict, match="shorter than it was"):
        copy_files(
            [OpenFile(path=str(log), bytes=100, writable=True)], "x", uid=os.geteuid(), gid=os.getegid(), lock=lock
        )
    assert list(tmp_path.iterdir()) == [log]


def test_a_file_that_does_not_come(tmp_path: Path, lock: IO[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its user has put a pipe there, which nobody writes to: nothing of the copies is left."""
    monkeypatch.setattr(own_files, "PATIENCE", 0.5)
    log, pipe = tmp_path / "log", tmp_path / "pipe"
    log.write_text("before")
    os.mkfifo(pipe)
    files = [OpenFile(path=str(path), bytes=0, writable=True) for path in (log, pipe)]
    with pytest.raises(Conflict, match="pipe cannot be copied"):
        copy_files(files, "x", uid=os.geteuid(), gid=os.getegid(), lock=lock)
    assert sorted(tmp_path.iterdir()) == [log, pipe]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root acts for others")
def test_copies_are_made_with_the_users_rights(tmp_path: Path, lock: IO[bytes]) -> None:
    """Who has put a link to somebody else's file there gets no copy of that."""
    secret = tmp_path / "secret"
    secret.write_text("of root")
    secret.chmod(0o600)
    folder = tmp_path / "theirs"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "log").symlink_to(secret)
    with pytest.raises(Conflict):
        copy_files([OpenFile(path=str(folder / "log"), bytes=7, writable=True)], "x", uid=65534, gid=65534, lock=lock)
    assert os.listdir(folder) == ["log"]


COPY = """
import os, sys
from xmigd.checkpoints.manifest import OpenFile
from xmigd.checkpoints.own_files import copy_files
file = OpenFile(path=sys.argv[1], bytes=0, writable=True)
with open(sys.argv[2], "wb") as lock:
    copy_files([file], "x", uid=os.geteuid(), gid=os.getegid(), lock=lock)
"""


def test_what_a_killed_daemon_was_copying_is_waited_for(tmp_path: Path) -> None:
    """Its lock is held until nothing is copied any more: what the next one removes then stays away."""
    slow, name = tmp_path / "slow", tmp_path / "lock"
    os.mkfifo(slow)
    with subprocess.Popen([sys.executable, "-c", COPY, str(slow), str(name)]) as daemon:
        harness.wait_until((tmp_path / "slow.x").exists, "it is being copied")
        daemon.kill()
    with name.open("rb") as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        slow.open("wb").close()
        fcntl.flock(lock, fcntl.LOCK_EX)


def test_ports() -> None:
    assert parse("8000") == ("127.0.0.1", 8000, 8000)
    assert parse("0.0.0.0:8001:8000") == ("0.0.0.0", 8001, 8000)
    assert parse("[::1]:8001:8000") == ("::1", 8001, 8000)
    assert further("8001:8000", 2) == "127.0.0.1:8003:8000"
    for text in ("", "x", "1:2:3:4", "8000:", "99999", "0"):
        with pytest.raises(Invalid):
            listen([text], uid=0)
    with pytest.raises(Invalid, match="root's"):
        listen(["80"], uid=1000)


def test_a_port_that_is_taken() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Conflict) as caught:
            close(listen([f"{port}:80"], uid=0))
        assert caught.value.code == "port_in_use"


def test_only_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(CommandError, match="only root"):
        check(["true"], {})
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(CommandError, match="socket"):
        check(["true"], {"XMIG_SOCKET": "/dev/shm/xmig/client.sock"})
    with pytest.raises(FileNotFoundError):
        check(["no-such-program"], {"PATH": "/bin"})
