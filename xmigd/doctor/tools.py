"""Programs beside xMIG: CRIU, and what frameworks compile with."""

from __future__ import annotations

import re
from collections.abc import Iterator

from xmigd.doctor.system import Finding, System
from xmigd.settings import Settings


def criu(system: System, settings: Settings) -> Iterator[Finding]:
    """Dumps of programs need CRIU 4 and its Python binding."""
    reported = system.command(["criu", "--version"])
    version = re.search(r"Version: (\d+)[.\d]*", reported[1]) if reported else None
    if version is None:
        yield Finding("CRIU", "note", "there is none: programs cannot be dumped and restored",
                      system.install({"dnf": "criu"}))  # fmt: skip
    elif int(version[1]) < 4:
        yield Finding("CRIU", "warning", f"{version[0].removeprefix('Version: ')} is older than 4: dumps fail on "
                      "kernels since 6.x", "install CRIU 4 (openEuler and Fedora have it)")  # fmt: skip
    elif not system.has_module("pycriu"):
        yield Finding("CRIU", "warning", f"{version[0].removeprefix('Version: ')}, but its Python binding is missing",
                      system.install({"dnf": "python3-criu", "apt": "criu"})
                      + " (pycriu is not on PyPI)")  # fmt: skip
    else:
        yield Finding("CRIU", "ok", f"{version[0].removeprefix('Version: ')} with pycriu")


def compiler(system: System, settings: Settings) -> Iterator[Finding]:
    """Triton and torch.compile build C code as the program runs."""
    name = system.environment.get("CC") or "cc"
    header = system.python_header()
    missing = []
    if system.command([name, "--version"]) is None:
        missing.append(f"a C compiler ({name})")
    if not header.exists():
        missing.append(f"Python's headers ({header})")
    if missing:
        yield Finding("compiler", "note", f"there is no {' and no '.join(missing)}: Triton and torch.compile fail",
                      system.install({"dnf": "gcc python3-devel", "apt": "gcc python3-dev",
                                      "pacman": "gcc python"}))  # fmt: skip
    else:
        yield Finding("compiler", "ok", f"{name}, and Python's headers")
