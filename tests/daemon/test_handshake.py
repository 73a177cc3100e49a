"""The two halves of a handshake agree, and no stranger's bytes harm the daemon."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import harness
from tests.api.callers import become
from xmigd.devices.header import VERSIONS
from xmigd.errors import Forbidden, ProtocolError
from xmigd.ipc.handshake import (
    BEFORE_VISIBILITY,
    HELLO,
    MAGIC,
    WELCOME,
    pack_hello,
    pack_welcome,
    parse_hello,
    unpack_welcome,
)
from xmigd.jobs.membership import check_membership, new_job
from xmigd.memory.handles import JobMemory
from xmigd.native import Layout, read_layout

from .conftest import MakeNode
from .node import ROOT, Node, Program, send_raw, until


def number(expression: str, names: dict[str, int]) -> int:
    text = re.sub(r"\b(0x[0-9a-f]+|[0-9]+)(?:ull|u)\b", r"\1", expression)
    return int(eval(text, {"__builtins__": {}}, names))


def test_the_fallback_layout_is_that_of_layout_h() -> None:
    header = (ROOT / "shim/journal/layout.h").read_text()
    header = re.sub(r"#if defined\(__SANITIZE_THREAD__\)\n.*?#else\n", "", header, flags=re.DOTALL)
    names: dict[str, int] = {}
    for name, expression in re.findall(r"inline constexpr uint\d+_t (k\w+) =\s*([^;]+);", header):
        names[name] = number(expression, names)
    layout = Layout()
    assert layout.layout_version == names["kLayoutVersion"] == max(VERSIONS)
    assert layout.header_bytes == names["kHeaderBytes"]
    assert layout.staging_bytes == names["kStagingBytes"]
    assert layout.pinned_bytes == names["kPinnedBytes"]


def test_the_structures_are_those_of_handshake_h() -> None:
    header = (ROOT / "shim/ipc/handshake.h").read_text()
    sizes = {"uint32_t": 4, "int32_t": 4, "char": 1}
    for name, packed in (("ClientHello", HELLO), ("ServerWelcome", WELCOME)):
        match = re.search(rf"struct {name} {{(.*?)}};", header, re.DOTALL)
        assert match
        fields = re.findall(r"^\s*(\w+) \w+(?:\[(\d+)\])?;", match[1], re.MULTILINE)
        assert sum(sizes[kind] * int(count or 1) for kind, count in fields) == packed.size
    assert f"{MAGIC:#x}" in header


def test_the_server_says_its_layout(native_dir: Path) -> None:
    assert read_layout(native_dir) in (Layout(), Layout(pinned_bytes=1 << 34))


def test_text_is_cut_at_a_character() -> None:
    _, _, _, message = unpack_welcome(pack_welcome(1, message="é" * 400))
    assert message == "é" * 255


def test_hello_survives() -> None:
    hello = parse_hello(pack_hello("job:token", "python train.py", reattach=True, visible="1,0"))
    assert (hello.job, hello.command, hello.reattach) == ("job:token", "python train.py", True)
    assert hello.visible == "1,0"
    assert parse_hello(pack_hello(visible="")).visible == ""


def test_a_shim_from_before_is_understood() -> None:
    """Programs outlive an upgrade of the daemon, and shake hands again when it and their server have both gone."""
    hello = parse_hello(pack_hello("job", "command", reattach=True)[:BEFORE_VISIBILITY])
    assert (hello.job, hello.command, hello.reattach, hello.visible) == ("job", "command", True, None)


@given(st.binary(max_size=600) | st.binary(min_size=HELLO.size, max_size=HELLO.size))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_hello(data)


@given(st.integers(0, HELLO.size - 1), st.integers(0, 255))
def test_any_changed_byte_is_refused_or_harmless(place: int, value: int) -> None:
    data = bytearray(pack_hello("job", "command"))
    data[place] = value
    try:
        hello = parse_hello(bytes(data))
    except ProtocolError:
        return
    assert hello.command.isprintable()
    assert hello.job.isprintable()
    assert not isinstance(hello.visible, str) or hello.visible.isprintable()


def test_memory_is_sealed() -> None:
    memory = JobMemory.create(Layout(), 4 << 20)
    try:
        for fd in memory.shared:
            for size in (0, os.fstat(fd.fileno()).st_size + 1):
                with pytest.raises(PermissionError):
                    os.ftruncate(fd.fileno(), size)
        os.ftruncate(memory.snapshot0.fileno(), 100)
    finally:
        memory.close()


def test_garbage_at_the_sockets(node: Node) -> None:
    before = node.descriptors()
    chance = random.Random(1)
    for path in (node.runtime_dir / "client.sock", node.runtime_dir / "control.sock"):
        for size in [1, 2, HELLO.size - 1, HELLO.size, HELLO.size + 1, 5000, 60_000] * 4:
            answer = send_raw(path, chance.randbytes(size))
            if path.name == "client.sock":
                status, fds, _, message = unpack_welcome(answer)
                assert (status, fds) == (803, 0)
                assert message
            else:
                assert answer == b""
    assert send_raw(node.runtime_dir / "client.sock", pack_hello("nonsense", "x"))
    with Program(node) as program:
        assert program.welcome()[0] == 0
    until(lambda: not node.servers(), "servers end")
    node.wait_until_closed(before)


def test_descriptors_sent_by_strangers_are_closed(node: Node) -> None:
    before = node.descriptors()
    for name in ("client.sock", "control.sock"):
        for count in (1, 5, 50):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.settimeout(60)
                sock.connect(str(node.runtime_dir / name))
                socket.send_fds(sock, [pack_hello("nonsense", "x")], [0] * count)
                try:
                    sock.recv(1000)
                except ConnectionResetError:
                    continue
    node.wait_until_closed(before)


def test_silent_connections_do_not_keep_others_out(node: Node) -> None:
    """Who has opened too many is informed, and served when they are gone; who has not is served now."""
    uid = 65534 if os.geteuid() == 0 else os.geteuid()
    path = node.runtime_dir / "client.sock"

    def reported() -> str:
        with become(uid) if os.geteuid() == 0 else contextlib.nullcontext():
            answer = send_raw(path, pack_hello("nonsense", "x"))
        return unpack_welcome(answer)[3] if answer else ""

    with contextlib.ExitStack() as silent:
        refused = f"user {uid} has 128 unfinished handshakes open, as many as one user or address may have"

        def reported_why() -> bool:
            """Not if the daemon's patience with them is over already."""
            silent.close()
            for _ in range(150):
                sock = silent.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                with become(uid) if os.geteuid() == 0 else contextlib.nullcontext():
                    sock.connect(str(path))
            return reported().startswith(refused)

        until(reported_why, "the user gets the reason")
        if os.geteuid() == 0:
            assert "there is no job 'nonsense'" in unpack_welcome(send_raw(path, pack_hello("nonsense", "x")))[3]
        until(lambda: "there is no job 'nonsense'" in reported(), "the daemon's patience with the silent ones ends")


def test_a_program_in_a_foreign_job(node: Node) -> None:
    with node.http() as http:
        job = http.post("/v1/jobs", json={"name": "j"}).json()
    with Program(node, job=job["id"] + ":wrong") as program:
        status, _, _, message = program.welcome()
        assert status == 802
        assert "token" in message
    with Program(node, job=job["environment"]["XMIG_JOB"]) as program:
        assert program.welcome()[0] == 0
        with Program(node, job=job["environment"]["XMIG_JOB"]) as second:
            assert second.welcome()[0] == 0
            until(lambda: node.get(f"/v1/jobs/{job['id']}")["processes"] == 2, "two processes of one job")
    until(lambda: node.get(f"/v1/jobs/{job['id']}")["state"] == "ended", "ended")


@harness.needs_root
def test_another_user_s_program_in_root_s_job(make_node: MakeNode, native_dir: Path) -> None:
    """With the job's token, which only a process of the job can have given it."""
    node = make_node(native_dir)
    node.start()
    with node.http() as http:
        job = http.post("/v1/jobs", json={"name": "j"}).json()
    for token in ("", ":wrong"):
        with Program(node, job=job["id"] + token, user=65534) as foreign:
            status, _, _, message = foreign.welcome()
            assert status == 802
            assert "token" in message
    with Program(node, job=job["environment"]["XMIG_JOB"], user=65534) as dropped:
        assert dropped.welcome()[0] == 0
        (process,) = node.processes(live=True)
        assert process["job_id"] == job["id"]


@pytest.mark.parametrize(("of", "who", "may"), [(0, 5, True), (5, 5, True), (5, 0, True), (5, 6, False)])
def test_who_may_join_with_the_token(of: int, who: int, may: bool) -> None:
    job, token = new_job(name="j", command="", uid=of, device=None, registered=True)
    if may:
        assert check_membership(job, job.id, token, who) == job
    else:
        with pytest.raises(Forbidden, match="belongs to user 5"):
            check_membership(job, job.id, token, who)
    with pytest.raises(Forbidden):
        check_membership(job, job.id, token + "0", who)


def test_the_daemon_sleeps_when_nothing_happens(node: Node) -> None:
    def ticks() -> int:
        fields = Path(f"/proc/{node.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    with Program(node) as program:
        assert program.welcome()[0] == 0
        node.wait_for_standby()
        calmest = 1000
        for _ in range(5):  # what comes before is not over at once
            before = ticks()
            time.sleep(2)
            calmest = min(calmest, ticks() - before)
            if calmest <= 4:
                break
        assert calmest <= 4
