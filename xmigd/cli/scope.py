"""A job in a unit of its own, where a service manager can make one and nothing is lost by it.

A program that was started in somebody's login belongs to that login's unit. As a unit of its own it can be seen,
limited and stopped by its job, with all its processes. What was put somewhere on purpose stays there: in a service, a
batch system's job, a container.
"""

from __future__ import annotations

import os
import pwd
import re
import time
from pathlib import Path

MOVED_WITHIN = 5.0  # seconds from the manager's answer; it moves the process a moment after that
LINGERING = Path("/var/lib/systemd/linger")  # a file for each user whose manager stays when the last session ends
# In a login's unit: a session, or what a desktop has started for its user.
IN_A_LOGIN = re.compile(r"/user\.slice/user-\d+\.slice/(?P<manager>user@\d+\.service/)?.*\.scope")


def enter(unit: str, about: str) -> None:
    """Put this process into a scope of its own. Never raises: a program works where it is, too."""
    if (bus := _bus()) is None:
        return
    # Most programs are started where none of this is needed, and they do not wait for it to be loaded.
    import asyncio

    from xmigd import log

    if (why := asyncio.run(_start(bus, unit, about))) is not None:
        log.get("scope").debug("the job has no scope of its own", unit=unit, why=why)


def has_a_bus() -> bool:
    """Would `enter` ask somebody?"""
    return _bus() is not None


def _bus() -> str | None:
    return bus_for(control_group(), uid=os.geteuid(), runtime_dir=os.environ.get("XDG_RUNTIME_DIR"))


def bus_for(group: str, *, uid: int, runtime_dir: str | None) -> str | None:
    """Where the manager listens whose unit a job out of this control group is to be; None: it stays where it is."""
    found = IN_A_LOGIN.fullmatch(group)
    if found is None:
        return None
    if uid == 0:
        return "SYSTEM"
    # A user's manager ends with the user's last session, and every unit of it. A session's own unit does not.
    stays = found["manager"] is not None or _lingers(uid)
    return f"unix:path={runtime_dir}/bus" if runtime_dir and stays else None


def control_group() -> str:
    """This process's, as systemd sees it: in its own hierarchy, or in the only one."""
    lines = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
    groups = {controllers: path for _, controllers, path in lines}
    return groups.get("name=systemd") or groups.get("", "")


def _lingers(uid: int) -> bool:
    try:
        return (LINGERING / pwd.getpwuid(uid).pw_name).exists()
    except KeyError:
        return False


async def _start(bus: str, unit: str, about: str) -> str | None:
    import asyncio

    from xmigd.servers.scopes import ManagerScopes

    scopes = ManagerScopes(bus)
    try:
        why = await scopes.start(unit, os.getpid(), about)
        end = time.monotonic() + MOVED_WITHIN
        # What the program starts before it is moved would stay behind.
        while why is None and not control_group().endswith(f"/{unit}"):
            if time.monotonic() > end:
                return f"the manager has not moved it within {MOVED_WITHIN:g} s"
            await asyncio.sleep(0.001)
        return why
    finally:
        await scopes.close()
