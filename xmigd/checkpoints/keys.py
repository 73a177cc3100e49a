"""Keys of exported checkpoints and credentials of the mirror, as the daemon reads them.

A request names the file of a key, never the key: what is sent could be logged, kept with an Idempotency-Key, or read on
the way. So that a request does not make the daemon use somebody else's file as a key, it has to be as secret as a key
is.
"""

from __future__ import annotations

import configparser
import os
import stat
from pathlib import Path

from xmigd.checkpoints.archive import KEY, parse_key
from xmigd.errors import Invalid

LONGEST_CREDENTIALS = 1 << 16  # bytes


def private_key(path: str | None) -> bytes | None:
    """The key in this file of this machine. None: none is named. Blocks. Raises Invalid."""
    return None if path is None else parse_key(_private(path, "key", 4 * KEY), Path(path))


def credentials_of(path: Path) -> dict[str, str]:
    """Of an S3-compatible store, in the format of ~/.aws/credentials: `aws_access_key_id`, `aws_secret_access_key` and,
    if there is one, `aws_session_token`. Blocks. Raises Invalid, which never has a part of them."""
    file = configparser.ConfigParser(interpolation=None, default_section="")
    try:
        text = _private(str(path), "credentials", LONGEST_CREDENTIALS).decode()
        file.read_string(text if text.lstrip().startswith("[") else f"[default]\n{text}")
        section = file["default"] if file.has_section("default") else file[file.sections()[0]]
        found = {name: section[f"aws_{name}"].strip() for name in ("access_key_id", "secret_access_key")}
        if token := section.get("aws_session_token", "").strip():
            found["session_token"] = token
    except (configparser.Error, UnicodeDecodeError, KeyError, IndexError):
        found = {"": ""}
    if not all(found.values()):
        raise Invalid(
            f"the file {path} has no credentials", code="bad_key",
            hint="write aws_access_key_id = … and aws_secret_access_key = … into it, as in ~/.aws/credentials",
        )  # fmt: skip
    return found


def _private(path: str, what: str, limit: int) -> bytes:
    """The content of a file that nobody else can read. Raises Invalid."""
    try:
        # Without O_NONBLOCK, a pipe of this name would block until somebody writes.
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no path"
        raise Invalid(f"the file of the {what} {path} cannot be read: {why}", code="bad_key",
                      hint="xmigd reads it: it has to be on its machine") from None  # fmt: skip
    try:
        _check_private(Path(path), os.fstat(number), what)
        return os.read(number, limit)
    finally:
        os.close(number)


def _check_private(path: Path, status: os.stat_result, what: str) -> None:
    """Raises Invalid: somebody else could have read or written it."""
    if not stat.S_ISREG(status.st_mode):
        raise Invalid(f"the file of the {what} {path} is not a regular file", code="bad_key")
    credentials = os.environ.get("CREDENTIALS_DIRECTORY")
    if credentials and path.is_relative_to(credentials) and ".." not in path.parts:
        return  # systemd has put it there for this daemon alone
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o077:
        raise Invalid(
            f"others than xmigd may read or change the file of the {what} {path}", code="bad_key",
            hint=f"chown root {path}; chmod 600 {path}",
        )  # fmt: skip
