"""The benchmark's own CUDA programs, built when they are needed, and run under a daemon."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xmigd.demo.node import Node
from xmigd.errors import XmigError
from xmigd.native import NCCL_SHIM, SHIM, find_native_dir

SOURCES = Path(__file__).parent
NCCL_TYPES = SOURCES.parent.parent / "shim" / "api"  # nccl.h


class Failed(XmigError):
    """It could not be measured."""


def cuda_include() -> Path:
    """The folder of cuda.h in PyPI's package."""
    files = importlib.metadata.files("nvidia-cuda-runtime") or []
    return Path(str(next(f for f in files if f.name == "cuda.h").locate())).resolve().parent


class Programs:
    """Builds ``*.c`` of this folder against cuda.h and the shim, and runs them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.native = find_native_dir(None)
        self.kernels = self.native / "xmig_kernels.so"

    def built(self, name: str) -> Path:
        """The program's path."""
        program = self.folder / name
        if not program.exists():
            compiler = os.environ.get("CC", "cc")
            includes = [f"-I{cuda_include()}", f"-I{NCCL_TYPES}"]
            command: list[str | Path] = [compiler, "-O2", *includes, SOURCES / f"{name}.c", "-o", program]
            command += ["-Wl,--as-needed", self.native / SHIM, self.native / NCCL_SHIM, f"-Wl,-rpath,{self.native}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise Failed(f"{name}.c does not build: {done.stderr.strip()[-500:]}")
        return program

    @contextmanager
    def node(self, devices: str, **settings: object) -> Iterator[Node]:
        """A daemon with these devices."""
        with (
            tempfile.TemporaryDirectory(prefix="xmig-bench-") as folder,
            Node(Path(folder), devices=devices, log_level="warning", **settings) as node,
        ):
            yield node

    def run(self, node: Node, name: str, *arguments: object) -> Any:
        """Run one to its end: what it printed, as JSON."""
        words: list[str | Path] = [self.built(name), self.kernels, *map(str, arguments)]
        code, output = node.program(words, name=name).finish(600)
        if code != 0:
            raise Failed(f"{name} {' '.join(map(str, arguments))} ended with exit code {code}")
        return json.loads(output)
