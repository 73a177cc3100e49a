"""What a peer must not do. It has its key, and is known, and sends what it should not."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import tempfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.criu.test_client_dump import criu_or_skip
from tests.harness import wait_until
from tests.peers.nodes import PeerNode, acquainted
from xmigd import __version__
from xmigd.checkpoints.content import HEADER, MAGIC, RESERVED
from xmigd.errors import Unavailable
from xmigd.native import SERVER, read_layout
from xmigd.peers.certificates import FILE, Identity, client_context, open_identity, server_name
from xmigd.transfers.wire import BULK, LONGEST, LONGEST_PAYLOAD, PREFIX, Line
from xmigd.transfers.wire import HEADER as FRAME

Connect = Callable[[str], Line]


@pytest.fixture(scope="module")
def nodes(native_dir: Path) -> Iterator[list[PeerNode]]:
    """The second one takes programs from the first, and the first from nobody."""
    criu = criu_or_skip()
    with ExitStack() as stack:
        made = []
        for name, allowed in (("friend", ""), ("victim", "friend")):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="xmig-")))
            node = PeerNode(folder, name, native_dir, programs_from=allowed, criu=criu)
            made.append(stack.enter_context(node))
        acquainted(*made)
        yield made


@pytest.fixture
def connect(nodes: list[PeerNode]) -> Iterator[Connect]:
    """As this node, to the other one."""
    open_lines: list[Line] = []

    def line(name: str) -> Line:
        here, there = sorted(nodes, key=lambda node: node.name != name)
        context = client_context(open_identity(here.folder), open_identity(there.folder).certificate)
        host, _, port = there.address.rpartition(":")
        sock = socket.create_connection((host, int(port)), 10)
        sock.sendall(PREFIX)
        open_lines.append(Line(context.wrap_socket(sock, server_hostname=server_name(name))))
        return open_lines[-1]

    yield line
    for each in open_lines:
        each.close()


def needs(native_dir: Path, **changed: Any) -> dict[str, Any]:
    return {
        "xmig_version": __version__, "layout": read_layout(native_dir).layout_version, "job": "3" * 32,
        "job_name": "evil", "priority": "critical", "command": "evil", "uid": 60_010, "pids": [4_000_000],
        "programs": [need()], "live_bytes": 0, "program_bytes": 0, "instructions": [], "files": [],
    } | changed  # fmt: skip


def need(size: int = 0) -> dict[str, Any]:
    return {"device": "cpu:0", "devices": [{"kind": "cpu", "bytes": size}]}


def refused(line: Line, body: dict[str, Any], payload: bytes = b"") -> str:
    return str(line.call(body, payload)[0]["problem"]["code"])


def ends(line: Line) -> bool:
    """The other side closes it, at once."""
    with pytest.raises((Unavailable, EOFError)):
        line.receive()
    return True


def test_a_peer_that_is_not_allowed(connect: Connect, native_dir: Path) -> None:
    line = connect("victim")
    for op in ("plan", "begin", "prepare", "go", "drop", "state"):
        assert refused(line, {"op": op, "transfer": "1" * 32, "needs": needs(native_dir)}) == "peer_not_allowed"
    assert refused(line, {"op": "lacking", "transfer": "1" * 32}) == "transfer_over"
    line.send({"op": "piece", "transfer": "1" * 32}, b"x")  # not a byte behind a request
    assert ends(line)


def test_a_stranger(nodes: list[PeerNode], tmp_path: Path) -> None:
    """Has a key, and nobody knows it."""
    identity = open_identity(tmp_path)
    assert (tmp_path / FILE).exists()
    context = client_context(identity, anybody=True)
    host, _, port = nodes[1].address.rpartition(":")
    with socket.create_connection((host, int(port)), 10) as sock:
        sock.sendall(PREFIX)
        wrapped = context.wrap_socket(sock)
        try:
            assert wrapped.recv(1) == b""
        except OSError:  # of TLS, too: it is refused
            pass
        finally:
            wrapped.close()


def test_a_peer_that_lies(nodes: list[PeerNode], connect: Connect, native_dir: Path) -> None:
    """About what a piece is, what a program is, and what was agreed."""
    line, transfer = connect("friend"), "2" * 32
    assert refused(line, {"op": "go", "transfer": transfer}) == "no_such_transfer"
    assert refused(line, {"op": "begin", "transfer": "../../../etc/passwd", "needs": needs(native_dir)}) == "protocol"
    line = connect("friend")
    assert refused(line, {"op": "begin", "transfer": transfer, "needs": needs(native_dir, uid=-1)}) == "protocol"
    line = connect("friend")
    cases: dict[str, dict[str, Any]] = {
        "pid_in_use": {"pids": [1]}, "other_cpu": {"instructions": ["avx9000"]}, "other_version": {"layout": 1},
        "file_missing": {"files": [{"path": "/no/such\x1b[31m/file", "bytes": 1}]},
        "mount_missing": {"mounts": ["/", "/no/such\x1b[31m/mount"]}, "address_missing": {"addresses": ["192.0.2.1"]},
        "no_room": {"programs": [need(), need(1 << 50)]},
        "pool_too_small": {"program_bytes": 1 << 50},
    }  # fmt: skip
    for code, changed in cases.items():
        assert refused(line, {"op": "begin", "transfer": transfer, "needs": needs(native_dir, **changed)}) == code
    several = {"op": "begin", "transfer": transfer, "needs": needs(native_dir, programs=[need(), need()])}
    for devices, code in ((["cpu:0", "cpu:7"], "no_such_device"), (["/etc", ""], "no_such_device"), ([1], "protocol")):
        assert refused(connect("friend"), several | {"devices": devices}) == code
    answer, _ = line.call({"op": "begin", "transfer": transfer, "needs": needs(native_dir)})
    assert answer["device"] in ("cpu:0", "cpu:1")
    assert line.call({"op": "begin", "transfer": transfer, "needs": needs(native_dir)})[0] == answer  # it came twice

    content = b"what it is" * 100
    name = hashlib.sha256(content).hexdigest()
    assert line.call({"op": "lacking", "transfer": transfer}, bytes.fromhex(name))[1] == b"\1"
    piece = {"op": "piece", "transfer": transfer, "hash": name, "bytes": len(content)}
    header = HEADER.pack(MAGIC, 0, RESERVED, 0, len(content))
    assert refused(line, piece, header + content) == "damaged"
    assert refused(line, piece, b"") == "damaged"
    assert refused(connect("friend"), piece | {"hash": "../../x"}, b"") == "protocol"
    assert refused(connect("friend"), piece | {"bytes": 1 << 40}, b"") == "protocol"
    assert refused(connect("friend"), {"op": "manifest", "transfer": transfer}, b"{}") == "protocol"
    line = connect("friend")
    assert refused(line, {"op": "prepare", "transfer": transfer}) == "peer_lies"  # there is none
    manifest = {
        "id": transfer, "job": "3" * 32, "job_name": "evil", "node": "friend", "xmig_version": "1", "created_at": 0,
        "programs": [program(uid=0)],
    }  # fmt: skip
    line.call({"op": "manifest", "transfer": transfer}, dumped(manifest))
    assert refused(line, {"op": "prepare", "transfer": transfer}) == "peer_lies"  # it would be root's
    assert refused(line, {"op": "go", "transfer": transfer}) == "transfer_not_ready"
    for programs in ([], [program(uid=60_010), program(uid=60_010, pid=4_000_001, id="6" * 32)], [program(devices=[])]):
        manifest["programs"] = programs  # not as many, or not with as many devices, as were announced
        line.call({"op": "manifest", "transfer": transfer, "ahead": True}, dumped(manifest))
        assert refused(line, {"op": "prepare", "transfer": transfer}) == "peer_lies"
    assert children(nodes[1], SERVER) == []
    log = nodes[1].log
    for more in (1 << 21, 0):  # than was announced; and its snapshots are none
        memory = {"id": 1, "kind": "shadow", "ordinal": 0, "message": "{}", "content": content_of(name, more)}
        manifest["programs"] = [program(uid=60_010, memory=[memory] if more else [])]
        line.call({"op": "manifest", "transfer": transfer, "ahead": True}, dumped(manifest))
        given_up = "were announced" if more else "cannot be read"
        wait_until(lambda wanted=given_up: wanted in log.read_text(), given_up)  # type: ignore[misc]
    line.call({"op": "prepare", "transfer": transfer})  # without any image
    wait_until(lambda: state(nodes[1], transfer) == "dropped", "it cannot be made again")
    wait_until(lambda: children(nodes[1], SERVER) == [], "no server stays")
    assert line.call({"op": "go", "transfer": transfer})[0]["state"] == "dropped"
    assert line.call({"op": "drop", "transfer": transfer})[0]["state"] == "dropped"
    twice = {"op": "begin", "transfer": "7" * 32, "needs": needs(native_dir, programs=[need(), need()])}
    assert line.call(twice)[0]["device"] == "cpu:0,cpu:1"
    manifest |= {"id": "7" * 32, "programs": [program(uid=60_010)] * 2}  # one process as two
    line.call({"op": "manifest", "transfer": "7" * 32}, dumped(manifest))
    assert refused(line, {"op": "prepare", "transfer": "7" * 32}) == "peer_lies"
    late = "4" * 32
    assert line.call({"op": "drop", "transfer": late})[0]["state"] == "dropped"
    assert refused(line, {"op": "begin", "transfer": late, "needs": needs(native_dir)}) == "transfer_over"
    assert nodes[1].client.get("/v1/processes") == []


def bring(nodes: list[PeerNode], transfer: str, identity: Identity, *, claims: str = "friend") -> Line:
    """A connection for pieces of this transfer, from who has this identity."""
    context = client_context(identity, open_identity(nodes[1].folder).certificate)
    host, _, port = nodes[1].address.rpartition(":")
    sock = socket.create_connection((host, int(port)), 10)
    sock.sendall(BULK + transfer.encode())
    try:
        return Line(context.wrap_socket(sock, server_hostname=server_name(claims)))
    except OSError:
        sock.close()
        raise


def content_of(name: str, size: int) -> dict[str, Any]:
    return {"bytes": size, "chunks": [{"at": 0, "bytes": size, "hash": name}] if size else []}


def pumps(node: PeerNode) -> list[int]:
    """Processes that it has for connections with pieces."""
    return children(node, "pump.py")


def children(node: PeerNode, word: str) -> list[int]:
    """Its processes whose commands have this in them."""
    assert node.process is not None
    listed = Path(f"/proc/{node.process.pid}/task").glob("*/children")
    pids = [int(pid) for each in listed for pid in each.read_text().split()]
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def test_who_brings_pieces(nodes: list[PeerNode], connect: Connect, native_dir: Path, tmp_path: Path) -> None:
    """Only the peer whose transfer it is, and nobody before that transfer has begun or once it is over."""
    friend, stranger = open_identity(nodes[0].folder), open_identity(tmp_path)
    line, transfer, content = connect("friend"), "8" * 32, b"content"
    name = hashlib.sha256(content).hexdigest()
    piece = {"op": "piece", "transfer": transfer, "hash": name, "bytes": len(content)}
    encoded = HEADER.pack(MAGIC, 0, RESERVED, zlib.crc32(content), len(content)) + content
    with pytest.raises(OSError, match=r"reset|EOF|closed|broken"):
        bring(nodes, transfer, friend)
    assert line.call({"op": "begin", "transfer": transfer, "needs": needs(native_dir)})[0]["streams"] is True
    with pytest.raises(Unavailable), contextlib.closing(bring(nodes, transfer, stranger)) as brings:
        brings.call(piece, encoded)
    lacking = {"op": "lacking", "transfer": transfer}
    assert line.call(lacking, bytes.fromhex(name))[1] == b"\x01"
    with contextlib.closing(bring(nodes, transfer, friend)) as brings:
        assert brings.call(piece, encoded) == ({}, b"")
        assert brings.call(piece, encoded) == ({}, b"")
        assert line.call(lacking, bytes.fromhex(name))[1] == b"\x00"
        (pump,) = pumps(nodes[1])
        os.kill(pump, signal.SIGKILL)
        with pytest.raises(Unavailable):
            brings.call(piece, encoded)
    with contextlib.closing(bring(nodes, transfer, friend)) as brings:
        other = hashlib.sha256(b"another").hexdigest()
        assert refused(brings, piece | {"hash": other}, encoded) == "damaged"
        assert line.call({"op": "drop", "transfer": transfer})[0]["state"] == "dropped"
        assert refused(brings, piece, encoded) == "transfer_over"
    wait_until(lambda: not pumps(nodes[1]), "processes without connections have ended")
    with pytest.raises(OSError, match=r"reset|EOF|closed|broken"):
        bring(nodes, transfer, friend)


def test_messages_that_are_too_long(connect: Connect) -> None:
    for length, more in ((LONGEST + 1, 0), (2, LONGEST_PAYLOAD + 1), (1 << 31, 1 << 63)):
        line = connect("friend")
        line.sock.sendall(FRAME.pack(length, more))
        assert ends(line)
    line = connect("friend")
    line.sock.sendall(FRAME.pack(4, 0) + b"[1]]")
    assert ends(line)


def test_what_is_behind_requests_has_a_bound(nodes: list[PeerNode], connect: Connect) -> None:
    """Of all connections of a peer together: who finds no room is not read. Nobody waits for ever."""
    assert nodes[1].process is not None
    status = Path(f"/proc/{nodes[1].process.pid}/status")

    def peak() -> int:
        return int(status.read_text().split("VmHWM:")[1].split()[0]) << 10

    def send_most(line: Line) -> None:
        line.sock.sendall(FRAME.pack(2, size) + b"{}" + bytes(size - 1))
        line.close()

    size, before, lines = LONGEST_PAYLOAD - 1, peak(), [connect("friend") for _ in range(6)]
    with ThreadPoolExecutor(len(lines)) as pool:
        for done in [pool.submit(send_most, line) for line in lines]:
            done.result()
    assert peak() - before < 2 * LONGEST_PAYLOAD + (32 << 20)


def dumped(manifest: dict[str, Any]) -> bytes:
    return json.dumps(manifest).encode()


def program(**changed: Any) -> dict[str, Any]:
    nothing = {"bytes": 0, "chunks": []}
    return {
        "id": "5" * 32, "pid": 4_000_000, "uid": 60_010, "gid": 0, "leader": True, "command": "evil", "generation": 1,
        "devices": [{"kind": "cpu", "name": "x", "total_bytes": 1}], "layout": 1, "shared_bytes": [0, 0, 0],
        "memory": [], "snapshots": [nothing, nothing], "images": [], "files": [],
    } | changed  # fmt: skip


def state(node: PeerNode, transfer: str) -> str:
    return str(node.client.get(f"/v1/transfers/{transfer}")["state"])
