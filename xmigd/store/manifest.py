"""What a stored snapshot consists of: one JSON file `snapshots/<process>/<number>.json`, whose hash is in the database.

Loading checks the chain from its beginning: the row's hash, the manifest, each object. Whatever does not fit is
`Damaged`, and nothing of it is to be used.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from xmigd.store.memory import SnapshotFile, Unreadable, parse_snapshot
from xmigd.store.objects import Damaged, Objects, write_durably

Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["snapshot", "journal", "image"]
    name: str  # of an image: its number in the process
    hash: Hash
    bytes: Count
    stored_bytes: Count


class Manifest(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    process: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    job: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    number: Count
    position: Count
    sequence: Count
    journal_from: Count | None
    missing_images: int  # too long for the settings, or gone
    at: float
    parts: tuple[Part, ...]

    def part(self, kind: str) -> Part | None:
        return next((part for part in self.parts if part.kind == kind), None)


class Manifests:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, process: str, number: int) -> Path:
        return self.folder / process / f"{number}.json"

    def write(self, manifest: Manifest) -> str:
        """Returns its hash. Raises OSError: no room."""
        content = manifest.model_dump_json().encode()
        write_durably(self.path(manifest.process, manifest.number), content)
        return hashlib.sha256(content).hexdigest()

    def read(self, process: str, number: int, expected: str) -> Manifest:
        """Raises Damaged."""
        try:
            content = self.path(process, number).read_bytes()
        except OSError as error:
            raise Damaged(f"the manifest of snapshot {number} cannot be read: {error.strerror}") from None
        if hashlib.sha256(content).hexdigest() != expected:
            raise Damaged(f"the manifest of snapshot {number} is not the one that was written")
        try:
            manifest = Manifest.model_validate_json(content)
        except ValidationError as error:
            raise Damaged(f"the manifest of snapshot {number} has another form: {error.errors()[0]['msg']}") from None
        if (manifest.process, manifest.number) != (process, number):
            raise Damaged(f"the manifest of snapshot {number} is that of another one")
        return manifest

    def remove(self, process: str, number: int) -> None:
        path = self.path(process, number)
        path.unlink(missing_ok=True)
        if path.parent.is_dir() and not any(path.parent.iterdir()):
            path.parent.rmdir()

    def sweep(self, needed: set[tuple[str, int]]) -> int:
        """Remove those that the database does not know. Returns how many."""
        removed = 0
        for path in list(self.folder.glob("*/*")):
            number = path.stem
            if not number.isdecimal() or (path.parent.name, int(number)) not in needed:
                path.unlink(missing_ok=True)
                removed += 1
            if not any(path.parent.iterdir()):
                path.parent.rmdir()
        return removed


def load_snapshot(objects: Objects, manifest: Manifest) -> SnapshotFile:
    """The snapshot itself. Raises Damaged."""
    part = manifest.part("snapshot")
    if part is None:
        raise Damaged(f"snapshot {manifest.number} was not kept")
    try:
        snapshot = parse_snapshot(objects.get(part.hash, part.bytes))
    except Unreadable as error:
        raise Damaged(f"snapshot {manifest.number}: {error}") from None
    if (snapshot.number, snapshot.position, snapshot.sequence) != (
        manifest.number,
        manifest.position,
        manifest.sequence,
    ):
        raise Damaged(f"snapshot {manifest.number} is another one than its manifest says")
    return snapshot


def verify(objects: Objects, manifest: Manifest) -> None:
    """Read everything that it names. Raises Damaged."""
    load_snapshot(objects, manifest)
    for part in manifest.parts:
        for _ in objects.read(part.hash, part.bytes):
            pass
