"""What `make built-packages` has built, and a machine to install it on."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import ROOT
from tests.packages.container import Container

BUILT = Path(os.environ.get("XMIG_TEST_PACKAGES") or ROOT / "build" / "packages")
TREE = ROOT / ".cache" / "boot" / "tree"
CRIU = ROOT / ".cache" / "criu"  # what packaging/setup/criu.sh has unpacked; its programs know this path
WHY_NOT = ROOT / ".cache" / "boot" / "why"


def packages(build: str) -> list[Path]:
    """The packages of one of the builds; skips the test if there are none."""
    found = sorted((BUILT / build / "RPMS").glob("*/*.rpm"))
    if not found:
        pytest.skip("make built-packages builds what this tests")
    return found


@pytest.fixture(scope="session")
def wheel() -> Path:
    found = sorted((BUILT / "wheel").glob("xmig-*manylinux*.whl"))
    if not found:
        pytest.skip("make built-packages builds the wheel")
    return found[0]


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Iterator[Container]:
    """A booted machine, with the packages and the wheel where its users are."""
    first, next_release = packages("first"), packages("next")
    if WHY_NOT.exists():
        pytest.skip(WHY_NOT.read_text().strip())
    if not TREE.is_dir():
        pytest.skip("make built-packages makes the machine")
    folder = tmp_path_factory.mktemp("machine")
    supplied = describe_host(folder, [*first, *next_release])
    binds = {BUILT / "wheels": "/wheels"} | ({CRIU: str(CRIU)} if CRIU.is_dir() else {})
    with Container([TREE], folder, binds=binds) as machine:
        machine.run("useradd --create-home --uid 1500 alice")
        machine.run("mkdir -p /etc/dnf/vars; echo 24.03 >/etc/dnf/vars/releasever")
        for path in (*first, *next_release, wheel, supplied):
            (machine.root / "root" / path.name).write_bytes(path.read_bytes())
        (machine.root / "home" / "alice" / wheel.name).write_bytes(wheel.read_bytes())
        machine.run(f"dnf install -y ./{supplied.name}; rm {supplied.name}")
        yield machine


def describe_host(folder: Path, packages: list[Path]) -> Path:
    """A package without content that says what the machine, which is no openEuler, supplies: everything that ours need
    but do not provide. What that is stands in the test of their dependencies."""
    needed, provided = dependencies(packages)
    spec = folder / "host.spec"
    lines = [f"Provides: {name}\n" for name in sorted(needed - provided) if not name.startswith("rpmlib(")]
    spec.write_text(
        "Name: host\nVersion: 1\nRelease: 1\nSummary: What the machine supplies\nLicense: none\nBuildArch: noarch\n"
        f"{''.join(lines)}%description\nSee above.\n%files\n"
    )
    subprocess.run(
        ["rpmbuild", "-bb", "--define", f"_topdir {folder}", "--define", f"_dbpath {folder}/db", spec],
        check=True, capture_output=True,
    )  # fmt: skip
    return next(folder.glob("RPMS/noarch/*.rpm"))


def dependencies(packages: list[Path]) -> tuple[set[str], set[str]]:
    """What packages need and what they provide."""

    def ask(what: str) -> set[str]:
        command = ["rpm", "-qp", what, *map(str, packages)]
        return set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n"))

    needed, provided = ask("--requires"), ask("--provides")
    # "python3 >= 3.11" is supplied by 3.11 itself.
    return {name.replace(">=", "=") for name in needed if name}, provided
