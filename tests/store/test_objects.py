"""Content by its hash: what is put there comes back, or is known to be damaged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from xmigd.store.manifest import Manifest, Manifests, Part, verify
from xmigd.store.objects import Damaged, Objects

CONTENT = bytes(range(256)) * 5000


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    return Objects(tmp_path / "objects")


def test_what_is_put_comes_back(objects: Objects) -> None:
    stored = objects.put([CONTENT[:700], CONTENT[700:]])
    assert objects.get(stored.hash, stored.bytes) == CONTENT
    assert stored.stored_bytes == objects.path(stored.hash).stat().st_size < stored.bytes == len(CONTENT)
    assert objects.path(stored.hash).stat().st_mode & 0o777 == 0o600
    assert objects.path(stored.hash).parent.stat().st_mode & 0o777 == 0o700


def test_the_same_content_is_there_once(objects: Objects) -> None:
    one = objects.put([CONTENT])
    inode = objects.path(one.hash).stat().st_ino
    assert objects.put([CONTENT]) == one
    assert objects.put_once(lambda: [CONTENT]) == one
    assert objects.path(one.hash).stat().st_ino == inode
    assert [p for p in objects.folder.rglob("*") if p.is_file()] == [objects.path(one.hash)]


def test_content_that_ends_early_leaves_nothing(objects: Objects) -> None:
    def pieces() -> object:
        yield CONTENT
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        objects.put(pieces())  # type: ignore[arg-type]
    assert [p for p in objects.folder.rglob("*") if p.is_file()] == []


def test_every_flipped_bit_and_every_cut_is_noticed(objects: Objects) -> None:
    stored = objects.put([CONTENT])
    path = objects.path(stored.hash)
    good = path.read_bytes()
    corrupted = [good[:length] for length in range(0, len(good), max(1, len(good) // 40))]
    corrupted += [good + b"x", good + good]
    for at in range(0, len(good), max(1, len(good) // 60)):
        for bit in (1, 128):
            corrupted.append(good[:at] + bytes([good[at] ^ bit]) + good[at + 1 :])
    for content in corrupted:
        path.write_bytes(content)
        try:
            # A bit of the frame's header that means nothing to a reader may flip: the content is right then.
            assert objects.get(stored.hash, stored.bytes) == CONTENT
        except Damaged:
            continue
    path.write_bytes(good[:-1])
    with pytest.raises(Damaged):
        objects.get(stored.hash, stored.bytes)
    path.unlink()
    with pytest.raises(Damaged, match="gone"):
        objects.get(stored.hash, stored.bytes)


def test_another_objects_content_is_noticed(objects: Objects) -> None:
    one, other = objects.put([CONTENT]), objects.put([CONTENT[::-1]])
    os.replace(objects.path(other.hash), objects.path(one.hash))
    with pytest.raises(Damaged):
        objects.get(one.hash, one.bytes)


def test_the_sweep_removes_what_nobody_names(objects: Objects) -> None:
    one, other = objects.put([CONTENT]), objects.put([b"other"])
    (objects.folder / "tmpabc.part").write_bytes(b"half of it")
    assert objects.sweep({one.hash}) == 2
    assert objects.path(one.hash).exists()
    assert not objects.path(other.hash).exists()


def test_a_manifest_is_the_one_that_was_written(tmp_path: Path, objects: Objects) -> None:
    manifests = Manifests(tmp_path / "snapshots")
    stored = objects.put([CONTENT])
    part = Part(kind="journal", name="", hash=stored.hash, bytes=stored.bytes, stored_bytes=stored.stored_bytes)
    manifest = Manifest(
        process="ab" * 16, job="cd" * 16, number=3, position=10, sequence=2, journal_from=None, missing_images=0,
        at=1.5, parts=(part,),
    )  # fmt: skip
    digest = manifests.write(manifest)
    assert manifests.read("ab" * 16, 3, digest) == manifest
    with pytest.raises(Damaged, match="was not kept"):
        verify(objects, manifest)
    path = manifests.path("ab" * 16, 3)
    good = path.read_bytes()
    for content in (good[:-1], b"", good.replace(b'"number":3', b'"number":4'), b"\xff" * 10):
        path.write_bytes(content)
        with pytest.raises(Damaged):
            manifests.read("ab" * 16, 3, digest)
    with pytest.raises(Damaged, match="cannot be read"):
        manifests.read("ab" * 16, 4, digest)
    assert manifests.sweep(set()) == 1
    assert list(manifests.folder.iterdir()) == []
