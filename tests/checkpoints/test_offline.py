"""Checkpoints verified without a daemon: all that is damaged is found, each with its place."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints.samples import ID, small_checkpoint
from tests.harness import ROOT
from xmigd.checkpoints.archive import Archive, pieces_of, write
from xmigd.checkpoints.content import Chunks
from xmigd.checkpoints.offline import Report, check
from xmigd.errors import Invalid

KEY = bytes(range(32))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With one checkpoint, beside its database."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    document = small_checkpoint(Chunks(folder / "objects")).model_dump_json().encode()
    (folder / f"{ID}.json").write_bytes(document)
    with sqlite3.connect(tmp_path / "xmig.db") as database:
        database.execute("create table checkpoints (id text, manifest text)")
        database.execute("insert into checkpoints values (?, ?)", (ID, hashlib.sha256(document).hexdigest()))
    database.close()
    return folder


@pytest.fixture(params=[None, KEY], ids=["plain", "encrypted"])
def exported(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, bytes | None]:
    chunks = Chunks(tmp_path / "objects")
    write(small_checkpoint(chunks), chunks, tmp_path / "file.xmig", key=request.param)
    return tmp_path / "file.xmig", request.param


def pieces(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "objects").rglob("*") if path.is_file())


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


class TestFolder:
    def test_whole(self, folder: Path) -> None:
        report = check(folder)
        assert (report.damages, report.notes) == ([], [])
        assert [(each["id"], each["pieces"]) for each in report.checkpoints] == [(ID, 5)]

    def test_every_damaged_piece_is_found_with_what_needs_it(self, folder: Path) -> None:
        first, second, *_ = pieces(folder)
        flip(first, 30)
        second.unlink()
        report = check(folder)
        assert {each["where"] for each in report.damages} == {str(first), str(second)}
        assert {id for each in report.damages for id in each["checkpoints"]} == {ID}
        assert all("of pid 4711, at offset 0" in each["what"] for each in report.damages)

    def test_a_piece_in_two_places_is_reported_for_both(self, folder: Path) -> None:
        manifest = small_checkpoint(Chunks(folder / "objects"))
        name = manifest.programs[0].images[1].content.chunks[0].hash
        flip(folder / "objects" / name[:2] / name, 30)
        found = [each["what"] for each in check(folder).damages]
        assert any("shadow 1" in each for each in found)
        assert any("CRIU's pstree.img" in each for each in found)

    def test_a_manifest_that_reads_well_and_was_changed(self, folder: Path) -> None:
        path = folder / f"{ID}.json"
        path.write_bytes(path.read_bytes().replace(b"trains", b"drains"))
        assert "another hash" in self.of_manifest(check(folder), path)

    @pytest.mark.parametrize("document", [b"", b"{}", b"{" * 1000, b"\xff"])
    def test_what_is_no_manifest(self, folder: Path, document: bytes) -> None:
        (folder.parent / "xmig.db").unlink()
        path = folder / f"{ID}.json"
        path.write_bytes(document)
        report = check(folder)
        assert "not valid" in self.of_manifest(report, path)
        assert "were not compared" in report.notes[0]

    def test_a_manifest_that_is_gone(self, folder: Path) -> None:
        path = folder / f"{ID}.json"
        path.unlink()
        assert "gone" in self.of_manifest(check(folder), path)

    def test_what_was_interrupted_is_no_damage(self, folder: Path) -> None:
        (folder / f"{'0' * 32}.json").write_bytes((folder / f"{ID}.json").read_bytes())
        (folder / "objects" / "x.part").touch()
        report = check(folder)
        assert report.whole
        assert len(report.notes) == 2

    @staticmethod
    def of_manifest(report: Report, path: Path) -> str:
        (damage,) = report.damages
        assert (damage["where"], damage["checkpoints"]) == (str(path), [path.stem])
        return str(damage["what"])


class TestFile:
    def test_whole(self, exported: tuple[Path, bytes | None]) -> None:
        report = check(exported[0], key=exported[1])
        assert report.whole
        assert [each["id"] for each in report.checkpoints] == [ID]

    def test_every_damaged_piece_is_found(self, exported: tuple[Path, bytes | None], tmp_path: Path) -> None:
        path, key = exported
        with Archive.open(path, key=key) as archive:
            entries = [archive._entries[name] for name in list(pieces_of(archive.manifest))[:2]]
        for entry in entries:
            flip(path, entry.at + 40)
        found = [each["what"] for each in check(path, key=key).damages]
        assert len(found) == 3, "two pieces, and the hash of the file"
        for entry, what in zip(entries, found[:2], strict=True):
            assert entry.hash[:12] in what
            assert f"offset {entry.at + 36}" in what

    def test_a_damaged_frame(self, exported: tuple[Path, bytes | None]) -> None:
        path, key = exported
        path.write_bytes(path.read_bytes()[:-1])
        (damage,) = check(path, key=key).damages
        assert "truncated" in damage["what"]

    def test_another_key(self, exported: tuple[Path, bytes | None]) -> None:
        with pytest.raises(Invalid, match=r"another key|not encrypted"):
            check(exported[0], key=bytes(32))


class TestCommand:
    """`xmigctl checkpoint verify --offline`"""

    def run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "xmigd.cli", "checkpoint", "verify", "--offline", *map(str, arguments)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)

    def test_it_says_what_is_damaged_where(self, folder: Path) -> None:
        done = self.run(folder)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"checkpoint {ID[:12]} of trains: whole" in done.stdout
        broken = pieces(folder)[0]
        flip(broken, 30)
        done = self.run(folder)
        assert done.returncode == 6
        assert str(broken) in done.stdout
        done = self.run(folder, "--output", "json")
        answer: dict[str, Any] = json.loads(done.stdout)
        assert (done.returncode, answer["whole"], answer["damages"][0]["where"]) == (6, False, str(broken))

    def test_the_key_is_one(self, exported: tuple[Path, bytes | None], tmp_path: Path) -> None:
        path, key = exported
        (tmp_path / "key").write_text((key or KEY).hex())
        done = self.run(path, "--key-file", tmp_path / "key")
        assert done.returncode == (0 if key else 2)
        if key:
            (tmp_path / "key").write_text("00" * 32)
            done = self.run(path, "--key-file", tmp_path / "key")
            assert done.returncode == 2
            assert "another key" in done.stderr

    def test_there_is_no_such_file(self, tmp_path: Path) -> None:
        done = self.run(tmp_path / "none")
        assert done.returncode == 4
        assert "cannot be read" in done.stderr
