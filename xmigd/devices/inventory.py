"""What is known of each device at this moment. What nobody can tell is None, never 0.

A GPU's memory and utilisation come from NVML, found by the UUID that its programs see: NVML counts devices in another
order than CUDA does. Of the other devices the daemon knows what it holds itself.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from xmigd import log
from xmigd.devices.driver_threads import DriverThreads, Silent
from xmigd.devices.header import Description
from xmigd.devices.names import devices_of
from xmigd.supervisor.process import Process

logger = log.get("devices")

T = TypeVar("T")

# What a server would say of one that it has not opened yet (shim/device/description.cc): name and bytes.
UNOPENED = {"cpu": ("xMIG CPU device", 4 << 30), "null": ("NVIDIA H200", 150_109_880_320)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    name: str | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    utilisation: float | None = None  # share of time in which a kernel ran, 0 to 1
    healthy: bool = True
    why: str = ""


def held_bytes(processes: Iterable[Process]) -> dict[str, int]:
    """Device memory that is held of each device: programs' memory, shadows, and what servers' contexts take."""
    used: dict[str, int] = {}
    for process in processes:
        names = devices_of(process.row.device)
        for handle in list(process.handles.values()):
            if handle.kind in ("device", "shadow") and not handle.on_host and handle.ordinal < len(names):
                used[names[handle.ordinal]] = used.get(names[handle.ordinal], 0) + handle.size
        used[names[0]] = used.get(names[0], 0) + process.device_bytes
    return used


class Inventory:
    def __init__(self, memory: int) -> None:
        self._memory = memory  # of each cpu or null device, as configured; 0: the device's default
        self._nvml: Any = None
        self._nvml_failed = False
        self._initialising = threading.Lock()
        self._threads = DriverThreads()

    def ask(self, device: str, known: str | None, question: Callable[[Any, Any], T]) -> T:
        """What NVML answers of a GPU, for its module and its handle. `known`: its UUID, as its programs see it. Raises
        NVMLError; Silent."""

        def put() -> T:
            nvml = self.nvml()
            if known is None:  # nobody has used it: by bus, as servers count
                handle = nvml.nvmlDeviceGetHandleByIndex(int(device.partition(":")[2]))
            else:
                handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.UUID(known)}".encode())
            return question(nvml, handle)

        return self._threads.ask(device, put)

    def read(self, device: str, description: Description | None, held: int) -> Reading:
        """`description`: what its programs see; None: it had none yet. May wait for the driver."""
        if device.startswith("cuda:"):
            return self._read_gpu(device, description)
        name, default = UNOPENED.get(device.partition(":")[0], (None, None))
        total = (description.total_bytes if description is not None else 0) or self._memory or default
        free = None if total is None else max(0, total - held)
        return Reading(name=name, total_bytes=total, used_bytes=held, free_bytes=free)

    def uuid(self, device: str) -> str | None:
        """As NVML and the device's programs say it, without `GPU-`. May wait for the driver, the first time."""
        if not device.startswith("cuda:"):
            return None
        nvml = self.nvml()
        if nvml is None:
            return None
        try:
            found = self.ask(device, None, lambda nvml, handle: str(nvml.nvmlDeviceGetUUID(handle)))
        except (nvml.NVMLError, Silent):
            return None
        return found.removeprefix("GPU-").lower()

    def _read_gpu(self, device: str, description: Description | None) -> Reading:
        nvml = self.nvml()
        if nvml is None:
            return Reading(healthy=False, why="NVML cannot be used")
        try:
            return self.ask(device, None if description is None else description.uuid, _reading)
        except Silent:
            return Reading(healthy=False, why="NVML does not answer")
        except nvml.NVMLError as error:
            return Reading(healthy=False, why=f"NVML: {error}")

    def nvml(self) -> Any:
        """NVML's module, initialised; None: it cannot be used. May wait for the driver, the first time."""
        with self._initialising:  # each device has a thread of its own, and what fails is reported once
            if self._nvml is None and not self._nvml_failed:
                try:
                    import pynvml

                    pynvml.nvmlInit()
                    self._nvml = pynvml
                except Exception as error:
                    self._nvml_failed = True
                    logger.warning("GPUs' memory and utilisation are not known", why=f"NVML: {error}")
        return self._nvml


def _reading(nvml: Any, handle: Any) -> Reading:
    name = nvml.nvmlDeviceGetName(handle)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    share: float | None = None
    with contextlib.suppress(nvml.NVMLError):
        share = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    return Reading(
        name=name.decode(errors="replace") if isinstance(name, bytes) else str(name), total_bytes=int(memory.total),
        used_bytes=int(memory.used), free_bytes=int(memory.free), utilisation=share,
    )  # fmt: skip
