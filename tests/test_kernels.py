"""Kernels for GPUs in the tree are what their sources say: rebuilt by the compiler that made them, and compared."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OWN, DIFFERENTIAL = ROOT / "shim" / "device" / "cuda", ROOT / "tests" / "differential"
# Folder, what is built in it, and from what.
BUILT = [
    (OWN, ["hash", "faults"], ["build.sh", "hash.cu", "faults.cu"]),
    (DIFFERENTIAL, ["kernels"], ["build.sh", "kernels.cu", "mixing.h"]),
]
LOCK = ROOT / "packaging" / "locks" / "frameworks.txt"


def locked() -> str:
    """The compiler's version."""
    found = re.search(r"^nvidia-cuda-nvcc==(\S+)$", LOCK.read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def compiler() -> Path:
    """Of that version: PyPI's, as .venv-frameworks has it, or the machine's own."""
    places = [str(path) for path in (ROOT / ".venv-frameworks").glob("lib/python*/site-packages/nvidia/cu13/bin")]
    found = shutil.which("nvcc", path=os.pathsep.join([*places, os.environ.get("PATH", os.defpath)]))
    if found is None:
        pytest.skip("there is no nvcc: packaging/setup/frameworks.sh installs one")
    reported = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    if f"V{locked()}" not in reported:
        pytest.skip(f"{found} is not version {locked()}, which packaging/locks asks for")
    return Path(found)


@pytest.mark.parametrize(("folder", "names", "sources"), BUILT, ids=["cuda", "differential"])
def test_the_version_is_the_locked_one(folder: Path, names: list[str], sources: list[str]) -> None:
    for name in names:
        assert f"V{locked()}" in (folder / f"{name}.ptx").read_text(), f"rebuild it: {folder / 'build.sh'}"


@pytest.mark.parametrize(("folder", "names", "sources"), BUILT, ids=["cuda", "differential"])
def test_rebuilt_kernels_are_the_same(tmp_path: Path, folder: Path, names: list[str], sources: list[str]) -> None:
    nvcc = compiler()
    for file in sources:
        shutil.copy(folder / file, tmp_path)
    path = f"{nvcc.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    subprocess.run([tmp_path / "build.sh"], env=os.environ | {"PATH": path}, check=True)
    for name in names:
        assert (tmp_path / f"{name}.ptx").read_text() == (folder / f"{name}.ptx").read_text(), name
