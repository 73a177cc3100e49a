"""Files that are this daemon's alone, and whole at any time."""

from __future__ import annotations

import os
from pathlib import Path


def write_privately(path: Path, content: bytes) -> None:
    """In the place of what was there, mode 0600, on the disk. Raises OSError; then what was there still is."""
    temporary = path.with_name(f".{path.name}.new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(fd, "wb") as file:
        os.fchmod(fd, 0o600)  # an earlier one may have been left with another mode
        file.write(content)
        file.flush()
        os.fsync(fd)
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
