"""Checkpoints of programs that run: made, restored, and compared with a run that nobody disturbed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.criu.test_client_dump import STEPS, criu_or_skip, let_end, start, wait_for_lines
from tests.migration.moves import ended, info, succeeded
from xmigd.checkpoints.manifest import Manifest, contents
from xmigd.client import Refused
from xmigd.demo.node import Node, Program

pytestmark = pytest.mark.criu


@pytest.fixture(scope="module")
def node(native_dir: Path) -> Iterator[Node]:
    with harness.own_node(native_dir, devices="cpu:0,cpu:1", port=-1, criu=criu_or_skip()) as node:
        yield node


@pytest.fixture
def undisturbed(node: Node, native_dir: Path, tmp_path: Path) -> str:
    """What the program writes."""
    output = tmp_path / "undisturbed"
    let_end(output)
    assert start(node, native_dir, output, 0).finish()[0] == 0
    return output.read_text()


def begun(node: Node, native_dir: Path, output: Path, **request: Any) -> Program:
    program = start(node, native_dir, output, 0.02, request=request)
    wait_for_lines(output, STEPS // 4)
    return program


def checkpoint(program: Program, **fields: Any) -> dict[str, Any]:
    node = program.node
    operation = node.client.post("/v1/checkpoints", {"process": info(program)["id"], **fields})
    if fields.get("stop"):
        program.process.wait(timeout=60)  # the daemon waits until its pid is free
    result: dict[str, Any] = succeeded(node, operation)["result"]
    return result


def restored(node: Node, made: dict[str, Any], *devices: str) -> dict[str, Any]:
    path = f"/v1/checkpoints/{made['checkpoint']}:restore"
    result: dict[str, Any] = succeeded(node, node.client.post(path, {"devices": list(devices)}))["result"]
    return result


def test_a_job_is_restored_where_it_was(node: Node, native_dir: Path, tmp_path: Path, undisturbed: str) -> None:
    output = tmp_path / "steps"
    kept = {"memory_quota": 256 << 20, "priority": "best-effort"}
    program = begun(node, native_dir, output, **kept)
    made = checkpoint(program, stop=True)
    assert program.process.wait(timeout=30) == -signal.SIGKILL
    before = len(output.read_text().splitlines())
    assert before < STEPS
    again = restored(node, made, "cpu:1")
    for path in ("", "/sharing"):
        assert kept.items() <= node.client.get(f"/v1/jobs/{again['job']}{path}").items()
    let_end(output)
    wait_for_lines(output, STEPS)
    assert output.read_text() == undisturbed
    job = f"/v1/jobs/{again['job']}"
    harness.wait_until(lambda: node.client.get(job)["state"] == "ended", "the job is over")
    assert node.client.get(job)["exit_code"] == 0


def test_a_job_goes_on_beside_its_checkpoint(node: Node, native_dir: Path, tmp_path: Path, undisturbed: str) -> None:
    """Its end does not concern the checkpoint, which goes on from where the job was then."""
    output = tmp_path / "steps"
    program = begun(node, native_dir, output)
    made = checkpoint(program)
    assert made["standstill_ms"] > 0
    size = next(file.bytes for file in manifest(node, made).programs[0].files if file.path == str(output))
    refused(node, made, "pid_in_use")
    let_end(output)
    assert program.finish()[0] == 0
    assert output.read_text() == undisturbed

    refused(node, made, "file_changed")
    output.with_suffix(".go").unlink()
    os.truncate(output, size)
    assert size < len(undisturbed)
    restored(node, made)
    let_end(output)
    wait_for_lines(output, STEPS)
    assert output.read_text() == undisturbed


def test_what_is_restored_is_a_job_like_others(node: Node, native_dir: Path, tmp_path: Path, undisturbed: str) -> None:
    """Its server is lost, it is moved and suspended, the daemon is another one, and a checkpoint is made of it."""
    output = tmp_path / "steps"
    program = begun(node, native_dir, output)
    made = checkpoint(program, stop=True)
    program.process.wait(timeout=30)
    first = restored(node, made)
    again = node.client.get(f"/v1/processes/{first['process']}")
    node.client.post(f"/v1/jobs/{first['job']}/faults:inject", {"kind": "kill", "point": "record", "sequence": 0})
    recovered = lambda: (now := process(node, first))["recoveries"] == 1 and now["state"] == "running"  # noqa: E731
    harness.wait_until(recovered, "it is recovered")
    path = f"/v1/processes/{first['process']}"
    succeeded(node, node.client.post(f"{path}:suspend", {"to": "host"}))
    node.kill()
    node.start()
    harness.found_again(node)
    assert process(node, first)["state"] == "suspended"
    succeeded(node, node.client.post(f"{path}:resume", {"device": "cpu:1"}))
    operation = node.client.post("/v1/checkpoints", {"job": first["job"], "stop": True})
    second = restored(node, succeeded(node, operation)["result"])
    assert process(node, second)["job_name"] == again["job_name"]
    let_end(output)
    wait_for_lines(output, STEPS)
    assert output.read_text() == undisturbed


def test_what_was_restored_is_known_to_the_next_daemon(
    node: Node, native_dir: Path, tmp_path: Path, undisturbed: str
) -> None:
    """This one dies when the program goes on, and has not written down that it does: it was restored all the same, and
    is not to be restored once more, beside itself."""
    output = tmp_path / "steps"
    program = begun(node, native_dir, output)
    made = checkpoint(program, stop=True)
    program.process.wait(timeout=30)
    operation = node.client.post(f"/v1/checkpoints/{made['checkpoint']}:restore", {"devices": []})
    first = succeeded(node, operation)["result"]
    node.kill()
    with contextlib.closing(sqlite3.connect(node.folder / "xmig.db")) as database, database:
        unfinished = "state = 'running', result = NULL, ended_at = NULL, phase = 'resuming'"
        (changed,) = {database.execute(f"UPDATE operations SET {unfinished} WHERE id = ?", [operation["id"]]).rowcount}
    assert changed == 1
    node.start()
    again = succeeded(node, operation)["result"]
    assert {name: again[name] for name in ("checkpoint", "job", "process", "root")} == {
        name: first[name] for name in ("checkpoint", "job", "process", "root")
    }
    let_end(output)
    wait_for_lines(output, STEPS)
    assert output.read_text() == undisturbed


def process(node: Node, result: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = node.client.get(f"/v1/processes/{result['process']}")
    return found


def test_content_is_kept_once(node: Node, native_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "steps"
    program = begun(node, native_dir, output)
    first, second = checkpoint(program), checkpoint(program)
    assert pieces(node, first) & pieces(node, second)  # its kernels, for one
    node.client.delete(f"/v1/checkpoints/{first['checkpoint']}")
    assert [one["id"] for one in node.client.get("/v1/checkpoints", job=program.job)] == [second["checkpoint"]]
    verified = node.client.post(f"/v1/checkpoints/{second['checkpoint']}:verify", {})
    assert succeeded(node, verified)["result"]["pieces"] > 0
    let_end(output)
    assert program.finish()[0] == 0
    for left in node.client.get("/v1/checkpoints"):
        node.client.delete(f"/v1/checkpoints/{left['id']}")
    assert [path for path in folder(node).rglob("*") if path.is_file()] == []


def test_what_is_damaged_is_not_restored(node: Node, native_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "steps"
    program = begun(node, native_dir, output)
    made = checkpoint(program, stop=True)
    program.process.wait(timeout=30)
    path = max((piece(node, name) for name in pieces(node, made)), key=lambda one: one.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    bodies: dict[str, dict[str, Any]] = {"verify": {}, "restore": {"devices": []}}
    for action, body in bodies.items():
        operation = ended(node, node.client.post(f"/v1/checkpoints/{made['checkpoint']}:{action}", body))
        assert (operation["state"], operation["error"]["code"]) == ("failed", "damaged")
    document = folder(node) / f"{made['checkpoint']}.json"
    document.write_bytes(document.read_bytes().replace(b'"format":1', b'"format":2'))
    refused(node, made, "damaged")


def test_what_cannot_be_dumped_goes_on(node: Node, native_dir: Path, tmp_path: Path, undisturbed: str) -> None:
    """The other end of its socket is ours."""
    output = tmp_path / "steps"
    ours, its = socket.socketpair()
    program = start(node, native_dir, output, 0.02, stdin=its.fileno())
    wait_for_lines(output, STEPS // 4)
    with pytest.raises(Refused) as caught:
        node.client.post("/v1/checkpoints", {"process": info(program)["id"]})
    assert caught.value.code == "not_movable"
    assert "socket" in str(caught.value)
    ours.close()
    its.close()
    let_end(output)
    assert program.finish()[0] == 0
    assert output.read_text() == undisturbed
    assert node.client.get("/v1/checkpoints", job=program.job) == []


def test_criu_fails(node: Node, native_dir: Path, tmp_path: Path, undisturbed: str) -> None:
    """The program goes on, and nothing is left of it."""
    output, broken = tmp_path / "steps", tmp_path / "criu"
    broken.write_text(f'#!/bin/sh\n[ "$1" = dump ] && exit 3\nexec {criu_or_skip()} "$@"\n')
    broken.chmod(0o755)
    with harness.own_node(native_dir, port=-1, criu=broken) as other:
        program = begun(other, native_dir, output)
        operation = ended(other, other.client.post("/v1/checkpoints", {"process": info(program)["id"]}))
        assert (operation["state"], operation["error"]["code"]) == ("failed", "criu_failed")
        let_end(output)
        assert program.finish()[0] == 0
        assert output.read_text() == undisturbed
        assert other.client.get("/v1/checkpoints") == []
        assert [path.name for path in folder(other).iterdir()] == ["objects"] or not any(folder(other).iterdir())


@pytest.mark.parametrize("suspended", [False, True])
def test_somebody_lets_it_go_on_meanwhile(
    node: Node, native_dir: Path, tmp_path: Path, undisturbed: str, suspended: bool
) -> None:
    """Then what was read of it may be of two moments, and is no checkpoint."""
    with slow_dumps(native_dir, tmp_path) as other:
        output = tmp_path / "steps"
        program = begun(other, native_dir, output)
        path = f"/v1/processes/{info(program)['id']}"
        if suspended:
            succeeded(other, other.client.post(f"{path}:suspend", {"to": "host"}))
        operation = other.client.post("/v1/checkpoints", {"process": info(program)["id"]})
        passes(other, operation, "dumping")
        if suspended:
            succeeded(other, other.client.post(f"{path}:resume", {}))
        else:
            harness.wait_until(lambda: dumps(tmp_path), "it is being dumped")
            other.client.post(f"{path}:continue")
        (tmp_path / "go-on").touch()
        assert ended(other, operation)["error"]["code"] == "resumed_meanwhile"
        assert other.client.get("/v1/checkpoints") == []
        let_end(output)
        assert program.finish()[0] == 0
        assert output.read_text() == undisturbed


def test_its_server_dies_meanwhile(node: Node, native_dir: Path, tmp_path: Path, undisturbed: str) -> None:
    """It is recovered, and there is no checkpoint."""
    with slow_dumps(native_dir, tmp_path) as other:
        output = tmp_path / "steps"
        program = begun(other, native_dir, output)
        operation = other.client.post("/v1/checkpoints", {"process": info(program)["id"]})
        harness.wait_until(lambda: dumps(tmp_path), "it is being dumped")
        os.kill(info(program)["server_pid"], signal.SIGKILL)
        harness.wait_until(
            lambda: info(program)["recoveries"] == 1 and info(program)["state"] == "running", "recovered"
        )
        (tmp_path / "go-on").touch()
        assert ended(other, operation)["state"] == "failed"
        assert other.client.get("/v1/checkpoints") == []
        let_end(output)
        assert program.finish()[0] == 0
        assert output.read_text() == undisturbed


def test_it_ends_while_it_is_stored(node: Node, native_dir: Path, tmp_path: Path, undisturbed: str) -> None:
    """Its checkpoint is one all the same."""
    with slow_dumps(native_dir, tmp_path) as other:
        output = tmp_path / "steps"
        program = begun(other, native_dir, output)
        operation = other.client.post("/v1/checkpoints", {"process": info(program)["id"]})
        harness.wait_until(lambda: dumps(tmp_path), "it is being dumped")
        let_end(output)
        (tmp_path / "go-on").touch()
        assert program.finish()[0] == 0
        made = succeeded(other, operation)["result"]
        os.truncate(output, next(f.bytes for f in manifest(other, made).programs[0].files if f.path == str(output)))
        restored(other, made)
        wait_for_lines(output, STEPS)
        assert output.read_text() == undisturbed


def test_there_is_no_place_for_it(node: Node, native_dir: Path, tmp_path: Path, undisturbed: str) -> None:
    """The program goes on."""
    with harness.own_node(native_dir, port=-1, criu=criu_or_skip()) as other:
        folder(other).mkdir()
        (folder(other) / "objects").touch()  # where a folder has to be
        output = tmp_path / "steps"
        program = begun(other, native_dir, output)
        operation = ended(other, other.client.post("/v1/checkpoints", {"process": info(program)["id"]}))
        assert (operation["state"], operation["error"]["code"]) == ("failed", "store_failed")
        assert other.client.get("/v1/checkpoints") == []
        let_end(output)
        assert program.finish()[0] == 0
        assert output.read_text() == undisturbed


def test_it_was_suspended_before(node: Node, native_dir: Path, tmp_path: Path, undisturbed: str) -> None:
    """And still is afterwards."""
    output = tmp_path / "steps"
    program = begun(node, native_dir, output)
    path = f"/v1/processes/{info(program)['id']}"
    succeeded(node, node.client.post(f"{path}:suspend", {"to": "host"}))
    assert checkpoint(program)["standstill_ms"] is None
    assert info(program)["state"] == "suspended"
    succeeded(node, node.client.post(f"{path}:resume", {}))
    let_end(output)
    assert program.finish()[0] == 0
    assert output.read_text() == undisturbed


def test_it_goes_to_another_node(node: Node, native_dir: Path, tmp_path: Path, undisturbed: str) -> None:
    """Another daemon, with another state folder: nothing but the file is common to both."""
    output = tmp_path / "steps"
    program = begun(node, native_dir, output)
    made = checkpoint(program, stop=True)
    program.process.wait(timeout=30)
    exported = succeeded(node, node.client.post(f"/v1/checkpoints/{made['checkpoint']}:export", {}))["result"]
    file = Path(exported["path"])
    assert file.stat().st_size == exported["bytes"]
    with harness.own_node(native_dir, devices="cpu:0,cpu:1", port=-1, criu=criu_or_skip()) as other:
        place = folder(other) / "exported"
        place.mkdir(parents=True)
        broken = bytearray(file.read_bytes())
        broken[len(broken) // 2] ^= 1
        (place / "broken.xmig").write_bytes(broken)
        (place / "whole.xmig").write_bytes(file.read_bytes())
        failed = ended(other, other.client.post("/v1/checkpoints:import", {"file": "broken.xmig"}))
        assert (failed["state"], failed["error"]["code"]) == ("failed", "damaged")
        assert other.client.get("/v1/checkpoints") == []
        taken = succeeded(other, other.client.post("/v1/checkpoints:import", {"file": "whole.xmig"}))["result"]
        assert taken["checkpoint"] == made["checkpoint"]
        again = ended(other, other.client.post("/v1/checkpoints:import", {"file": "whole.xmig"}))
        assert again["error"]["code"] == "exists"
        for name, code in (("none.xmig", "not_found"), ("../x.xmig", "invalid")):
            with pytest.raises(Refused) as caught:
                other.client.post("/v1/checkpoints:import", {"file": name})
            assert caught.value.code == code
        restored(other, made, "cpu:1")
        let_end(output)
        wait_for_lines(output, STEPS)
        assert output.read_text() == undisturbed


def test_bad_requests(node: Node, native_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "steps"
    program = begun(node, native_dir, output)
    made = checkpoint(program, stop=True)
    program.process.wait(timeout=30)
    for body, code in (
        ({"devices": ["cpu:7"]}, "no_such_device"), ({"devices": ["cpu:0", "cpu:1"]}, "invalid"),
    ):  # fmt: skip
        with pytest.raises(Refused) as caught:
            node.client.post(f"/v1/checkpoints/{made['checkpoint']}:restore", body)
        assert caught.value.code == code
    output.unlink()
    refused(node, made, "file_missing")
    for method, path in (("get", "/v1/checkpoints/nothing"), ("delete", "/v1/checkpoints/nothing")):
        with pytest.raises(Refused) as caught:
            getattr(node.client, method)(path)
        assert caught.value.code == "not_found"


KILLED, STOPPED = Node.kill, Node.stop


@pytest.mark.parametrize(
    ("phase", "leaves"),
    [("pausing", KILLED), ("dumping", KILLED), ("dumping", STOPPED), ("copying", KILLED), ("storing", STOPPED)],
)
def test_the_daemon_leaves_while_one_is_made(
    node: Node,
    native_dir: Path,
    tmp_path: Path,
    undisturbed: str,
    phase: str,
    leaves: Callable[[Node], None],
) -> None:
    output = tmp_path / "steps"
    program = begun(node, native_dir, output)
    operation = node.client.post("/v1/checkpoints", {"process": info(program)["id"]})
    passes(node, operation, phase)
    leaves(node)
    node.start()
    harness.found_again(node)
    assert ended(node, operation)["state"] in ("failed", "succeeded")
    let_end(output)
    assert program.finish()[0] == 0
    assert output.read_text() == undisturbed


@pytest.mark.parametrize(
    ("phase", "leaves"),
    [("reading", KILLED), ("restoring", KILLED), ("restoring", STOPPED), ("resuming", STOPPED), ("resuming", KILLED)],
)
def test_the_daemon_leaves_while_one_is_restored(
    node: Node,
    native_dir: Path,
    tmp_path: Path,
    undisturbed: str,
    phase: str,
    leaves: Callable[[Node], None],
) -> None:
    """What is restored by half is ended, and restored again."""
    output = tmp_path / "steps"
    program = begun(node, native_dir, output)
    made = checkpoint(program, stop=True)
    program.process.wait(timeout=30)
    before = output.read_text()
    operation = node.client.post(f"/v1/checkpoints/{made['checkpoint']}:restore", {"devices": []})
    passes(node, operation, phase)
    leaves(node)
    node.start()
    harness.found_again(node)
    if ended(node, operation)["state"] == "failed":
        assert output.read_text() == before
        restored(node, made)
    let_end(output)
    wait_for_lines(output, STEPS)
    assert output.read_text() == undisturbed


# --- what they share --------------------------------------------------------------------------------------------------


def passes(node: Node, operation: dict[str, Any], phase: str) -> None:
    """It is in this phase, or was."""

    def does() -> bool:
        now = node.client.get(f"/v1/operations/{operation['id']}")
        return now["phase"] == phase or now["state"] not in ("pending", "running")

    harness.wait_until(does, phase, closely=True)


@contextlib.contextmanager
def slow_dumps(native_dir: Path, folder: Path) -> Iterator[Node]:
    """A node whose CRIU begins no dump before there is a file ``go-on``."""
    slow = folder / "criu"
    slow.write_text(
        f'#!/bin/sh\nif [ "$1" = dump ]; then touch {folder}/dumps; '
        f"while [ ! -e {folder}/go-on ]; do sleep 0.01; done; fi\n"
        f'exec {criu_or_skip()} "$@"\n'
    )
    slow.chmod(0o755)
    with harness.own_node(native_dir, port=-1, criu=slow) as node:
        yield node


def dumps(folder: Path) -> bool:
    return (folder / "dumps").exists()


def folder(node: Node) -> Path:
    return node.folder / "checkpoints"


def manifest(node: Node, made: dict[str, Any]) -> Manifest:
    return Manifest.model_validate_json((folder(node) / f"{made['checkpoint']}.json").read_bytes())


def pieces(node: Node, made: dict[str, Any]) -> set[str]:
    """The hashes of all its content."""
    return {chunk.hash for content in contents(manifest(node, made)) for chunk in content.chunks}


def piece(node: Node, name: str) -> Path:
    return folder(node) / "objects" / name[:2] / name


def refused(node: Node, made: dict[str, Any], code: str) -> None:
    with pytest.raises(Refused) as caught:
        node.client.post(f"/v1/checkpoints/{made['checkpoint']}:restore", {"devices": []})
    assert caught.value.code == code
