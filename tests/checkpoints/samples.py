"""A checkpoint that is small, with a piece in every encoding, and content that is the same in every run."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable
from random import Random

from xmigd.checkpoints.content import Chunks, Writing
from xmigd.checkpoints.manifest import Content, Device, Image, Manifest, Memory, OpenFile, Program

ID = "0123456789abcdef" * 2


# The first of each are 0, 1, 2 and 4 in a piece's header.
BY_ENCODING = {
    0: Random(1).randbytes(600),
    1: b"the same words " * 60,
    2: struct.pack("<600H", *(20_000 + Random(n).randrange(200) for n in range(600))),
    4: struct.pack("<400I", *(1 << 30 | Random(n).randrange(1 << 16) for n in range(400))),
}


def memory_file(content: bytes) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.pwrite(fd, content, 0)
    return fd


def stored(writing: Writing, content: bytes) -> Content:
    fd = memory_file(content)
    try:
        return writing.store(fd)
    finally:
        os.close(fd)


def manifest_of(memory: Iterable[Content], snapshot: Content, images: Iterable[tuple[str, Content]] = ()) -> Manifest:
    return Manifest(
        id=ID, job=ID[::-1], job_name="trains", node="node-1", xmig_version="0.1.0", created_at=1764313600.5,
        programs=(
            Program(
                id=ID, pid=4711, uid=1000, gid=1000, leader=True, command="python train.py", generation=2,
                devices=(Device(kind="cpu", name="xMIG CPU device", total_bytes=1 << 30),), layout=9,
                shared_bytes=(1 << 20, 1 << 21, 0),
                memory=tuple(
                    Memory(id=number, kind="shadow", ordinal=0, message="{}", content=content)
                    for number, content in enumerate(memory)
                ),
                snapshots=(snapshot, Content(bytes=4096, chunks=())),
                images=tuple(Image(name=name, content=content) for name, content in images),
                files=(OpenFile(path="/var/log/train.log", bytes=17, writable=True),),
            ),
        ),
    )  # fmt: skip


def small_checkpoint(chunks: Chunks) -> Manifest:
    with chunks.writing() as writing:
        contents = [stored(writing, content) for content in BY_ENCODING.values()]
        images = [("core-1.img", stored(writing, b"core of the program")), ("pstree.img", contents[1])]
        manifest = manifest_of(contents[:3], contents[3], images)
        writing.sync()
    return manifest


def named(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
