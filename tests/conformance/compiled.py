"""What the conformance programs need on a GPU: `compiled.py CUBIN` compiles kernels.cu for the first device with NVRTC,
and prints the path of the newest libcudart that this Python has. Without an argument it prints that only."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("kernels.cu")


def call(result: tuple[Any, ...]) -> Any:
    if int(result[0]) != 0:
        raise SystemExit(f"a call failed: {result[0]!r}")
    return result[1] if len(result) == 2 else result[1:]


def architecture() -> str:
    from cuda.bindings import driver

    call(driver.cuInit(0))
    device = call(driver.cuDeviceGet(0))
    kind = driver.CUdevice_attribute
    major = call(driver.cuDeviceGetAttribute(kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device))
    minor = call(driver.cuDeviceGetAttribute(kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device))
    return f"sm_{major}{minor}"


def compiled(target: str) -> bytes:
    from cuda.bindings import nvrtc

    program = call(nvrtc.nvrtcCreateProgram(SOURCE.read_bytes(), SOURCE.name.encode(), 0, [], []))
    options = [f"--gpu-architecture={target}".encode()]
    done = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(done[0]) != 0:
        log = bytes(call(nvrtc.nvrtcGetProgramLogSize(program)))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise SystemExit(log.rstrip(b"\0").decode())
    image = bytes(call(nvrtc.nvrtcGetCUBINSize(program)))
    call(nvrtc.nvrtcGetCUBIN(program, image))
    return image


def libcudart() -> Path:
    package = importlib.util.find_spec("nvidia")
    folders = (package and package.submodule_search_locations) or []
    found = [file for folder in folders for file in Path(folder).rglob("libcudart.so.*")]
    if not found:
        raise SystemExit("this Python has no libcudart (package nvidia-cuda-runtime)")
    return max(found, key=lambda file: file.name)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_bytes(compiled(architecture()))
    print(libcudart())
