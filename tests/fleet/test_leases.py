"""Leases in an etcd that lies, hangs, drips, is not there, or asks for certificates."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet.etcd import etcd_or_skip
from tests.harness import make_certificate
from tests.ports import free_port
from xmigd.errors import Conflict, StartError, Unavailable, XmigError
from xmigd.leases.etcd import Etcd
from xmigd.leases.leases import Lease, Leases
from xmigd.settings import Settings

TIMEOUT = 0.5


@contextlib.contextmanager
def answering(content: bytes, *, pause: float = 0.0) -> Iterator[str]:
    """Its address. It answers each request with these bytes; `pause`: seconds before each of them."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    sock = listening.accept()[0]
                except OSError:
                    return
                with sock, contextlib.suppress(OSError):
                    sock.recv(1 << 16)
                    for at in range(0, len(content), 1 if pause else len(content) or 1):
                        time.sleep(pause)
                        sock.sendall(content[at : at + 1] if pause else content)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
    thread.join()


def http(body: str, status: int = 200) -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


async def take(*addresses: str) -> None:
    etcd = Etcd(addresses, timeout=TIMEOUT)
    try:
        async with Leases(etcd, node="one", seconds=2).hold("one", "job"):
            pass
    finally:
        etcd.close()


WRONG = [
    b"", b"\x00" * 100, http(""), http("[]"), http("{}"), http('{"ID": "x"}'), http('{"ID": null}'), http("{" * 5000),
    http('{"ID": "7"}'), http('{"ID": "7", "responses": [{}]}'), http("nginx", 502), http('{"error": 3}', 500),
    http('{"ID": "7", "responses": [{"response_range": {"kvs": [{"value": "%"}]}}]}'),
    http('{"error": "no lease", "code": 5}', 404), http('{"ID": "7", "succeeded": true}'),
    http('{"ID": "7", "responses": [{"response_range": {"kvs": [7]}}]}'),
]  # fmt: skip


@pytest.mark.parametrize("content", WRONG)
def test_an_etcd_that_answers_wrongly(content: bytes) -> None:
    with answering(content) as address, pytest.raises(XmigError) as caught:
        asyncio.run(take(address))
    assert caught.value.code in ("etcd_wrong", "etcd_unreachable", "lease_lost")
    assert isinstance(caught.value, Unavailable | Conflict)


@pytest.mark.parametrize("ttl", ['"soon"', "[1]", "Infinity", "1.5", '""'])
def test_a_lease_is_lost_in_time_whatever_etcd_answers(ttl: str) -> None:
    """The controller is to stop before somebody else gets the lease."""

    async def keep(address: str) -> Lease:
        etcd = Etcd([address], timeout=TIMEOUT)
        lease = Lease("/xmig/jobs/one/job", 7, 1, time.monotonic() + 0.9)
        try:
            await asyncio.wait_for(Leases(etcd, node="one", seconds=1)._keep(lease), 10)
        finally:
            etcd.close()
        return lease

    with answering(http(f'{{"result": {{"TTL": {ttl}}}}}')) as address:
        lease = asyncio.run(keep(address))
    assert lease.lost.is_set()
    assert "TTL is no number" in lease.why


def test_an_etcd_that_hangs_or_drips() -> None:
    for content, pause in ((b"", 3600.0), (http(json.dumps({"ID": "7" * 1000})), 0.05)):
        with contextlib.ExitStack() as stack:
            if content:
                address = stack.enter_context(answering(content, pause=pause))
            else:
                listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
                address = f"http://127.0.0.1:{listening.getsockname()[1]}"
            began = time.monotonic()
            with pytest.raises(Unavailable, match="has not answered within"):
                asyncio.run(take(address))
            assert time.monotonic() - began < 20 * TIMEOUT


def test_nobody_is_there() -> None:
    with pytest.raises(Unavailable, match="does not answer"):
        asyncio.run(take(f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"))


def test_certificates(tmp_path: Path) -> None:
    """The first endpoint is not there. etcd lets in who has a certificate, and is who it has to be."""
    certificate, key = make_certificate(tmp_path)
    client, peer = f"https://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
    words: list[str | Path] = [
        "--cert-file",
        certificate,
        "--key-file",
        key,
        "--trusted-ca-file",
        certificate,
        "--client-cert-auth",
    ]
    words += ["--data-dir", tmp_path / "data", "--listen-client-urls", client, "--advertise-client-urls", client]
    words += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
    process = subprocess.Popen(
        [etcd_or_skip(), *words, "--initial-cluster", f"default={peer}", "--unsafe-no-fsync"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    endpoints = [f"https://127.0.0.1:{free_port()}", client]

    async def use() -> None:
        etcd = Etcd(endpoints, timeout=10, ca=certificate, certificate=certificate, key=key)
        leases, end = Leases(etcd, node="one", seconds=60), time.monotonic() + 60
        while True:
            try:
                async with leases.hold("one", "job") as lease:
                    await leases.verify("one", "job", lease.token)
                    with pytest.raises(Conflict, match="another lease by now, of one"):
                        await leases.verify("one", "job", lease.token - 1)
                    with pytest.raises(Conflict, match="one has the lease"):
                        async with leases.hold("one", "job"):
                            pass
            except Unavailable:
                assert time.monotonic() < end
                await asyncio.sleep(0.1)
            else:
                break
        with pytest.raises(Conflict, match="has expired"):
            await leases.verify("one", "job", lease.token)
        etcd.close()
        stranger = Etcd(endpoints, timeout=10)
        with pytest.raises(Unavailable, match="certificate"):
            await stranger.get("/x")
        stranger.close()

    try:
        asyncio.run(use())
    finally:
        process.kill()
        process.wait()
    with pytest.raises(StartError, match="certificates of etcd"):
        Etcd(["https://127.0.0.1:1"], timeout=1, ca=tmp_path / "none")


@pytest.mark.parametrize(
    "value", ["etcd:2379", "http://", "http://u:p@h:1", "http://h:1/v3", "http://h:x", "ftp://h:1"]
)
def test_addresses_that_are_none(value: str) -> None:
    with pytest.raises(ValueError, match="etcd"):
        Settings(etcd_endpoints=value)
