"""Host memory as the first place of checkpoints."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest

from xmigd.checkpoints.content import Chunks
from xmigd.checkpoints.memory import MemoryTier

SIZE = 1000


def content(seed: int) -> bytes:
    return Random(seed).randbytes(SIZE)


def opened(folder: Path, on_disk: dict[str, bool] | None = None, limit: int = 4 * SIZE) -> Chunks:
    memory = MemoryTier(folder / "memory", limit=limit)
    memory.open(on_disk or {})
    return Chunks(folder / "objects", memory)


def made(chunks: Chunks, checkpoint: str, *seeds: int, durable: bool = False) -> dict[str, int]:
    with chunks.writing(owner=0, durable=durable) as writing:
        names = {chunks.put(content(seed), writing._kept)[0]: SIZE for seed in seeds}
        writing.sync()
        writing.finish(checkpoint, names)
    return names


def on_disk(chunks: Chunks) -> set[str]:
    return {path.name for path in chunks.folder.rglob("*") if path.is_file()}


def test_it_is_in_memory_at_once_and_found_again(tmp_path: Path) -> None:
    chunks = opened(tmp_path)
    names = made(chunks, "a" * 32, 1, 2)
    assert on_disk(chunks) == set()
    (tmp_path / "memory" / ("c" * 64)).write_bytes(b"of nobody")
    later = opened(tmp_path, {"a" * 32: False})
    assert later.memory.has("a" * 32)
    for name, seed in zip(names, (1, 2), strict=True):
        assert later.get(name, SIZE) == content(seed)
    assert not (tmp_path / "memory" / ("c" * 64)).exists()
    with later.writing() as writing:
        writing.settle_all(names)
    assert on_disk(later) == set(names)
    later.memory.remove("a" * 32)
    assert list((tmp_path / "memory").iterdir()) == []
    assert later.get(next(iter(names)), SIZE) == content(1)
    assert not opened(tmp_path, {}).memory.has("a" * 32)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same file system", "another one"])
def test_another_folder_gets_what_was_in_the_one_before(tmp_path: Path, elsewhere: bool) -> None:
    before = opened(tmp_path)
    names = made(before, "a" * 32, 1, 2)
    (before.memory.folder / "criu-1").mkdir()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if elsewhere else tmp_path) as folder:
        memory = MemoryTier(Path(folder, "new"), limit=4 * SIZE)
        memory.open({"a" * 32: False}, before.memory.folder)
        assert memory.has("a" * 32)
        for name, seed in zip(names, (1, 2), strict=True):
            assert memory.get(name, SIZE) == content(seed)
        assert [path.name for path in before.memory.folder.iterdir()] == ["criu-1"], "CRIU may work there"
        memory.open({"a" * 32: False}, before.memory.folder)
        (before.memory.folder / "criu-1").rmdir()
        memory.open({"a" * 32: False}, before.memory.folder)
        assert not before.memory.folder.exists()
        assert memory.has("a" * 32)


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    """And the new one is used."""
    before = opened(tmp_path)
    made(before, "a" * 32, 1)
    before.memory.folder.chmod(0o777)
    memory = MemoryTier(tmp_path / "new", limit=4 * SIZE)
    memory.open({"a" * 32: False}, before.memory.folder)
    assert memory.used
    assert not memory.has("a" * 32)
    assert list(before.memory.folder.iterdir()) != []


def test_what_threads_bring_to_the_disk_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece's bytes, though two are written at the same time."""
    chunks = opened(tmp_path)
    names = made(chunks, "a" * 32, 1, 2)
    keep, both = chunks.keep, threading.Barrier(2, timeout=60)

    def at_the_same_time(*arguments: Any) -> int:
        taken = keep(*arguments)
        both.wait()
        return taken

    monkeypatch.setattr(chunks, "keep", at_the_same_time)
    with chunks.writing() as writing:
        writing.settle_all(names)
        assert writing.stored_bytes == sum(chunks.path(name).stat().st_size for name in names)


def test_the_oldest_makes_room_once_it_is_on_the_disk(tmp_path: Path) -> None:
    chunks = opened(tmp_path)
    made(chunks, "a" * 32, 1, 2)
    made(chunks, "b" * 32, 2, 3, 4)
    third = made(chunks, "c" * 32, 5)
    assert not chunks.memory.has("c" * 32), "nothing makes room that is nowhere else"
    assert on_disk(chunks) == set(third)
    chunks.memory.is_on_disk("b" * 32)
    chunks.memory.is_on_disk("a" * 32)
    made(chunks, "d" * 32, 6)
    there = [name for name in "abcd" if chunks.memory.has(name * 32)]
    assert there == ["b", "d"]
    assert len(list((tmp_path / "memory").iterdir())) == 4 + 2


def test_what_has_to_last_is_in_both(tmp_path: Path) -> None:
    chunks = opened(tmp_path)
    names = made(chunks, "a" * 32, 1, durable=True)
    assert chunks.memory.has("a" * 32)
    assert on_disk(chunks) == set(names)


def test_what_does_not_fit_goes_to_the_disk_as_a_whole(tmp_path: Path) -> None:
    chunks = opened(tmp_path)
    names = made(chunks, "a" * 32, 1, 2, 3, 4, 5, 6)
    assert on_disk(chunks) == set(names)
    assert list((tmp_path / "memory").iterdir()) == []
    assert chunks.memory._used == 0


def test_damaged_memory_is_not_used(tmp_path: Path) -> None:
    chunks = opened(tmp_path)
    names = made(chunks, "a" * 32, 1, durable=True)
    for name in names:
        (tmp_path / "memory" / name).write_bytes(bytes(SIZE))
        assert chunks.get(name, SIZE) == content(1), "the disk has it"


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir(mode=0o777)
    os.chmod(tmp_path / "memory", 0o777)
    with pytest.raises(OSError, match="somebody else"):
        opened(tmp_path)
    (tmp_path / "memory").rmdir()
    (tmp_path / "memory").symlink_to(tmp_path)
    with pytest.raises(OSError, match="somebody else"):
        opened(tmp_path)
