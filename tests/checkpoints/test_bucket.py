"""A bucket as the second place: against a server that checks signatures, and through a proxy that does harm."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.checkpoints.s3 import Proxy, Reply, Request, Server, failing, proxy_of, served
from tests.checkpoints.samples import manifest_of, small_checkpoint, stored
from xmigd.checkpoints.archive import pieces_of
from xmigd.checkpoints.bucket import Bucket
from xmigd.checkpoints.content import Chunks
from xmigd.checkpoints.manifest import Manifest
from xmigd.errors import Invalid


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(tmp_path_factory.mktemp("moto")) as server:
        server.client().create_bucket(Bucket="checkpoints")
        yield server


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with proxy_of(server) as proxy:
        yield proxy


@pytest.fixture
def chunks(tmp_path: Path) -> Chunks:
    return Chunks(tmp_path / "objects")


@pytest.fixture
def bucket(server: Server, proxy: Proxy, tmp_path: Path) -> Bucket:
    return connected(server, proxy, tmp_path)


def connected(server: Server, proxy: Proxy, folder: Path, name: str = "checkpoints") -> Bucket:
    """Each test has a prefix of its own."""
    return Bucket(
        f"s3://{name}/{folder.name}", "a", endpoint=proxy.endpoint, region="us-east-1",
        credentials=server.credentials(folder / "credentials"),
    )  # fmt: skip


def names(server: Server, folder: Path) -> set[str]:
    pages = server.client().get_paginator("list_objects_v2").paginate(Bucket="checkpoints", Prefix=f"{folder.name}/a/")
    return {entry["Key"].rpartition("/")[2] for page in pages for entry in page.get("Contents", [])}


def copied(bucket: Bucket, manifest: Manifest, chunks: Chunks) -> bool:
    return bucket.copy(manifest.model_dump_json().encode(), chunks, threading.Event().is_set)


def another(chunks: Chunks, seed: int) -> Manifest:
    with chunks.writing() as writing:
        content = stored(writing, Random(seed).randbytes(5000))
    return manifest_of([content], content).model_copy(update={"id": f"{seed:032x}"})


def test_each_piece_is_written_once_and_removed_with_the_last_that_needs_it(
    bucket: Bucket, proxy: Proxy, server: Server, chunks: Chunks, tmp_path: Path
) -> None:
    bucket.prepare(new=True)
    first = small_checkpoint(chunks)
    second = first.model_copy(update={"id": "b" * 32})
    assert copied(bucket, first, chunks)
    pieces = pieces_of(first)
    assert names(server, tmp_path) == {*pieces, f"{first.id}.json", "mirror.txt"}
    assert copied(bucket, second, chunks)
    assert proxy.count("PUT", "/objects/") == len(pieces)
    later = connected(server, proxy, tmp_path)  # the next daemon's
    later.prepare(new=False)
    assert copied(later, second, chunks)
    assert proxy.count("PUT", "/objects/") == len(pieces)
    for name, size in pieces.items():
        assert later.piece(name, size) == chunks.encoded(name, size)
    later.remove([first.id])
    assert names(server, tmp_path) == {*pieces, f"{second.id}.json", "mirror.txt"}
    later.remove([second.id, "c" * 32])
    assert names(server, tmp_path) == {"mirror.txt"}
    assert copied(later, first, chunks), "what was removed is written again"
    assert later.manifest(first.id, "0" * 64) is None


def test_names_come_in_pages(bucket: Bucket, proxy: Proxy, server: Server, chunks: Chunks, tmp_path: Path) -> None:
    """This store gives two at once."""
    bucket.prepare(new=True)
    one, other = small_checkpoint(chunks), another(chunks, 7)
    assert copied(bucket, one, chunks)
    assert copied(bucket, other, chunks)
    proxy.requests.clear()
    later = connected(server, proxy, tmp_path)
    assert copied(later, one, chunks)
    assert proxy.count("PUT", "/objects/") == 0
    assert proxy.count("GET", "continuation-token") >= 2
    later.remove([one.id])
    assert names(server, tmp_path) == {*pieces_of(other), f"{other.id}.json", "mirror.txt"}


def test_what_is_interrupted_or_refused_for_a_moment_is_tried_again(
    bucket: Bucket, proxy: Proxy, chunks: Chunks
) -> None:
    seen: set[tuple[str, str]] = set()

    def first_time(request: Request, reply: Reply) -> Reply | None:
        """Each request fails the first time: a reply ends early, or the store is busy."""
        key = (request.method, request.path)
        if key in seen:
            return reply
        seen.add(key)
        return None if request.method == "GET" and reply.body else failing("SlowDown", 503)(request, reply)

    proxy.fault = first_time
    bucket.prepare(new=True)
    manifest = small_checkpoint(chunks)
    assert copied(bucket, manifest, chunks)
    proxy.fault = None
    for name, size in pieces_of(manifest).items():
        assert bucket.piece(name, size) == chunks.encoded(name, size)


def test_a_store_that_lies_is_found_out(bucket: Bucket, proxy: Proxy, chunks: Chunks) -> None:
    def other_bytes(request: Request, reply: Reply) -> Reply:
        if request.method != "GET" or "/objects/" not in request.path or reply.status != 200:
            return reply
        return Reply(reply.status, reply.headers, reply.body[:-1] + bytes([reply.body[-1] ^ 1]))

    bucket.prepare(new=True)
    manifest = small_checkpoint(chunks)
    proxy.fault = other_bytes
    with pytest.raises(OSError, match="other content than was written"):
        copied(bucket, manifest, chunks)
    name, size = next(iter(pieces_of(manifest).items()))
    assert bucket.piece(name, size) is None
    assert proxy.count("PUT", f"{manifest.id}.json") == 0
    proxy.fault = lambda request, reply: Reply(reply.status, reply.headers, reply.body + bytes(1 << 20))
    assert bucket.piece(name, size) is None, "more than a piece can have is not read"
    proxy.fault = None
    assert copied(bucket, manifest, chunks)


@pytest.mark.parametrize(
    ("code", "status", "why"),
    [
        ("QuotaExceeded", 403, "the quota is full"),
        ("XMinioStorageFull", 507, "the store is full"),
        ("InternalSecret", 400, "does not answer as it should: InternalSecret"),
    ],
)
def test_a_refusal_says_why(bucket: Bucket, proxy: Proxy, chunks: Chunks, code: str, status: int, why: str) -> None:
    bucket.prepare(new=True)
    proxy.fault = failing(code, status)
    with pytest.raises(OSError, match=why):
        copied(bucket, small_checkpoint(chunks), chunks)


def test_a_bucket_that_is_not_there(server: Server, proxy: Proxy, tmp_path: Path) -> None:
    bucket = connected(server, proxy, tmp_path, "nowhere")
    for new in (True, False):
        with pytest.raises(OSError, match="the bucket is not there"):
            bucket.prepare(new=new)


def test_what_was_there_is_gone(bucket: Bucket) -> None:
    with pytest.raises(FileNotFoundError, match="is gone"):
        bucket.prepare(new=False)


def test_credentials_are_read_again(bucket: Bucket, server: Server, tmp_path: Path) -> None:
    path = tmp_path / "credentials"
    server.credentials(path, secret="a-wrong-secret")
    with pytest.raises(OSError, match=r"SignatureDoesNotMatch|AccessDenied") as wrong:
        bucket.prepare(new=True)
    assert "a-wrong-secret" not in str(wrong.value)
    path.chmod(0o644)
    with pytest.raises(OSError, match="others than xmigd may read"):
        bucket.prepare(new=True)
    server.credentials(path)
    bucket.prepare(new=True)


@pytest.mark.parametrize("text", ["", "[default]\naws_access_key_id = x\n", "\xff\xfe", "no = [section", "[a\n[b]]"])
def test_credentials_that_are_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "credentials"
    path.write_bytes(text.encode("latin-1"))
    path.chmod(0o600)
    with pytest.raises(Invalid, match="has no credentials"):
        Bucket("s3://checkpoints", "a", endpoint="", region="us-east-1", credentials=path)
    with pytest.raises(Invalid, match="needs credentials"):
        Bucket("s3://checkpoints", "a", endpoint="", region="us-east-1", credentials=None)
