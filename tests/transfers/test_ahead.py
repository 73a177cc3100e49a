"""What has come of a job is on the target's device before it stops: by a server that starts while it still runs, and of
which nothing depends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import wait_until
from tests.migration.moves import ended, succeeded
from tests.namespaces import needs_networks
from tests.transfers.nodes import TransferNode, pair, wait_for_lines
from xmigd.checkpoints.content import PIECE
from xmigd.checkpoints.manifest import Chunk, Content, Manifest, Memory, Program
from xmigd.errors import Invalid
from xmigd.native import SERVER
from xmigd.transfers.arrivals import _check_announced
from xmigd.transfers.departures import _figures
from xmigd.transfers.needs import DeviceNeed, Needs, ProgramNeed

pytestmark = [pytest.mark.criu, needs_networks]

LARGE = Path(__file__).with_name("large.py")
MIB = 64
SLOW = 20_000  # kbit/s: a round with what changes meanwhile takes seconds
CHANGES = 32 << 20  # bytes, at most, that change in a round


@pytest.fixture(scope="module")
def nodes(native_dir: Path) -> Iterator[list[TransferNode]]:
    with pair(native_dir) as both:
        yield both


@contextlib.contextmanager
def program(nodes: list[TransferNode], native_dir: Path, folder: Path) -> Iterator[Path]:
    """It runs on the first node, and in the end it has seen nothing but what it should."""
    output = folder / "steps"
    command: list[str | Path] = [sys.executable, LARGE, output, str(MIB), "0.01"]
    kernels = str(native_dir / "xmig_kernels.so")
    nodes[0].begin(command, output.with_suffix(".out"), KERNELS=kernels)
    wait_for_lines(output, 10)
    yield output
    wait_for_lines(output, len(output.read_text().splitlines()) + 5)
    output.with_suffix(".stop").touch()
    wait_until(lambda: not any(node.lives() for node in nodes), "the program has ended")
    lines = output.read_text().splitlines()
    granules = [number + 0.5 for number in range(MIB // 2)]
    for step, line in enumerate(lines):
        granules[step % 8] = 1000.0 + step
        seen = [granules[step % 8], granules[step * 7 % len(granules)], granules[step * 7 % len(granules)]]
        assert line.split() == [str(step), *(value.hex() for value in seen)]


def ahead_of(node: TransferNode) -> list[int]:
    """Servers of a node that has no processes yet."""
    found, there = [], os.readlink(node.namespaces[1])
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.readlink(entry / "exe").endswith(SERVER):
                found += [int(entry.name)] if os.readlink(entry / "ns" / "pid") == there else []
    return found


@contextlib.contextmanager
def under_way(nodes: list[TransferNode]) -> Iterator[tuple[dict[str, Any], int]]:
    """A move from the first node to the second one, in the rounds after the first: the operation, and the server that
    is there before its process."""
    one, two = nodes
    operation = one.move(one.lives()[0]["job_id"], "two")
    wait_until(lambda: bool(ahead_of(two)), "a server works ahead", closely=True)
    two.network.slow(SLOW)
    try:
        yield operation, ahead_of(two)[0]
    finally:
        two.network.fast()


def test_only_what_changed_is_copied_at_last(nodes: list[TransferNode], native_dir: Path, tmp_path: Path) -> None:
    with program(nodes, native_dir, tmp_path) as output:
        one, two = nodes
        succeeded(one, one.move(one.lives()[0]["job_id"], "two"))
        (there, here) = (node.transfers()[0] for node in (two, one))
        for record in (there, here):
            assert record["content_bytes"] == MIB << 20
            assert record["content_bytes"] - CHANGES <= record["ahead_bytes"] <= record["content_bytes"]
        assert set(here["took"]) == {
            "pause_ms", "dump_ms", "copy_ms", "store_ms", "send_ms", "read_ms", "criu_ms", "server_ms", "prepare_ms",
        }  # fmt: skip
        assert sum(here["took"][name] for name in ("pause_ms", "send_ms", "prepare_ms")) <= here["standstill_ms"]
        assert "criu" in one.ctl("transfer", "show", here["id"])
        wait_for_lines(output, len(output.read_text().splitlines()) + 5)
        # Once more, with servers that have what came as it came.
        succeeded(two, two.move(two.lives()[0]["job_id"], "one"))
        assert two.transfers()[0]["ahead_bytes"] >= (MIB << 20) - CHANGES


def test_the_server_ahead_is_killed(nodes: list[TransferNode], native_dir: Path, tmp_path: Path) -> None:
    """The next round has another one; without a next one the process resumes with any."""
    with program(nodes, native_dir, tmp_path):
        one, two = nodes
        with under_way(nodes) as (operation, server):
            os.kill(server, signal.SIGKILL)
            wait_until(lambda: server not in ahead_of(two), "it is gone")
        succeeded(one, operation)
        assert two.lives()[0]["state"] == "running"
        assert two.transfers()[0]["content_bytes"] == MIB << 20
        succeeded(two, two.move(two.lives()[0]["job_id"], "one"))


def memory_of(pid: int) -> list[str]:
    """That this daemon has, beside the index of its descriptors."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            name = os.readlink(entry)
            found += [name] if "memfd:" in name and "xmig-index" not in name else []
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_cancelled(nodes: list[TransferNode], native_dir: Path, tmp_path: Path) -> None:
    """No server stays, and no memory."""
    one, two = nodes
    with program(nodes, native_dir, tmp_path):
        with under_way(nodes) as (operation, server):
            daemon = parent(server)
            assert memory_of(daemon)
            one.client.delete(f"/v1/operations/{operation['id']}")
            assert ended(one, operation)["state"] == "cancelled"
        wait_until(lambda: not ahead_of(two), "the server has ended")
        wait_until(lambda: not memory_of(daemon), "its memory is given back")
        assert one.lives()[0]["state"] == "running"


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_daemon_is_killed(nodes: list[TransferNode], native_dir: Path, tmp_path: Path, side: str) -> None:
    with program(nodes, native_dir, tmp_path):
        one, two = nodes
        killed = one if side == "source" else two
        with under_way(nodes) as (operation, _):
            killed.kill()
            if side == "target":
                wait_until(lambda: not ahead_of(two), "a server is of no use without its daemon")
                assert ended(one, operation)["state"] == "failed"
        killed.start()
        wait_until(lambda: two.transfers()[0]["state"] == "dropped", "the target knows")
        wait_until(lambda: not ahead_of(two), "the server has ended")
        wait_until(lambda: bool(one.lives()) and one.lives()[0]["state"] == "running", "it goes on where it was")
        assert not two.lives()


def test_no_room(native_dir: Path, tmp_path: Path) -> None:
    """The device had room when the move began, and has none when the server takes it: the program does not stop."""
    native = tmp_path / "native"
    shutil.copytree(native_dir, native)
    real = native / "real"
    real.mkdir()
    server = (native / SERVER).rename(real / SERVER)
    (native / SERVER).write_text(f'#!/bin/bash\nexec {server} "${{@/{1 << 28}/{32 << 20}}}"\n')
    (native / SERVER).chmod(0o755)
    with pair(native_dir, of_each={"two": {"native_dir": native}}) as nodes, program(nodes, native_dir, tmp_path):
        one, two = nodes
        failed = ended(one, one.move(one.lives()[0]["job_id"], "two"))
        assert failed["state"] == "failed"
        assert "there is no memory for the 6" in failed["error"]["detail"]
        assert one.transfers()[0]["standstill_ms"] is None
        assert two.transfers()[0]["state"] == "dropped"


def test_a_peer_may_not_have_more_than_it_has_announced() -> None:
    """What is more is not brought ahead."""
    chunks = tuple(Chunk(at=at * PIECE, bytes=PIECE, hash=f"{at:064x}") for at in range(8))
    content = Content(bytes=8 * PIECE, chunks=chunks)
    memory = Memory(id=1, kind="shadow", ordinal=0, message="{}", content=content)
    program = Program.model_construct(memory=(memory,))
    need = ProgramNeed(device="cpu:0", devices=(DeviceNeed(kind="cpu", bytes=7 * PIECE),))
    announced = Needs.model_construct(programs=(need,), program_bytes=PIECE)
    _check_announced(Manifest.model_construct(programs=(program,)), announced)
    with pytest.raises(Invalid) as caught:
        _check_announced(Manifest.model_construct(programs=(program, program)), announced)
    assert caught.value.code == "peer_lies"


def test_figures_of_a_peer_are_numbers_or_nothing() -> None:
    right = {"took": {"criu_ms": 2.0}, "content_bytes": 3, "ahead_bytes": 1, "state": "prepared"}
    assert _figures(right).model_dump() == {"took": {"criu_ms": 2.0}, "content_bytes": 3, "ahead_bytes": 1}
    for wrong in ({"took": {"x": 1.0}}, {"took": {"criu_ms": -1}}, {"took": 3}, {"ahead_bytes": 1 << 60}):
        assert _figures(right | wrong).model_dump() == {"took": {}, "content_bytes": None, "ahead_bytes": None}
