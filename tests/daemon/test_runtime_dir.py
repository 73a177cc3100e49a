"""Nobody else can put another runtime directory, or another socket, in the place of the daemon's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import harness

from .conftest import MakeNode
from .test_start import start_in_vain

NOBODY = 65534


def theirs(run: Path) -> None:
    run.mkdir()
    os.chown(run, NOBODY, NOBODY)


def mode(bits: int) -> Callable[[Path], None]:
    def make(run: Path) -> None:
        run.mkdir()
        run.chmod(bits)

    return make


def their_link(run: Path) -> None:
    (run.parent / "elsewhere").mkdir()
    run.symlink_to("elsewhere")
    os.lchown(run, NOBODY, NOBODY)


def their_link_on_the_way(run: Path) -> None:
    (run.parent.parent / "real").mkdir()
    run.parent.rmdir()
    run.parent.symlink_to("real")
    os.lchown(run.parent, NOBODY, NOBODY)


def our_link_to_theirs(run: Path) -> None:
    theirs(run.parent / "elsewhere")
    run.symlink_to(run.parent / "elsewhere")


def their_parent(run: Path) -> None:
    os.chown(run.parent, NOBODY, NOBODY)


def open_parent(run: Path) -> None:
    run.parent.chmod(0o777)


@harness.needs_root
@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (theirs, "belongs to nobody"),
        (mode(0o775), "others may write in the runtime directory"),
        (mode(0o757), "others may write in the runtime directory"),
        (mode(0o1777), "others may write in the runtime directory"),
        (their_link, "a symbolic link of nobody"),
        (their_link_on_the_way, "a symbolic link of nobody"),
        (our_link_to_theirs, "belongs to nobody"),
        (their_parent, "which belongs to nobody"),
        (open_parent, "where everybody may put another in its place (mode 0777)"),
    ],
)
def test_what_others_could_replace_is_refused(make_node: MakeNode, prepare: Callable[[Path], None], why: str) -> None:
    node = make_node()
    run = node.folder / "parent" / "run"
    run.parent.mkdir()
    prepare(run)
    node.environment["XMIG_RUNTIME_DIR"] = str(run)
    line = start_in_vain(node)
    assert why in line
    assert "XMIG_RUNTIME_DIR" in line
    assert not (run / "api.sock").exists()
    assert not (run / "xmigd.lock").exists()


@harness.needs_root
def test_a_daemon_of_a_user_refuses_what_is_not_the_users(make_node: MakeNode, native_dir: Path) -> None:
    node = make_node()
    node.runtime_dir.mkdir()
    code = (
        "import os, sys, xmigd.daemon, xmigd.main\n"
        f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY}); sys.argv[1:] = []\n"
        "xmigd.main.main()\n"
    )
    # Not the peer's: pytest's own folders are closed to others.
    environment = node.environment | {"HOME": "/tmp", "XMIG_NATIVE_DIR": str(native_dir)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd="/", capture_output=True, text=True,
                          timeout=60, check=False)  # fmt: skip
    assert done.returncode == 1, done.stderr
    reported = done.stderr.splitlines()[-1]
    assert reported.startswith(f"xmigd: the runtime directory {node.runtime_dir} belongs to root"), done.stderr
    assert "chown it to nobody" in reported


def test_what_is_safe_is_taken(make_node: MakeNode) -> None:
    """A parent for everybody, as /tmp is, and a link of our own."""
    node = make_node()
    parent = node.folder / "parent"
    (parent / "real").mkdir(parents=True, mode=0o755)
    parent.chmod(0o1777)
    (parent / "run").symlink_to("real")
    node.runtime_dir = parent / "run"
    node.environment["XMIG_RUNTIME_DIR"] = str(node.runtime_dir)
    node.start()
    assert node.kill(signal.SIGTERM) == 0
