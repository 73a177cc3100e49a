"""Checkpoints read without a daemon: an exported file, or the folder of all. Nothing is written anywhere.

It goes on after what is damaged, so that all of it is known: which file, at which offset, and which checkpoints need
it.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from xmigd.checkpoints.archive import Archive, pieces_of
from xmigd.checkpoints.content import Chunks, check_places
from xmigd.checkpoints.manifest import Content, Manifest
from xmigd.errors import Invalid
from xmigd.store.objects import TEMPORARY, Damaged
from xmigd.text import harmless

MANIFEST = re.compile(r"[0-9a-f]{32}\.json")
Progress = Callable[[int, int], None]  # bytes of content that are done, of how many


@dataclass(slots=True)
class Report:
    """What was found. Whole: nothing is damaged."""

    path: str
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    damages: list[dict[str, Any]] = field(default_factory=list)  # `where`, `what`, `checkpoints` that need it
    notes: list[str] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        return not self.damages

    def damaged(self, where: str, what: str, *checkpoints: str) -> None:
        self.damages.append({"where": where, "what": what, "checkpoints": sorted(set(checkpoints))})

    def read(self, manifest: Manifest) -> None:
        pieces = pieces_of(manifest)
        self.checkpoints.append({
            "id": manifest.id, "job_name": manifest.job_name, "node": manifest.node, "created_at": manifest.created_at,
            "pieces": len(pieces), "content_bytes": sum(pieces.values()),
        })  # fmt: skip


def check(path: Path, *, key: bytes | None = None, progress: Progress | None = None) -> Report:
    """Of a file or a folder. `key`: of an encrypted file. Raises Invalid: it is neither, or the key is not the one;
    Conflict: it was written by a later version; OSError."""
    if path.is_dir():
        if key is not None:
            raise Invalid(f"{path} is a folder, and folders are not encrypted", code="bad_key")
        return check_folder(path, progress=progress)
    return check_file(path, key=key, progress=progress)


def check_file(path: Path, *, key: bytes | None = None, progress: Progress | None = None) -> Report:
    """An exported one. Raises as `check`."""
    report = Report(str(path))
    try:
        with Archive.open(path, key=key) as archive:
            report.read(archive.manifest)
            total = archive.content_bytes
            for what in archive.damages(progress=None if progress is None else lambda done: progress(done, total)):
                report.damaged(str(path), what, archive.manifest.id)
    except Damaged as error:  # its frame: what it contains is not known
        report.damaged(str(path), error.message)
    return report


def check_folder(folder: Path, *, progress: Progress | None = None) -> Report:
    """That of a daemon, or of a mirror. Raises Invalid: it is none; OSError."""
    if not (folder / "objects").is_dir():
        raise Invalid(f"{folder} is no folder of checkpoints: it has no folder objects",
                      hint="name the folder `checkpoints` beside the database, or an exported file")  # fmt: skip
    report = Report(str(folder))
    listed = _listed(folder.parent / "xmig.db", report)
    manifests = {path.stem: path for path in sorted(folder.iterdir()) if MANIFEST.fullmatch(path.name)}
    for missing in sorted(set(listed or {}) - manifests.keys()):
        report.damaged(str(folder / f"{missing}.json"), "the manifest is gone", missing)
    read = []
    for id, path in manifests.items():
        if listed is not None and id not in listed:
            report.notes.append(f"{path.name} is no checkpoint: the database does not list it")
        elif (manifest := _manifest(path, None if listed is None else listed[id], report)) is not None:
            report.read(manifest)
            read.append(manifest)
    _check_pieces(folder, read, report, progress)
    parts = sum(1 for _ in folder.rglob(f"*{TEMPORARY}"))
    if parts:
        report.notes.append(f"files that are not complete, and belong to no checkpoint: {parts}")
    return report


def _listed(database: Path, report: Report) -> dict[str, str] | None:
    """The hashes of manifests, by the database beside the folder. None: there is none, or it cannot be read."""
    if not database.is_file():
        report.notes.append(f"there is no {database}: manifests were not compared with their hashes")
        return None
    try:
        with contextlib.closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            return dict(connection.execute("select id, manifest from checkpoints"))
    except sqlite3.Error as error:
        report.notes.append(f"{database} cannot be read ({error}): manifests were not compared with their hashes")
        return None


def _manifest(path: Path, expected: str | None, report: Report) -> Manifest | None:
    try:
        document = path.read_bytes()
        if expected is not None and hashlib.sha256(document).hexdigest() != expected:
            raise Damaged("the manifest has another hash than the database says")
        manifest = Manifest.model_validate_json(document)
        if manifest.id != path.stem:
            raise Damaged(f"it is the manifest of checkpoint {manifest.id}")
        pieces_of(manifest)
        for _, content in named_contents(manifest):
            check_places(content)
        return manifest
    except Damaged as error:
        what = error.message
    except OSError as error:
        what = f"it cannot be read: {error.strerror}"
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        what = f"the manifest is not valid: {harmless('.'.join(map(str, first['loc'])), 200)}: {first['msg']}"
    report.damaged(str(path), what, path.stem)
    return None


def _check_pieces(folder: Path, manifests: list[Manifest], report: Report, progress: Progress | None) -> None:
    """Each once, whoever needs it."""
    sizes: dict[str, int] = {}
    for manifest in manifests:
        sizes |= pieces_of(manifest)
    chunks, total, done = Chunks(folder / "objects"), sum(sizes.values()), 0
    for name, size in sizes.items():
        try:
            chunks.get(name, size)
        except Damaged as error:
            for manifest in manifests:
                for what, at in _places_of(manifest, name):
                    report.damaged(str(chunks.path(name)), f"{error.message}; {what}, at offset {at}", manifest.id)
        done += size
        if progress is not None:
            progress(done, total)


def _places_of(manifest: Manifest, name: str) -> Iterator[tuple[str, int]]:
    for what, content in named_contents(manifest):
        for chunk in content.chunks:
            if chunk.hash == name:
                yield what, chunk.at


def named_contents(manifest: Manifest) -> Iterator[tuple[str, Content]]:
    """All contents, with what they are."""
    for program in manifest.programs:
        for memory in program.memory:
            yield f"{memory.kind} {memory.id} of pid {program.pid}", memory.content
        for number, content in enumerate(program.snapshots):
            yield f"snapshot file {number} of pid {program.pid}", content
        for image in program.images:
            yield f"CRIU's {image.name} of pid {program.pid}", image.content
