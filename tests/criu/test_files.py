"""What changes between the moment in which something is looked at and the one in which CRIU does its work.

CRIU opens files by their names, as root. So the user of a program could have it open what only root may read or write.
And a program goes on until it is dumped: it may connect to others, or be joined by another one, after it was looked at.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.criu.stopping import stop_at_checkpoint
from tests.criu.test_checkpoints import checkpoint
from tests.criu.test_client_dump import ROOT, STEPS, criu_or_skip, let_end, wait_for_lines
from tests.migration.moves import ended
from xmigd.client import Refused
from xmigd.demo.node import Node, Program

pytestmark = pytest.mark.criu
SECRET = "what the program never had open\n"


@pytest.fixture(scope="module")
def node(native_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Its CRIU does first what `before` has, in the moment after the daemon has looked at everything."""
    criu = tmp_path_factory.mktemp("criu") / "criu"
    criu.write_text(f'#!/bin/sh\n[ ! -e "{criu}-$1" ] || . "{criu}-$1"\nexec "{criu_or_skip()}" "$@"\n')
    criu.chmod(0o755)
    with harness.own_node(native_dir, devices="cpu:0", port=-1, criu=criu) as node:
        yield node


@pytest.fixture
def before(node: Node) -> Iterator[Callable[[str, str], None]]:
    """Before CRIU does this, a shell does that."""
    criu = Path(node.environment["XMIG_CRIU"])
    scripts: list[Path] = []

    def add(action: str, script: str) -> None:
        scripts.append(criu.with_name(f"criu-{action}"))
        scripts[-1].write_text(script)

    yield add
    for path in scripts:
        path.unlink()


def begun(node: Node, native_dir: Path, output: Path, **variables: str) -> Program:
    command = [sys.executable, str(ROOT / "tests" / "criu" / "client.py"), str(output), str(STEPS), "0.02"]
    program = node.program(
        command, environment=variables | {"KERNELS": str(native_dir / "xmig_kernels.so")}, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wait_for_lines(output, STEPS // 4)
    return program


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The program's file."""
    return written(tmp_path / "own" / "log", "x" * len(SECRET))


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """Another one, as long, and with the same rights."""
    return written(tmp_path / "secret" / "log", SECRET)


def written(path: Path, content: str) -> Path:
    path.parent.mkdir()
    path.write_text(content)
    path.chmod(0o600)
    return path


def link_file(own: Path, secret: Path) -> None:
    own.unlink()
    own.symlink_to(secret)


def link_folder(own: Path, secret: Path) -> None:
    own.parent.rename(own.parent.with_name("before"))
    own.parent.symlink_to(secret.parent)


@pytest.mark.parametrize(
    ("exchange", "mapped"), [(link_file, False), (link_folder, False), (link_file, True)],
    ids=["file", "folder", "mapped"],
)  # fmt: skip
def test_a_link_leads_elsewhere(
    node: Node, native_dir: Path, tmp_path: Path, own: Path, secret: Path, exchange: Callable[[Path, Path], None],
    mapped: bool,
) -> None:  # fmt: skip
    program = begun(node, native_dir, tmp_path / "steps", ALSO=str(own), **({"MAPPED": "1"} if mapped else {}))
    made = checkpoint(program, stop=True)
    exchange(own, secret)
    assert outcome(node, made) == "file_changed"
    assert not [one for one in node.client.get("/v1/processes") if one["state"] != "ended"]


def test_one_is_exchanged_while_it_is_restored(
    node: Node, native_dir: Path, tmp_path: Path, own: Path, secret: Path, before: Callable[[str, str], None]
) -> None:
    program = begun(node, native_dir, tmp_path / "steps", ALSO=str(own))
    made = checkpoint(program, stop=True)
    before("restore", f"ln -sf '{secret}' '{own}'\n")
    assert outcome(node, made) == "file_changed"
    assert own.readlink() == secret
    assert not [one for one in node.client.get("/v1/processes") if one["state"] != "ended"]


@harness.needs_root
def test_another_users_file_is_there(node: Node, native_dir: Path, tmp_path: Path, own: Path, secret: Path) -> None:
    program = begun(node, native_dir, tmp_path / "steps", ALSO=str(own))
    made = checkpoint(program, stop=True)
    secret.rename(own)
    os.chown(own, 60_010, 60_010)
    assert outcome(node, made) == "file_changed"


def test_copies_go_with_a_daemon_that_is_killed(
    node: Node, native_dir: Path, tmp_path: Path, before: Callable[[str, str], None]
) -> None:
    """In the middle of a restoration."""
    output = tmp_path / "steps"
    made = stop_at_checkpoint(begun(node, native_dir, output))
    before("restore", f"touch {tmp_path}/restores; while [ ! -e {tmp_path}/go-on ]; do sleep 0.01; done; exit 1")
    operation = node.client.post(f"/v1/checkpoints/{made}:restore", {"devices": [], "own_files": True})
    harness.wait_until((tmp_path / "restores").exists, "it is being restored")
    copy = output.with_name(f"steps.{operation['id'][:12]}")
    assert copy.exists()
    node.kill()
    (tmp_path / "go-on").touch()
    node.start()
    assert ended(node, operation)["state"] == "failed"
    assert not copy.exists()
    assert output.exists()


def does(output: Path, script: str) -> str:
    """For a shell, which waits until the program has done that."""
    script_file, done = output.with_suffix(".does"), output.with_suffix(".done")
    output.with_suffix(".script").write_text(script)
    return f"mv '{output.with_suffix('.script')}' '{script_file}'\nwhile [ ! -e '{done}' ]; do sleep 0.01; done\n"


def test_it_connects_while_it_is_paused(
    node: Node, native_dir: Path, tmp_path: Path, before: Callable[[str, str], None]
) -> None:
    output = tmp_path / "steps"
    program = begun(node, native_dir, output, DOES="1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        before("dump", does(output, f"import socket\nobjects.append(socket.create_connection({address}))\n"))
        operation = ended(node, node.client.post("/v1/checkpoints", {"job": program.job, "stop": True}))
        assert (operation["error"] or {}).get("code") == "not_movable", operation
    assert node.client.get("/v1/checkpoints", job=program.job) == []
    let_end(output)
    assert program.finish()[0] == 0


def test_another_process_begins_while_it_is_paused(
    node: Node, native_dir: Path, tmp_path: Path, before: Callable[[str, str], None]
) -> None:
    """Its device memory is in no snapshot that is written down."""
    output, joins = tmp_path / "steps", tmp_path / "joins"
    program = begun(node, native_dir, output, DOES="1")
    before("dump", does(output, JOINS.format(output=str(joins))))
    operation = ended(node, node.client.post("/v1/checkpoints", {"job": program.job, "stop": True}))
    assert (operation["error"] or {}).get("code") == "job_changed", operation
    assert node.client.get("/v1/checkpoints", job=program.job) == []
    for each in (joins, output):
        let_end(each)
    assert program.finish()[0] == 0


JOINS = """
import os, subprocess, sys, time
words = [sys.executable, sys.argv[0], {output!r}, *sys.argv[2:]]
environment = dict(os.environ)
del environment["DOES"]
objects.append(subprocess.Popen(words, env=environment))
while not os.path.exists({output!r}) or not open({output!r}).read():
    time.sleep(0.01)
"""


def outcome(node: Node, made: dict[str, Any]) -> str | None:
    """Why it is not restored."""
    path = f"/v1/checkpoints/{made['checkpoint']}:restore"
    try:
        operation = ended(node, node.client.post(path, {"devices": []}))
    except Refused as error:
        return error.code
    code: str | None = (operation["error"] or {}).get("code")
    return code
