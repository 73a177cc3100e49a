"""Loaders, streams, allocators and mathematics of PyTorch, and CuPy, JAX and Triton, on the null device."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.frameworks.check import check
from tests.gpu.bench import Bench
from tests.gpu.cases import FILES, RESULTS
from xmigd.demo.node import Node

CASES = {case.name: case for case in RESULTS}
NAMES = [
    "loader", "loader-spawn", "streams", "alloc-default", "alloc-segments", "alloc-async",
    "cupy", "triton", "jax", "jax-graphs", "conditional",
]  # fmt: skip


# Two runs that import a framework, on a machine that runs other tests beside.
pytestmark = pytest.mark.timeout(800)


@pytest.mark.parametrize("name", NAMES)
def test_across_kills(bench: Bench, node: Node, name: str) -> None:
    check(bench, node, CASES[name])


def test_mathematics_across_kills(bench: Bench, node: Node) -> None:
    result = check(bench, node, CASES["linalg"])
    assert result["failed"] == {}


def test_mistakes_are_reported(bench: Bench, node: Node) -> None:
    reported = bench.under(node, CASES["mistakes"]).result["reported"]
    assert [line.rpartition(": ")[::2] for line in reported] == [
        ("nothing wrong", "0"), ("more memory than there is", "2"), ("no memory", "1"),
        ("an image that is none", "200"), ("an empty image", "200"), ("PTX that does not compile", "218"),
        ("a kernel that there is not", "500"), ("no blocks", "1"), ("no threads", "1"),
        ("more threads than the device has", "1"), ("more threads than the kernel allows", "1"),
        ("more shared memory than there is", "1"), ("more shared memory than was requested", "1"),
        ("more blocks than run at a time", "720"), ("blocks that do", "0"), ("no kernel", "400"),
        ("parameters, packed", "0"), ("parameters, packed, too few", "1"), ("a limit that there is not", "1"),
        ("a limit", "0"), ("a limit that is too large", "1"), ("a limit to set that there is not", "1"),
        ("a device that there is not", "101"), ("memory that nobody has", "1"), ("nothing broken", "0"),
    ]  # fmt: skip


def test_no_device_files(bench: Bench, node: Node) -> None:
    assert bench.under(node, FILES).result["device_files"] == []


LENT = """
import torch
lent = [torch.cuda.Stream() for _ in range(3)]
for stream in lent:
    there = torch.cuda.ExternalStream(stream.cuda_stream)
    with torch.cuda.stream(there):
        x = torch.ones(4, device="cuda") * 2
    there.synchronize()
    print(there.query(), repr(there) != "")
"""


def test_pytorch_takes_streams_of_others(bench: Bench, node: Node) -> None:
    command = [bench.python, "-c", LENT]
    program = node.program(command, environment={**bench.environment, "PYTHONPATH": ""})
    assert program.finish() == (0, "True True\n" * 3)


COUNTED = """
import torch
before = torch.cuda.device_count()
x = torch.ones(4, device="cuda:1")
print(before, torch.cuda.device_count(), torch.cuda.get_device_properties(1).uuid, torch.cuda.mem_get_info(1)[1] > 0)
"""


def test_pytorch_counts_visible_devices(bench: Bench) -> None:
    """It looks the variable's entries up in what NVML counts, and has no device where that has fewer."""
    environment = {**bench.environment, "PYTHONPATH": ""}
    with bench.node(devices="null:0,null:1,null:2") as node:
        reported = set()
        for device, variable in ((None, "2,1"), ("null:0,1,2", "2,1"), ("null:2,1", None)):
            more = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
            command = [bench.python, "-c", COUNTED]
            code, out = node.program(command, device=device, environment=environment | more).finish()
            assert code == 0
            reported.add(out)
    assert len(reported) == 1
    assert reported.pop().startswith("2 2 ")


COMPILER = """
from cuda.bindings import nvrtc
source = b"extern \\"C\\" __global__ void twice(float *x) { x[threadIdx.x] *= 2; }"
_, program = nvrtc.nvrtcCreateProgram(source, b"twice.cu", 0, [], [])
options = [b"--gpu-architecture=sm_90", b"--enable-cache-trace"]
done, = nvrtc.nvrtcCompileProgram(program, len(options), options)
log = bytes(nvrtc.nvrtcGetProgramLogSize(program)[1])
nvrtc.nvrtcGetProgramLog(program, log)
cubin = bytes(nvrtc.nvrtcGetCUBINSize(program)[1])
nvrtc.nvrtcGetCUBIN(program, cubin)
print(int(done), cubin.hex())
print(log.decode())
"""


def test_what_nvrtc_compiles_is_kept_for_the_next_run(bench: Bench, node: Node, tmp_path: Path) -> None:
    environment = {**bench.environment, "PYTHONPATH": "", "CUDA_CACHE_PATH": str(tmp_path / "cache")}

    def compiled() -> tuple[str, str]:
        program = node.program([bench.python, "-c", COMPILER], environment=environment, stdout=subprocess.PIPE)
        text, _ = program.process.communicate()
        assert program.process.returncode == 0
        result, _, log = text.partition("\n")
        assert result.startswith("0 ")
        return result, log

    first, log = compiled()
    assert "retrieved cached" not in log
    again, log = compiled()
    assert "retrieved cached ptx" in log
    assert "retrieved cached cubin" in log
    assert first == again


def test_versions_are_the_locked_ones(frameworks: Path) -> None:
    listed = [str(frameworks), "-m", "pip", "list", "--format=json", "--disable-pip-version-check"]
    found = json.loads(subprocess.run(listed, capture_output=True, text=True, check=True).stdout)
    versions = {package["name"].lower().replace("_", "-"): package["version"] for package in found}
    lock = Path(__file__).parent.parent.parent / "packaging" / "locks" / "frameworks.txt"
    for line in lock.read_text().splitlines():
        name, _, version = line.partition("==")
        assert versions[name] == version
    assert versions["torch"] == "2.11.0"
