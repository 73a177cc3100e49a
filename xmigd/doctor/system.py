"""The node as the checks see it. Everything that they look at comes through here."""

from __future__ import annotations

import importlib
import os
import resource
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

# Which distributions (os-release's ID and ID_LIKE) have which package manager, and how it is called.
MANAGERS = (
    (frozenset({"debian", "ubuntu"}), "apt", "apt-get install"),
    (frozenset({"suse", "opensuse", "sles", "opensuse-leap", "opensuse-tumbleweed"}), "zypper", "zypper install"),
    (frozenset({"fedora", "rhel", "centos", "openeuler", "openEuler", "rocky", "almalinux"}), "dnf", "dnf install"),
    (frozenset({"arch"}), "pacman", "pacman -S"),
)
State = Literal["ok", "note", "warning", "failing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found. failing: xMIG, or a device of the settings, does not work. warning: a part does not, or
    will not under load. note: good to know."""

    check: str
    state: State
    text: str
    hint: str = ""  # what to do

    def as_json(self) -> dict[str, str]:
        return asdict(self)


@dataclass
class System:
    """The machine below `root`, with this process's limits and environment."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def read(self, path: str) -> str | None:
        """A file's text without the white space around it, or None."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace").strip()
        except OSError:
            return None

    def exists(self, path: str) -> bool:
        return (self.root / path.lstrip("/")).exists()

    def install(self, names: Mapping[str, str]) -> str:
        """The command with which this distribution installs something. `names`: its packages, by package manager; the
        name for dnf is zypper's, too, unless it has one of its own."""
        release = dict(
            line.partition("=")[::2] for line in (self.read("/etc/os-release") or "").splitlines() if "=" in line
        )
        its = f"{release.get('ID', '')} {release.get('ID_LIKE', '')}".replace('"', "").split()
        for family, manager, command in MANAGERS:
            if family.intersection(its):
                return f"{command} {names.get(manager) or names['dnf']}"
        return f"install {names['dnf']} with this distribution's package manager"

    def kernel(self) -> str:
        return os.uname().release

    def uid(self) -> int:
        return os.geteuid()

    def limit(self, name: Literal["NOFILE", "MEMLOCK"]) -> int | None:
        """The hard limit of this process; None: unlimited."""
        hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1]
        return None if hard == resource.RLIM_INFINITY else hard

    def try_memfd(self) -> str | None:
        """Why a sealed memfd and a pidfd cannot be had; None: they can."""
        try:
            os.close(os.memfd_create("xmig-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            os.close(os.pidfd_open(os.getpid()))
        except OSError as error:
            return error.strerror or str(error)
        return None

    def free_bytes(self, path: Path) -> int | None:
        """Room on the file system that has `path`, or would have it."""
        for folder in (path, *path.parents):
            if folder.is_dir():
                try:
                    return shutil.disk_usage(folder).free
                except OSError:
                    return None
        return None

    def command(self, words: Sequence[str], timeout: float = 10) -> tuple[int, str] | None:
        """Exit code and output of a program; None: it is not there or does not end."""
        try:
            done = subprocess.run(
                list(words), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                errors="replace", timeout=timeout, env=dict(self.environment), check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.returncode, done.stdout

    def has_module(self, name: str) -> bool:
        try:
            importlib.import_module(name)
        except ImportError:
            return False
        return True

    def nvml(self) -> Any:
        """NVIDIA's management library: the module `pynvml`. Raises its errors from nvmlInit."""
        return importlib.import_module("pynvml")

    def python_header(self) -> Path:
        return Path(sysconfig.get_path("include")) / "Python.h"

    def memory(self) -> dict[str, int]:
        """/proc/meminfo in bytes; HugePages_* are counts."""
        values = {}
        for line in (self.read("/proc/meminfo") or "").splitlines():
            name, _, rest = line.partition(":")
            number, _, unit = rest.strip().partition(" ")
            if number.isdecimal():
                values[name] = int(number) * (1024 if unit == "kB" else 1)
        return values
