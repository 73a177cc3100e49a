"""Prototypes and entry-point versions, read out of NVIDIA's own headers at build time."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

PROFILER = Path(__file__).parent / "profiler.h"


@dataclass(frozen=True)
class Parameter:
    type: str
    name: str

    @property
    def is_pointer(self) -> bool:
        return "*" in self.type

    @property
    def pointee(self) -> str:
        return self.type.replace("*", "", 1).removeprefix("const ").strip()


@dataclass(frozen=True)
class Prototype:
    name: str
    parameters: tuple[Parameter, ...]

    @property
    def declaration(self) -> str:
        return ", ".join(f"{p.type} {p.name}" for p in self.parameters) or "void"

    @property
    def arguments(self) -> str:
        return ", ".join(p.name for p in self.parameters)


def _parameter(text: str, position: int) -> Parameter:
    text = " ".join(text.split())
    array = re.search(r"\[\w*\]$", text)
    if array:
        text = text[: array.start()]
    match = re.fullmatch(r"(.*?[\s*])(\w+)", text)
    if not match or match[2] in ("int", "char", "long"):
        return Parameter(text, f"argument{position}")
    kind = match[1].strip()
    return Parameter(f"{kind} *" if array else kind, match[2])


def prototypes(include: Path, compiler: str) -> dict[str, Prototype]:
    """Every function that ``cuda.h`` (or the profiler's header) declares under any version, by its exported symbol."""
    text = subprocess.run(
        [compiler, "-E", "-P", "-x", "c", "-D__CUDA_API_VERSION_INTERNAL", f"-I{include}", "-"],
        input=f'#include <cuda.h>\n#include "{PROFILER}"\n',
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found: dict[str, Prototype] = {}
    for name, inside in re.findall(r"\bCUresult\s+(cu[A-Z]\w*)\s*\(([^;{}]*)\)\s*;", text):
        parts = [] if inside.strip() in ("", "void") else inside.split(",")
        found[name] = Prototype(name, tuple(_parameter(p, i) for i, p in enumerate(parts)))
    if len(found) < 500:
        raise SystemExit(f"only {len(found)} functions found in {include}/cuda.h: is this CUDA 12 or 13?")
    return found


def entry_points(include: Path, symbols: set[str]) -> list[tuple[str, int, bool, str]]:
    """What ``cuGetProcAddress`` is requested: (base name, first driver version, per-thread stream, exported symbol).

    ``cudaTypedefs.h`` names the version in which each form of a function appeared, oldest form first; the forms of a
    symbol are the plain name, then _v2, _v3 and so on. Where it knows fewer forms than there are symbols, the newest
    forms are the ones it knows.
    """
    text = (include / "cudaTypedefs.h").read_text() + (include / "cudaProfilerTypedefs.h").read_text()
    versions: dict[tuple[str, str], set[int]] = {}
    for name, version, suffix in re.findall(r"\bPFN_(cu\w+?)_v(\d{4,5})(_pts[zd]|_ptds)?\)?\(", text):
        versions.setdefault((name, suffix), set()).add(int(version))
    result: list[tuple[str, int, bool, str]] = []
    for (name, suffix), known in sorted(versions.items()):
        forms = [s for s in (name + (f"_v{n}" if n > 1 else "") + suffix for n in range(1, 10)) if s in symbols]
        ordered = sorted(known)
        count = min(len(forms), len(ordered))
        if count:
            result += [(name, v, bool(suffix), s) for v, s in zip(ordered[-count:], forms[-count:], strict=True)]
    return result


def results(include: Path) -> list[str]:
    """The names of ``CUresult``, in the order of ``cuda.h``."""
    text = re.search(r"typedef enum cudaError_enum \{(.*?)\} CUresult;", (include / "cuda.h").read_text(), re.DOTALL)
    if not text:
        raise SystemExit(f"no enum CUresult in {include}/cuda.h: is this CUDA 12 or 13?")
    return re.findall(r"^\s*(CUDA_\w+)\s*=", text[1], re.MULTILINE)
