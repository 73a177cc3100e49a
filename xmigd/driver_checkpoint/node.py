"""The GPUs as NVML sees them, and what /proc tells of a program that uses them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from xmigd.errors import Unavailable

UVM_ALLOWED = 64 << 20  # bytes of /dev/nvidia-uvm that every program maps at most; managed memory is mapped from it


@dataclass(frozen=True, slots=True)
class Gpu:
    device: str  # cuda:0, in the order of the bus
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    mig: bool
    exclusive: bool
    used_by: dict[int, int]  # pid → bytes
    under_mps: frozenset[int]


@dataclass(frozen=True, slots=True)
class Gpus:
    driver: tuple[int, ...]
    all: list[Gpu]

    def of(self, pid: int) -> list[Gpu]:
        return [gpu for gpu in self.all if pid in gpu.used_by]


@dataclass(frozen=True, slots=True)
class Program:
    """A process that is named by its pid; with its start time it stays the same one."""

    pid: int
    start_time: int
    uid: int
    gid: int
    command: str
    uvm_bytes: int
    shares_memory: bool  # with other processes, through CUDA's IPC
    shim: bool


def look() -> Gpus:
    """Ask NVML. Raises Unavailable without a driver."""
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise Unavailable(f"NVIDIA's driver does not answer: {error}", hint="xmigctl doctor checks the driver",
                          code="driver_unusable") from None  # fmt: skip
    try:
        version = tuple(int(part) for part in re.findall(r"\d+", nvml.nvmlSystemGetDriverVersion()))
        return Gpus(version, [_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())])
    except nvml.NVMLError as error:
        raise Unavailable(f"NVML fails: {error}", code="driver_unusable") from None
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        mig = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
    except nvml.NVMLError:
        mig = False
    try:
        clients = frozenset(entry.pid for entry in nvml.nvmlDeviceGetMPSComputeRunningProcesses(handle))
    except nvml.NVMLError:
        clients = frozenset()
    exclusive = nvml.nvmlDeviceGetComputeMode(handle) != nvml.NVML_COMPUTEMODE_DEFAULT
    running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return Gpu(
        device=f"cuda:{index}", uuid=nvml.nvmlDeviceGetUUID(handle), name=nvml.nvmlDeviceGetName(handle),
        total_bytes=memory.total, free_bytes=memory.free, mig=mig, exclusive=exclusive,
        used_by={entry.pid: entry.usedGpuMemory or 0 for entry in running}, under_mps=clients,
    )  # fmt: skip


def program(pid: int) -> Program | None:
    """None: there is none with this pid."""
    try:
        about = os.stat(f"/proc/{pid}")
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
        with open(f"/proc/{pid}/cmdline", "rb") as words:
            command = words.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return None
    if fields[0] in ("Z", "X"):
        return None
    uvm, shares, shim = _maps(pid)
    return Program(pid, int(fields[19]), about.st_uid, about.st_gid, command, uvm, shares, shim)


def _maps(pid: int) -> tuple[int, bool, bool]:
    """Bytes of /dev/nvidia-uvm; is memory shared through CUDA's IPC; is our shim in it. What cannot be read is no."""
    uvm, shares, shim = 0, False, False
    try:
        with open(f"/proc/{pid}/maps") as lines:
            for line in lines:
                if "/dev/nvidia-uvm" in line:
                    low, _, high = line.split(" ", 1)[0].partition("-")
                    uvm += int(high, 16) - int(low, 16)
                shares = shares or "/dev/shm/cuda.shm." in line
                shim = shim or "memfd:xmig-journal" in line
    except OSError:
        pass
    return uvm, shares, shim
