"""Checkpoints that nobody requests: by the clock, before a drain, and when they fail."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.criu.disks import SmallDisk, small_disk
from tests.criu.test_client_dump import STEPS, criu_or_skip, let_end, start, wait_for_lines
from tests.migration.moves import ended, info, succeeded
from xmigd.client import Refused
from xmigd.demo.node import Node, Program

__all__ = ["small_disk"]
pytestmark = pytest.mark.criu
OFTEN = 0.02  # minutes


@pytest.fixture
def node(native_dir: Path) -> Iterator[Node]:
    with harness.own_node(native_dir, devices="cpu:0,cpu:1", port=-1, criu=criu_or_skip()) as node:
        yield node


def begun(node: Node, native_dir: Path, output: Path) -> Program:
    program = start(node, native_dir, output, 0.02)
    wait_for_lines(output, STEPS // 4)
    return program


def path(program: Program) -> str:
    return f"/v1/jobs/{program.job}/checkpoint-policy"


def made(node: Node) -> list[str]:
    """The newest first."""
    return [each["id"] for each in node.client.get("/v1/checkpoints")]


def events(node: Node, kind: str) -> list[dict[str, Any]]:
    return [each["data"] for each in node.client.get("/v1/events", limit=1000) if each["type"] == kind]


def end_well(program: Program, output: Path, native_dir: Path) -> None:
    """What it wrote is what an undisturbed one writes."""
    undisturbed = output.with_name("undisturbed")
    let_end(undisturbed)
    let_end(output)
    assert program.finish()[0] == 0
    assert start(program.node, native_dir, undisturbed, 0).finish()[0] == 0
    assert output.read_text() == undisturbed.read_text()


def test_by_the_clock(node: Node, native_dir: Path, tmp_path: Path) -> None:
    """The newest two are kept, a manual one is not touched, and the policy outlives the daemon."""
    output = tmp_path / "steps"
    program = begun(node, native_dir, output)
    operation = succeeded(node, node.client.post("/v1/checkpoints", {"job": program.job}))
    manual = operation["result"]["checkpoint"]
    policy = node.client.put(path(program), {"every_minutes": OFTEN, "keep": 2, "before_drain": False}, "*")
    assert (policy["source"], policy["version"], policy["failures"]) == ("job", 1, 0)
    seen: set[str] = set()

    def so_many(count: int, left: int = 0) -> bool:
        now = made(node)
        assert manual in now
        assert len(now) <= 1 + 2 + 1 + left, "an older one goes when a newer one is whole"
        seen.update(now)
        return len(seen) > count

    harness.wait_until(lambda: so_many(3), "checkpoints by the clock", 120)
    harness.wait_until(lambda: len(made(node)) == 3, "older ones are removed")
    by_policy = {each["id"]: each["by_policy"] for each in node.client.get("/v1/checkpoints")}
    assert not by_policy.pop(manual)
    assert all(by_policy.values())
    node.kill()
    node.start()
    harness.found_again(node)
    assert node.client.get(path(program))["every_minutes"] == OFTEN
    before = len(seen)
    harness.wait_until(lambda: so_many(before + 1, left=1), "another one after the restart", 120)
    _, tag = node.client.get_tagged(path(program))
    node.client.delete(path(program), tag)
    assert node.client.get(path(program))["source"] == "settings"
    harness.wait_until(lambda: quiet(node), "the last one is over")
    assert events(node, "checkpoint.failed") == []
    end_well(program, output, native_dir)


def quiet(node: Node) -> bool:
    return all(each["state"] not in ("pending", "running") for each in node.client.get("/v1/operations"))


def test_none_fails_silently(node: Node, native_dir: Path, tmp_path: Path) -> None:
    output, criu = tmp_path / "steps", tmp_path / "criu"
    criu.write_text(f'#!/bin/sh\n[ "$1" = dump ] && exit 3\nexec {criu_or_skip()} "$@"\n')
    criu.chmod(0o755)
    with harness.own_node(native_dir, port=-1, criu=criu, checkpoint_every=OFTEN) as other:
        program = begun(other, native_dir, output)
        harness.wait_until(lambda: len(events(other, "checkpoint.failed")) > 1, "it fails, and is tried again", 120)
        failed = events(other, "checkpoint.failed")
        assert {each["code"] for each in failed} == {"criu_failed"}
        assert {each["failures"] for each in failed} == set(range(1, len(failed) + 1))
        policy = other.client.get(path(program))
        assert (policy["source"], policy["keep"]) == ("settings", 3)
        assert policy["failures"] >= 2
        assert "CRIU" in policy["last_failure"]
        other.client.put(path(program), {"every_minutes": None}, "*")  # of its own: none
        harness.wait_until(lambda: quiet(other), "the last one is over")
        assert other.client.get("/v1/checkpoints") == []
        pieces = [each for each in (other.folder / "checkpoints").rglob("*") if each.is_file()]
        assert pieces == [], "what a failed one has stored is removed"
        end_well(program, output, native_dir)


def test_before_a_drain(node: Node, native_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "steps"
    program = begun(node, native_dir, output)
    node.client.put(path(program), {"before_drain": True}, "*")
    device = info(program)["device"]
    # A device that takes no new process keeps the one that stands still for a checkpoint.
    node.client.patch(f"/v1/devices/{device}", {"cordoned": True}, "*")
    harness.wait_until(lambda: info(program)["standby"] == "warm", "a standby")
    assert ended(node, node.client.post(f"/v1/devices/{device}:drain", {}))["state"] == "succeeded"
    (checkpoint,) = node.client.get("/v1/checkpoints")
    assert (checkpoint["job_id"], checkpoint["device"], checkpoint["by_policy"]) == (program.job, device, True)
    assert info(program)["device"] != device
    end_well(program, output, native_dir)


def test_there_is_no_room(node: Node, native_dir: Path, tmp_path: Path) -> None:
    """It is refused before the job stands still, and what is missing is a number."""
    output = tmp_path / "steps"
    cases = (({"checkpoint_mib": 1}, "checkpoints_full"), ({"checkpoint_free_mib": 1 << 40}, "file_system_full"))
    for settings, code in cases:
        with harness.own_node(native_dir, port=-1, criu=criu_or_skip(), **settings) as other:
            program = begun(other, native_dir, output)
            with pytest.raises(Refused) as caught:
                other.client.post("/v1/checkpoints", {"job": program.job})
            assert caught.value.code == code
            assert "missing" in str(caught.value)
            assert other.client.get("/v1/migrations") == [], "it was not suspended"
            let_end(output)
            assert program.finish()[0] == 0
            output.with_suffix(".go").unlink()
            output.unlink()


def test_the_disk_becomes_full_in_the_middle(
    node: Node, native_dir: Path, tmp_path: Path, small_disk: SmallDisk
) -> None:
    """The job goes on, and what was stored is removed. Nothing else stands on that disk."""
    output, criu, disk = tmp_path / "steps", tmp_path / "criu", small_disk(200)
    criu.write_text(
        f'#!/bin/sh\n{criu_or_skip()} "$@" || exit\n'
        f'if [ "$1" = dump ]; then cat /dev/zero > {disk}/other 2> /dev/null; fi; exit 0\n'
    )
    criu.chmod(0o755)
    with harness.own_node(native_dir, port=-1, criu=criu, checkpoint_free_mib=0) as other:
        (other.folder / "checkpoints").symlink_to(disk)
        program = begun(other, native_dir, output)
        operation = ended(other, other.client.post("/v1/checkpoints", {"job": program.job}))
        assert (operation["state"], operation["error"]["code"]) == ("failed", "store_failed")
        assert other.client.get("/v1/checkpoints") == []
        assert [each.name for each in disk.rglob("*") if each.is_file()] == ["other"]
        end_well(program, output, native_dir)


def where(node: Node) -> dict[str, list[str]]:
    return {each["id"]: each["places"] for each in node.client.get("/v1/checkpoints")}


def test_what_is_on_the_disk_stays_until_a_newer_one_is(
    native_dir: Path, tmp_path: Path, small_disk: SmallDisk
) -> None:
    """In host memory a checkpoint does not outlive the machine: it takes nobody's place."""
    output = tmp_path / "steps"
    settings = {"criu": criu_or_skip(), "checkpoint_memory_mib": 1024, "checkpoint_memory_dir": tmp_path / "memory"}
    with harness.own_node(native_dir, port=-1, **settings) as node:
        program = begun(node, native_dir, output)
        disk = small_disk(64)
        (disk / "objects").mkdir(mode=0o700)
        (node.folder / "checkpoints").mkdir(mode=0o700, exist_ok=True)
        (node.folder / "checkpoints" / "objects").symlink_to(disk / "objects")
        often, never = ({"every_minutes": every, "keep": 1, "before_drain": False} for every in (OFTEN, 1000.0))
        node.client.put(path(program), often, "*")
        harness.wait_until(lambda: any("disk" in places for places in where(node).values()), "one is on the disk")
        node.client.put(path(program), never, "*")
        settled = lambda: quiet(node) and all("disk" in places for places in where(node).values())  # noqa: E731
        harness.wait_until(settled, "all are on the disk")
        before, filler = where(node).keys(), disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))

        def in_memory_only() -> int:
            now = where(node)
            assert before & now.keys(), "the newest that is on the disk stays"
            return sum("disk" not in places for places in now.values())

        node.client.put(path(program), often, "*")
        harness.wait_until(lambda: in_memory_only() > 2, "there are some in host memory only", 120)
        filler.unlink()
        harness.wait_until(lambda: not before & where(node).keys(), "newer ones are on the disk", 120)
        harness.wait_until(lambda: len(where(node)) <= 3, "and only the newest are left", 120)
        node.client.put(path(program), never, "*")
        harness.wait_until(lambda: quiet(node), "the last one is over")
        end_well(program, output, native_dir)


def test_the_clock_is_set_back(node: Node, native_dir: Path, tmp_path: Path) -> None:
    """By a day: checkpoints that are made then are the newest nevertheless."""
    output = tmp_path / "steps"
    program = begun(node, native_dir, output)
    policy = {"every_minutes": OFTEN, "keep": 1, "before_drain": False}
    node.client.put(path(program), policy, "*")
    harness.wait_until(lambda: bool(made(node)), "a checkpoint by the clock")
    node.client.put(path(program), policy | {"every_minutes": 1000.0}, "*")
    harness.wait_until(lambda: quiet(node), "the last one is over")
    before = set(made(node))
    node.kill()
    with contextlib.closing(sqlite3.connect(node.environment["XMIG_DATABASE"])) as database, database:
        database.execute("UPDATE checkpoints SET created_at = created_at + 86400")
    node.start()
    harness.found_again(node)
    node.client.put(path(program), policy, "*")
    harness.wait_until(lambda: not before & set(made(node)), "a newer one takes its place", 60)
    assert made(node)
    end_well(program, output, native_dir)
