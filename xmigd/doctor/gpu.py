"""NVIDIA's driver and the GPUs that the settings name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from xmigd.doctor.system import Finding, System
from xmigd.settings import Settings

CUDA = 12040  # NVML's number for 12.4, which driver 550 brought
CHECKPOINT, CHECKPOINT_MOVES = 570, 580  # the driver's own checkpoints (engine=driver), and with another GPU


def driver(system: System, settings: Settings) -> Iterator[Finding]:
    """Is there a driver, new enough?"""
    needed = _ordinals(settings)
    try:
        nvml = system.nvml()
        nvml.nvmlInit()
    except Exception as error:
        why = str(error) or type(error).__name__
        if needed:
            yield Finding("driver", "failing", f"NVIDIA's driver does not answer: {why}",
                          "install the driver (550 or newer), load it (modprobe nvidia), see dmesg")  # fmt: skip
        else:
            yield Finding("driver", "ok", "no NVIDIA driver here, and no cuda device in the settings")
        return
    try:
        version, cuda = _text(nvml.nvmlSystemGetDriverVersion()), int(nvml.nvmlSystemGetCudaDriverVersion())
    finally:
        nvml.nvmlShutdown()
    shown = f"driver {version}, CUDA {cuda // 1000}.{cuda % 1000 // 10}"
    if cuda < CUDA:
        yield Finding("driver", "failing" if needed else "note", f"{shown} is older than CUDA 12.4",
                      "install driver 550 or newer")  # fmt: skip
        return
    yield Finding("driver", "ok", shown)
    major = int(version.split(".")[0]) if version.split(".")[0].isdecimal() else 0
    if major < CHECKPOINT:
        yield Finding("driver checkpoints", "note", f"driver {version} has none; 570 brought them",
                      "only needed for engine=driver: moving programs that were not started under xMIG")  # fmt: skip
    elif major < CHECKPOINT_MOVES:
        yield Finding("driver checkpoints", "note", f"driver {version} restores on the same GPU only",
                      "driver 580 or newer moves a program to another GPU (engine=driver)")  # fmt: skip
    else:
        yield Finding("driver checkpoints", "ok", f"driver {version} has them, with other GPUs as targets")


def devices(system: System, settings: Settings) -> Iterator[Finding]:
    """The GPUs of the settings: there, not exclusive, not divided."""
    needed = _ordinals(settings)
    if not needed:
        return
    try:
        nvml = system.nvml()
        nvml.nvmlInit()
    except Exception:
        return  # `driver` says so
    try:
        # CUDA's order is by bus, as ours: NVML's is, too.
        count = int(nvml.nvmlDeviceGetCount())
        for ordinal in needed:
            name = f"cuda:{ordinal}"
            if ordinal >= count:
                yield Finding(name, "failing", f"there are {count} GPUs here", "correct XMIG_DEVICES, or see dmesg")
            else:
                yield _device(nvml, name, ordinal)
    finally:
        nvml.nvmlShutdown()


def _device(nvml: Any, name: str, ordinal: int) -> Finding:
    handle = nvml.nvmlDeviceGetHandleByIndex(ordinal)
    model = _text(nvml.nvmlDeviceGetName(handle))
    mode = nvml.nvmlDeviceGetComputeMode(handle)
    default = f"nvidia-smi -i {ordinal} -c DEFAULT"
    if mode == nvml.NVML_COMPUTEMODE_PROHIBITED:
        return Finding(name, "failing", f"{model} is in compute mode prohibited: nobody may use it", default)
    if mode == nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS:
        return Finding(name, "failing", f"{model} is in exclusive mode: a server and its standby cannot share it",
                       default)  # fmt: skip
    try:
        divided = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
    except nvml.NVMLError:
        divided = False  # a GPU that cannot be
    if divided:
        return Finding(name, "warning", f"{model} is in MIG mode: xMIG was never tried on its instances",
                       f"nvidia-smi -i {ordinal} -mig 0")  # fmt: skip
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Finding(name, "ok", f"{model}, {memory.free / (1 << 30):.0f} of {memory.total / (1 << 30):.0f} GiB free")


def _ordinals(settings: Settings) -> list[int]:
    return [int(name.split(":")[1]) for name in settings.device_names if name.startswith("cuda:")]


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
