"""The kernels for GPUs are those for the cpu device: no program finds one that it has not there, or another one."""

from __future__ import annotations

import re

from tests.conformance.shared import FOLDER


def tidy(type_and_name: str) -> str:
    """`const uint8_t *` and `struct pair`, one way."""
    return re.sub(r"\s*\*\s*", " * ", type_and_name.replace("struct ", "")).strip()


def of_cpu_device() -> dict[str, list[str]]:
    text = (FOLDER / "kernels.c").read_text()
    found = {}
    for name, rest in re.findall(r"XMIG_KERNEL(?:_LIMITS)?\((\w+)((?:[^{])*)\)\s*\{", text):
        pairs = re.findall(r"\(([^()]+),\s*(\w+)\)", rest)
        found[name] = [tidy(f"{kind} {parameter}") for kind, parameter in pairs]
    return found


def of_gpus() -> dict[str, list[str]]:
    text = (FOLDER / "kernels.cu").read_text()
    found = {}
    for name, rest in re.findall(r"__global__ void(?: __launch_bounds__\(\d+\))? (\w+)\(([^)]*)\)", text):
        found[name] = [tidy(part) for part in rest.split(",") if part.strip()]
    return found


def test_the_same_names_and_parameters() -> None:
    cpu = of_cpu_device()
    assert cpu == of_gpus()
    assert len(cpu) == (FOLDER / "kernels.c").read_text().count("\nXMIG_KERNEL") >= 20
    assert cpu["choose_one"] == ["uint8_t unused", "conditions conditions", "const uint64_t * x"]


def test_the_same_variables() -> None:
    text = (FOLDER / "kernels.cu").read_text()
    found = re.findall(r"__device__ (uint\w+) (\w+)(\[\d+\])?(?: = (\w+))?;", text)
    gpu = {(kind + length, name, value) for kind, name, length, value in found}
    text = (FOLDER / "kernels.c").read_text()
    cpu = set(re.findall(r"XMIG_GLOBAL\(([\w\[\]]+), (\w+)(?:, (\w+))?\)", text))
    assert cpu == gpu == {("uint64_t", "launches", "5"), ("uint32_t[4]", "table", "")}
