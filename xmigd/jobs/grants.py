"""Who may have jobs of the class critical: whose work others wait for.

Operators may. They grant it to users and groups in a setting, `critical_users`; nobody else can claim it.
"""

from __future__ import annotations

import grp
import os
import pwd

from xmigd.errors import Forbidden
from xmigd.records import Priority


class Grants:
    def __init__(self, names: str) -> None:
        """`names`: users by name or number, @group; separated by commas. *: everybody."""
        self._names = [each.strip() for each in names.split(",") if each.strip()]

    def check(self, priority: Priority, uid: int, *, is_operator: bool) -> None:
        """Raises Forbidden."""
        if priority != "critical" or is_operator or self._has(uid):
            return
        raise Forbidden(
            f"user {uid} may not start critical jobs: others would wait for their work", code="class_not_granted",
            hint="start it as normal, or have an operator grant it (XMIG_CRITICAL_USERS)",
        )  # fmt: skip

    def _has(self, uid: int) -> bool:
        return any(_names(name, uid) for name in self._names)


def _names(name: str, uid: int) -> bool:
    if name == "*" or name == str(uid):
        return True
    try:
        user = pwd.getpwuid(uid)
        if not name.startswith("@"):
            return name == user.pw_name
        return grp.getgrnam(name[1:]).gr_gid in os.getgrouplist(user.pw_name, user.pw_gid)
    except KeyError:  # one of them is not known here
        return False
