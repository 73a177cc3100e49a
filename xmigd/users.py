"""What this machine calls its users. Looking one up may wait for a directory service: not for the event loop."""

from __future__ import annotations

import pwd
import re
from functools import lru_cache

from xmigd.errors import Invalid


@lru_cache(4096)
def user_name(uid: int) -> str:
    """One that nobody knows is a number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)


def uid_of(name: str) -> int:
    """Of a name or a number. Raises Invalid."""
    if name.isascii() and name.isdecimal() and int(name) < 1 << 32:
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):  # the latter: a zero in it
        raise Invalid(f"user: there is no user {name[:64]!r} on this node", code="no_such_user") from None


def requestor_of(name: str) -> str:
    """The other way round: root, or 0, is `user 0`; `token ci`, `node two` and whom this machine does not know stay."""
    try:
        return f"user {uid_of(name)}"
    except Invalid:
        return name


def requestor_name(text: str) -> str:
    """`user 0`, as the audit and operations have it, is root; who has no number is as they are."""
    found = re.fullmatch(r"user (\d{1,10})", text)
    return user_name(int(found[1])) if found else text
