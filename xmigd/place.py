"""Where the daemon of this machine is, from the few settings that its callers need.

`xmigctl` is short: most of its commands ask one question. Reading every setting with all its rules takes four times as
long as asking, so callers read what they need from the same two sources, the environment and the file.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SYSTEM_RUNTIME_DIR = Path("/run/xmig")  # of a daemon that is root
FILE, PREFIX = "/etc/xmig/xmigd.toml", "XMIG_"
FILE_VARIABLE = "XMIG_CONFIG"
API_SOCKET = "api.sock"
# Of the variables that begin with XMIG_: those that a caller may have, and of which no value is wrong in itself.
CALLERS = frozenset({
    "XMIG_CA_FILE", "XMIG_CLIENT_CERT", "XMIG_CONFIG", "XMIG_DATABASE", "XMIG_JOB", "XMIG_NATIVE_DIR",
    "XMIG_RUNTIME_DIR", "XMIG_SOCKET", "XMIG_TOKEN", "XMIG_URL",
})  # fmt: skip


def default_runtime_dir() -> Path:
    """/run/xmig for root; for others a folder in $XDG_RUNTIME_DIR, or in /tmp named after the user."""
    if os.geteuid() == 0:
        return SYSTEM_RUNTIME_DIR
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "xmig" if base else Path(f"/tmp/xmig-{os.geteuid()}")


@dataclass(frozen=True, slots=True)
class Place:
    """`chosen`: the runtime directory was named, by the environment or the file."""

    runtime_dir: Path
    chosen: bool
    values: dict[str, Any] = field(default_factory=dict)  # what environment and file say, as it stands there

    @property
    def api_socket(self) -> Path:
        return self.runtime_dir / API_SOCKET

    def is_on(self, name: str) -> bool:
        """A setting that is on unless somebody has reported otherwise."""
        return str(self.values.get(name, True)).strip().lower() not in ("0", "false", "no", "off", "f", "n")


def needs_every_rule() -> bool:
    """Does the environment set what only the daemon understands? A wrong value is to be reported here as there."""
    return any(name.startswith(PREFIX) and name not in CALLERS for name in os.environ)


def find_place() -> Place:
    """Raises OSError, or ValueError: the file cannot be read."""
    values: dict[str, Any] = {}
    try:
        with open(os.environ.get(FILE_VARIABLE) or FILE, "rb") as file:
            import tomllib

            values = tomllib.load(file)
    except FileNotFoundError:
        if os.environ.get(FILE_VARIABLE):
            raise
    values |= {n.removeprefix(PREFIX).lower(): v for n, v in os.environ.items() if n.startswith(PREFIX)}
    named = values.get("runtime_dir")
    if isinstance(named, str):
        return Place(Path(named), True, values)
    return Place(default_runtime_dir(), False, values)


def local_socket(place: Place) -> Path:
    """The user's own daemon's, if one was started or named; otherwise the system's."""
    system = SYSTEM_RUNTIME_DIR / API_SOCKET
    own = place.chosen or place.api_socket.exists() or not system.exists()
    return place.api_socket if own else system
