"""Copies that stay in host memory as a server has made them, and what is restored from them as they are."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import threading
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tests.checkpoints.samples import memory_file
from tests.checkpoints.test_known import file_of
from tests.checkpoints.test_memory import on_disk, opened
from xmigd.checkpoints import memory
from xmigd.checkpoints.content import PIECE, Chunks, Source, Writing
from xmigd.checkpoints.live import memory_bytes, restore_memory, shared_bytes
from xmigd.checkpoints.manifest import Content, Device, Memory, Program
from xmigd.checkpoints.memory import Slab
from xmigd.host_memory import RESERVE
from xmigd.ipc import messages as m
from xmigd.ipc.fds import Fd
from xmigd.memory import host_pool
from xmigd.memory.handles import Handle
from xmigd.memory.host_pool import HostPool, make_file
from xmigd.store.memory import CHUNK, FAILURES, MAX_SNAPSHOT, SNAPSHOT_HEADER, parse_snapshot
from xmigd.store.objects import Damaged

FIRST, SECOND = "a" * 32, "b" * 32
OWNER, OTHER = 1000, 1001
SHADOW = 1 << 40
LIMIT = 32 * PIECE


def piece(seed: int) -> bytes:
    return Random(seed).randbytes(1 << 12) * (PIECE >> 12)


def name_of(seed: int) -> str:
    return hashlib.sha256(piece(seed)).hexdigest()


def filled(chunks: Chunks, *seeds: int | None) -> Fd:
    """As a server hands it over: memory that it was given, with these pieces. None: zeros."""
    memory = make_file(chunks.memory.folder)
    os.ftruncate(memory.fileno(), len(seeds) * PIECE)
    for number, seed in enumerate(seeds):
        if seed is not None:
            os.pwrite(memory.fileno(), piece(seed), number * PIECE)
    return memory


def stored(writing: Writing, memory: Fd, owner: int | None = OWNER) -> tuple[Content, Slab | None]:
    fd, slab = writing.retain(memory, owner)
    (content,) = writing.store_all([Source(fd.fileno(), slab=slab)])
    return content, slab


def kept(chunks: Chunks, checkpoint: str, *memories: Fd, durable: bool = False) -> list[Content]:
    with chunks.writing(owner=OWNER, durable=durable) as writing:
        contents = [stored(writing, memory)[0] for memory in memories]
        writing.sync()
        writing.finish(checkpoint, {chunk.hash: chunk.bytes for content in contents for chunk in content.chunks})
    return contents


def files(chunks: Chunks) -> list[str]:
    return sorted(path.suffix for path in chunks.memory.folder.iterdir())


def program_of(contents: list[Content], slots: list[tuple[int, int]], writing: Writing) -> Program:
    """Its shadow are these contents, one behind the other, and it has chunks at these addresses in these places."""
    memory, address = [], SHADOW
    for id, content in enumerate(contents, 3):
        fields = {"op": "add", "id": id, "kind": "shadow", "ordinal": 0, "address": address, "bytes": content.bytes}
        message = m.pack("memory", **fields, name="memfd").decode()
        memory.append(Memory(id=id, kind="shadow", ordinal=0, message=message, content=content))
        address += content.bytes
    file = file_of(8, slots)
    snapshot = writing.store(file.fileno())
    return Program(
        id=FIRST, pid=4711, uid=OWNER, gid=OWNER, leader=True, command="python train.py", generation=2,
        devices=(Device(kind="cpu", name="xMIG CPU device", total_bytes=1 << 30),), layout=9,
        shared_bytes=(1 << 20, 1 << 21, 0), memory=tuple(memory), snapshots=(snapshot, Content(bytes=0, chunks=())),
        images=(), files=(),
    )  # fmt: skip


def chunks_of(handles: dict[int, Handle], file: Fd) -> dict[int, bytes]:
    """What a server would find, by address."""
    content = os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)
    parse_snapshot(content)
    count = SNAPSHOT_HEADER.unpack_from(content)[8]
    start, found, taken = SNAPSHOT_HEADER.size + FAILURES, dict[int, bytes](), set[int]()
    for at in range(start, start + count * CHUNK, CHUNK):
        address, _, slot = (int.from_bytes(content[at + 8 * i : at + 8 * i + 8], "little") for i in range(3))
        assert slot == 0 or slot not in taken, "a server refuses two chunks in one slot"
        taken.add(slot)
        found[address] = bytes(PIECE) if slot == 0 else _at(handles, slot)
    return found


def _at(handles: dict[int, Handle], slot: int) -> bytes:
    (found,) = [
        os.pread(handle.fd.fileno(), PIECE, slot - start)
        for handle in handles.values()
        if (start := json.loads(handle.message)["address"]) <= slot < start + handle.size
    ]
    return found


def sealed(handles: dict[int, Handle]) -> list[Handle]:
    return [handle for handle in handles.values() if json.loads(handle.message)["sealed"]]


@pytest.mark.parametrize("left", ["descriptor", "mapping"])
def test_what_somebody_can_write_to_is_copied(tmp_path: Path, left: str) -> None:
    """A server, by what it has left of it."""
    chunks = opened(tmp_path, limit=LIMIT)
    memory = filled(chunks, 1)
    theirs = os.dup(memory.fileno())
    mapped = mmap.mmap(theirs, PIECE)
    if left == "mapping":
        os.close(theirs)
    else:
        mapped.close()
    kept(chunks, FIRST, memory)
    assert files(chunks) == ["", ".list"], "its piece has a file of its own"
    if left == "mapping":
        mapped[:4] = b"gone"
        mapped.close()
    else:
        os.pwrite(theirs, b"gone", 0)
        os.close(theirs)
    assert chunks.get(name_of(1), PIECE) == piece(1)


class TestRetained:
    def test_it_is_not_copied_and_found_again(self, tmp_path: Path) -> None:
        chunks = opened(tmp_path, limit=LIMIT)
        (content,) = kept(chunks, FIRST, filled(chunks, 1, None, 2))
        assert [(chunk.at, chunk.hash) for chunk in content.chunks] == [(0, name_of(1)), (2 * PIECE, name_of(2))]
        assert files(chunks) == [".list", ".places", ".slab"]
        for known in (chunks, opened(tmp_path, {FIRST: False}, limit=LIMIT)):
            assert known.memory.has(FIRST)
            assert known.get(name_of(2), PIECE) == piece(2)
            assert known.memory._used == chunks.memory._used

    def test_other_memory_is_copied(self, tmp_path: Path) -> None:
        chunks = opened(tmp_path, limit=LIMIT)
        kept(chunks, FIRST, Fd(memory_file(piece(1))))
        assert files(chunks) == ["", ".list"]

    def test_there_is_no_room(self, tmp_path: Path) -> None:
        chunks = opened(tmp_path, limit=3 * PIECE)
        kept(chunks, FIRST, filled(chunks, 1, 2), filled(chunks, 3, 4))
        assert files(chunks) == []
        assert chunks.memory._used == 0
        assert chunks.get(name_of(4), PIECE) == piece(4), "it is on the disk"

    def test_one_that_was_given_up_leaves_nothing(self, tmp_path: Path) -> None:
        chunks = opened(tmp_path, limit=LIMIT)
        with chunks.writing(owner=OWNER, durable=False) as writing:
            stored(writing, filled(chunks, 1))
        assert (files(chunks), chunks.memory._used) == ([], 0)

    def test_a_daemon_died_before_it_was_whole(self, tmp_path: Path) -> None:
        chunks = opened(tmp_path, limit=LIMIT)
        writing = chunks.writing(owner=OWNER, durable=False)
        stored(writing.__enter__(), filled(chunks, 1))
        assert files(chunks) == [".slab"]
        assert files(opened(tmp_path, limit=LIMIT)) == []

    def test_an_increment_keeps_what_it_needs(self, tmp_path: Path) -> None:
        """And of equal pieces those of one copy: the others do not take room for ever."""
        chunks = opened(tmp_path, limit=LIMIT)
        (first,) = kept(chunks, FIRST, filled(chunks, 1, 2))
        with chunks.writing(owner=OWNER, durable=False) as writing:
            content, _ = stored(writing, filled(chunks, 3))
            assert writing.has([name_of(1), ""])
            names = {chunk.hash: PIECE for chunk in (first.chunks[0], *content.chunks)}
            writing.finish(SECOND, names)
        chunks.memory.remove(FIRST)
        assert files(chunks) == [".list", ".places", ".places", ".slab", ".slab"]
        assert opened(tmp_path, {SECOND: False}, limit=LIMIT).memory.has(SECOND)
        kept(chunks, FIRST, filled(chunks, 1, 3))
        chunks.memory.remove(SECOND)
        assert files(chunks) == [".list", ".places", ".slab"]
        assert chunks.get(name_of(1), PIECE) == piece(1)

    def test_an_increment_does_not_keep_what_it_has_itself(self, tmp_path: Path) -> None:
        """Files of CRIU's are much the same each time: those of the checkpoint before may go with it."""
        chunks = opened(tmp_path, limit=LIMIT)
        names = []
        for checkpoint, last in ((FIRST, 4), (SECOND, 5)):
            with chunks.writing(owner=OWNER, durable=False) as writing:
                image, slab = stored(writing, filled(chunks, 2, 3, last), None)
                if checkpoint == FIRST:
                    device, _ = stored(writing, filled(chunks, 1))
                assert slab is not None
                assert writing.has([name_of(1)])
                every = {chunk.hash: chunk.bytes for each in (image, device) for chunk in each.chunks}
                writing.finish(checkpoint, every)
            names.append(slab.name)
        chunks.memory.remove(FIRST)
        left = {path.stem for path in chunks.memory.folder.glob("*.slab")}
        assert (names[0] in left, names[1] in left, len(left)) == (False, True, 2)

    def test_it_goes_when_others_need_the_memory(self, tmp_path: Path) -> None:
        """The oldest first, as many as are needed, and none that is nowhere else."""
        chunks = opened(tmp_path, limit=LIMIT)
        for number, checkpoint in enumerate((FIRST, SECOND, "c" * 32)):
            kept(chunks, checkpoint, filled(chunks, 10 + 2 * number, 11 + 2 * number))
        chunks.memory.is_on_disk(SECOND)
        chunks.memory.is_on_disk(FIRST)
        each = chunks.memory._used // 3
        assert each >= 2 * PIECE
        assert chunks.memory.spare() == 2 * each
        chunks.memory.yield_room(1)
        assert [chunks.memory.has(one) for one in (FIRST, SECOND, "c" * 32)] == [False, True, True]
        chunks.memory.yield_room(LIMIT)
        assert [chunks.memory.has(one) for one in (FIRST, SECOND, "c" * 32)] == [False, False, True]
        assert (chunks.memory.spare(), chunks.memory._used) == (0, each)

    def test_it_goes_when_the_host_is_short(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        chunks = opened(tmp_path, limit=LIMIT)
        kept(chunks, FIRST, filled(chunks, 1), durable=True)
        monkeypatch.setattr(memory, "available_memory", lambda: RESERVE)
        chunks.memory.relieve()
        assert chunks.memory.has(FIRST)
        monkeypatch.setattr(memory, "available_memory", lambda: RESERVE - 1)
        chunks.memory.relieve()
        assert (chunks.memory.has(FIRST), files(chunks)) == (False, [])

    def test_a_suspension_gets_what_it_has(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        chunks = opened(tmp_path, limit=LIMIT)
        kept(chunks, FIRST, filled(chunks, 1), durable=True)
        monkeypatch.setattr(host_pool, "available_memory", lambda: RESERVE + PIECE)
        pool = HostPool(0, PIECE, lambda: 0)
        pool.share(chunks.memory.folder, chunks.memory.spare, chunks.memory.yield_room)
        assert pool.room() >= RESERVE + 2 * PIECE
        pool.make_room(PIECE)
        assert chunks.memory.has(FIRST)
        pool.make_room(2 * PIECE)
        assert not chunks.memory.has(FIRST)

    def test_damage_is_found(self, tmp_path: Path) -> None:
        chunks = opened(tmp_path, limit=LIMIT)
        kept(chunks, FIRST, filled(chunks, 1), durable=True)
        (slab,) = chunks.memory.folder.glob("*.slab")
        with slab.open("r+b") as file:
            file.write(b"gone")
        assert chunks.get(name_of(1), PIECE) == piece(1), "the disk has it"

    def test_another_copy_is_read_instead_of_a_damaged_one(self, tmp_path: Path) -> None:
        chunks = opened(tmp_path, limit=LIMIT)
        for checkpoint in (FIRST, SECOND):
            kept(chunks, checkpoint, filled(chunks, 1))
        newer = max(chunks.memory.folder.glob("*.slab"), key=lambda path: path.stat().st_mtime_ns)
        with newer.open("r+b") as file:
            file.write(b"gone")
        assert on_disk(chunks) == set()
        assert chunks.get(name_of(1), PIECE) == piece(1)

    def test_a_file_that_is_linked_is_itself_compared(self, tmp_path: Path) -> None:
        """Another checkpoint's with the same pieces says nothing of it."""
        chunks = opened(tmp_path, limit=LIMIT)
        (content,) = kept(chunks, FIRST, filled(chunks, 1, 2))
        (older,) = chunks.memory.folder.glob("*.slab")
        kept(chunks, SECOND, filled(chunks, 1, 2))
        assert chunks.link(FIRST, content, tmp_path / "sound")
        with older.open("r+b") as file:
            file.write(b"gone")
        assert not chunks.link(FIRST, content, tmp_path / "damaged")
        assert not (tmp_path / "damaged").exists()

    def test_another_checkpoint_is_whole_while_it_is_hashed(self, tmp_path: Path) -> None:
        """That one needs a piece of it, and knows no more of it than that."""
        chunks = opened(tmp_path, limit=LIMIT)
        with chunks.writing(owner=OWNER, durable=False) as writing:
            memory = filled(chunks, 1, 2)
            fd, slab = writing.retain(memory, OWNER)
            assert slab is not None
            assert writing._kept is not None
            chunks.memory.note(writing._kept, slab, 0, name_of(1), PIECE)
            with chunks.writing(owner=OWNER, durable=False) as other:
                assert other._kept is not None
                chunks.memory.keep(other._kept, name_of(1), piece(1))
                other.finish(SECOND, {name_of(1): PIECE})
            chunks.memory.note(writing._kept, slab, PIECE, name_of(2), PIECE)
            writing.finish(FIRST, {name_of(1): PIECE, name_of(2): PIECE})
            fd.close()
        later = opened(tmp_path, {FIRST: False, SECOND: False}, limit=LIMIT)
        assert [later.memory.has(one) for one in (FIRST, SECOND)] == [True, True]
        assert later.get(name_of(2), PIECE) == piece(2)


@pytest.mark.parametrize("how", [os.O_RDONLY, os.O_RDWR, os.O_PATH], ids=["to read", "to write", "as a path"])
def test_a_file_that_was_not_given_is_not_taken(tmp_path: Path, how: int) -> None:
    """A server may hand over a file of ours that it can open; that one stays as it is, and has no second name."""
    chunks = opened(tmp_path, limit=LIMIT)
    path = chunks.memory.folder / "somebody's"
    path.write_bytes(piece(1))
    path.chmod(0o644)
    with chunks.writing(owner=OWNER, durable=False) as writing:
        fd, slab = writing.retain(Fd(os.open(path, how)), OWNER)
        fd.close()
    assert slab is None
    assert (path.stat().st_nlink, path.stat().st_mode & 0o777) == (1, 0o644)


def restored(chunks: Chunks, checkpoint: str, program: Program) -> tuple[dict[int, Handle], dict[int, bytes]]:
    handles, snapshots = restore_memory(chunks, checkpoint, program, lambda done: None, threading.Event())
    assert os.fstat(snapshots[1].fileno()).st_size == 0
    return handles, chunks_of(handles, snapshots[0])


def test_others_get_single_pieces(tmp_path: Path) -> None:
    """The rest of a slab is not theirs."""
    chunks = opened(tmp_path, limit=LIMIT)
    (content,) = kept(chunks, FIRST, filled(chunks, 1, 2))
    with chunks.writing() as writing:
        mine = program_of([content], [(0x10, SHADOW), (0x20, SHADOW + PIECE)], writing)
    handles, found = restored(chunks, FIRST, mine.model_copy(update={"uid": OTHER}))
    assert sealed(handles) == []
    assert found == {0x10: piece(1), 0x20: piece(2)}


def test_what_others_can_damage_is_not_relied_on(tmp_path: Path) -> None:
    """Whoever has filled a slab may still write to pages that the kernel holds for it."""
    chunks = opened(tmp_path, limit=LIMIT)
    kept(chunks, FIRST, filled(chunks, 1, 2))
    with chunks.writing(owner=OTHER, durable=False) as writing:
        assert not writing.has([name_of(2)]), "an increment is copied as a whole"
    with chunks.writing(owner=OTHER, durable=False) as writing:
        content, _ = stored(writing, Fd(memory_file(piece(1))), OTHER)
        writing.finish(SECOND, {chunk.hash: chunk.bytes for chunk in content.chunks})
    (slab,) = chunks.memory.folder.glob("*.slab")
    slab.write_bytes(b"gone")
    assert on_disk(chunks) == set()
    assert chunks.get(name_of(1), PIECE) == piece(1)
    chunks.memory.remove(FIRST)
    assert files(chunks) == ["", ".list"]


def test_files_of_criu_are_everybodys(tmp_path: Path) -> None:
    """No program could ever write to them."""
    chunks = opened(tmp_path, limit=LIMIT)
    with chunks.writing(owner=OWNER, durable=False) as writing:
        content, _ = stored(writing, filled(chunks, 1), None)
        writing.finish(FIRST, {chunk.hash: chunk.bytes for chunk in content.chunks})
    with chunks.writing(owner=OTHER, durable=False) as writing:
        assert writing.has([name_of(1)])


def test_memory_of_before_is_no_slab(tmp_path: Path) -> None:
    """A program that was restored from a slab, suspended and written down again has that in its manifest; what is
    restored of it is memory of its own."""
    chunks = opened(tmp_path, limit=LIMIT)
    (content,) = kept(chunks, FIRST, filled(chunks, 1, 2), durable=True)
    with chunks.writing() as writing:
        program = program_of([content], [(0x10, SHADOW), (0x20, SHADOW + PIECE)], writing)
    (memory,) = program.memory
    earlier = memory.model_copy(update={"message": json.dumps(json.loads(memory.message) | {"sealed": True})})
    chunks.memory.remove(FIRST)
    handles, found = restored(chunks, FIRST, program.model_copy(update={"memory": (earlier,)}))
    assert sealed(handles) == []
    assert shared_bytes(handles) == 0
    assert found == {0x10: piece(1), 0x20: piece(2)}


def test_dump_and_copy_have_to_fit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = opened(tmp_path, limit=LIMIT)
    room = RESERVE + 3 * PIECE
    monkeypatch.setattr(memory, "available_memory", lambda: room)
    assert chunks.memory.place_for(2 * PIECE, beside=PIECE) == chunks.memory.folder
    assert chunks.memory.place_for(2 * PIECE, beside=2 * PIECE) is None
    pool = HostPool(0, PIECE, lambda: 0)
    pool.share(chunks.memory.folder, chunks.memory.spare, chunks.memory.yield_room)
    about = os.statvfs(tmp_path)
    free = about.f_bavail * about.f_frsize - RESERVE
    assert len(pool.make(2 * PIECE, beside=PIECE)) == 2
    assert pool.make(2 * PIECE, beside=free) == []


class TestRestored:
    def test_it_is_the_same_memory(self, tmp_path: Path) -> None:
        chunks = opened(tmp_path, limit=LIMIT)
        contents = kept(chunks, FIRST, filled(chunks, 1, None, 2), filled(chunks, 3))
        with chunks.writing() as writing:
            places = [(0x10, SHADOW), (0x20, SHADOW + PIECE), (0x30, SHADOW + 2 * PIECE), (0x40, SHADOW + 3 * PIECE)]
            program = program_of(contents, [*places, (0x50, 0)], writing)
        wanted = {0x10: piece(1), 0x20: bytes(PIECE), 0x30: piece(2), 0x40: piece(3), 0x50: bytes(PIECE)}
        for _ in range(2):  # as often as one likes
            handles, snapshots = restore_memory(chunks, FIRST, program, lambda done: None, threading.Event())
            assert chunks_of(handles, snapshots[0]) == wanted
            assert len(sealed(handles)) == len(handles) == 2
            for handle in sealed(handles):
                assert os.readlink(f"/proc/self/fd/{handle.fd.fileno()}").endswith(".slab")
                assert not _writable(handle.fd)
        chunks.memory.remove(FIRST)
        assert files(chunks) == []
        assert chunks_of(handles, snapshots[0]) == wanted, "what it has stays"

    def test_an_increment_is_put_together(self, tmp_path: Path) -> None:
        """Of slabs of two checkpoints, of what is equal twice, and of what is in no slab."""
        chunks = opened(tmp_path, limit=LIMIT)
        (first,) = kept(chunks, FIRST, filled(chunks, 1, 2, 3))
        with chunks.writing(owner=OWNER, durable=False) as writing:
            assert writing.has([name_of(1), name_of(3)])
            fresh, _ = stored(writing, filled(chunks, 4))
            odd, _ = stored(writing, Fd(memory_file(piece(5))))
            known = Content(
                bytes=3 * PIECE,
                chunks=(
                    replace(first.chunks[2], at=0),
                    replace(first.chunks[0], at=PIECE),
                    replace(first.chunks[0], at=2 * PIECE),
                ),
            )
            places = [(0x10 * number, SHADOW + number * PIECE) for number in range(5)]
            program = program_of([known, fresh, odd], places, writing)
            every = (known, fresh, odd, program.snapshots[0])
            writing.finish(SECOND, {chunk.hash: chunk.bytes for content in every for chunk in content.chunks})
        chunks.memory.remove(FIRST)
        handles, found = restored(chunks, SECOND, program)
        assert found == {0x00: piece(3), 0x10: piece(1), 0x20: piece(1), 0x30: piece(4), 0x40: piece(5)}
        assert (len(sealed(handles)), len(handles)) == (2, 3)

    def test_images_are_no_shadow(self, tmp_path: Path) -> None:
        """The program may have in its own memory what the device has."""
        chunks = opened(tmp_path, limit=LIMIT)
        with chunks.writing(owner=OWNER, durable=False) as writing:
            image, slab = stored(writing, filled(chunks, 2, 1), None)
            assert slab is not None
            content, _ = stored(writing, filled(chunks, 1, 2))
            program = program_of([content], [(0x10, SHADOW), (0x20, SHADOW + PIECE)], writing)
            every = (image, content, program.snapshots[0])
            writing.finish(FIRST, {chunk.hash: chunk.bytes for each in every for chunk in each.chunks})
        handles, found = restored(chunks, FIRST, program)
        assert found == {0x10: piece(1), 0x20: piece(2)}
        links = [os.readlink(f"/proc/self/fd/{handle.fd.fileno()}") for handle in handles.values()]
        assert all(slab.name not in link for link in links)

    @pytest.mark.parametrize("on_the_disk", [True, False])
    def test_what_is_damaged_is_not_given_again(self, tmp_path: Path, on_the_disk: bool) -> None:
        """Nor with another checkpoint that has it; one that is sound stays."""
        chunks = opened(tmp_path, limit=LIMIT)
        (content,) = kept(chunks, FIRST, filled(chunks, 1, 2), durable=on_the_disk)
        (damaged,) = chunks.memory.folder.glob("*.slab")
        kept(chunks, SECOND, filled(chunks, 3), durable=True)
        with chunks.writing() as writing:
            program = program_of([content], [(0x10, SHADOW), (0x20, SHADOW + PIECE)], writing)
        assert not chunks.without_damaged(FIRST, [OWNER])
        assert len(chunks.memory.slabs_of(FIRST, OWNER)) == 1
        with damaged.open("r+b") as file:
            file.seek(PIECE)
            file.write(b"gone")
        assert chunks.without_damaged(FIRST, [OWNER, OWNER]) == on_the_disk
        assert (chunks.memory.damaged, chunks.memory.has(FIRST), chunks.memory.has(SECOND)) == (
            1,
            not on_the_disk,
            True,
        )
        if on_the_disk:
            handles, found = restored(chunks, FIRST, program)
            assert (sealed(handles), found) == ([], {0x10: piece(1), 0x20: piece(2)})

    def test_it_is_not_in_host_memory(self, tmp_path: Path) -> None:
        chunks = opened(tmp_path, limit=LIMIT)
        (content,) = kept(chunks, FIRST, filled(chunks, 1, 2), durable=True)
        with chunks.writing() as writing:
            program = program_of([content], [(0x10, SHADOW), (0x20, SHADOW + PIECE)], writing)
        chunks.memory.remove(FIRST)
        handles, found = restored(chunks, FIRST, program)
        assert (sealed(handles), found) == ([], {0x10: piece(1), 0x20: piece(2)})


def _writable(fd: Fd) -> bool:
    try:
        os.pwrite(fd.fileno(), b"gone", 0)
    except OSError:
        return False
    return True


def test_a_snapshot_of_any_size_is_not_read(tmp_path: Path) -> None:
    """A manifest may come from anywhere, and say anything."""
    claimed = Content(bytes=MAX_SNAPSHOT + 1, chunks=())
    program = Program.model_construct(snapshots=(Content(bytes=0, chunks=()), claimed))
    with pytest.raises(Damaged, match=str(MAX_SNAPSHOT + 1)):
        memory_bytes(Chunks(tmp_path / "objects"), program)
