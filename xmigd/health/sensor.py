"""What NVML says of the health of GPUs: read now and then, and its events. What it does not know is no finding."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

from xmigd import log
from xmigd.devices.driver_threads import ANSWER_WITHIN, Silent
from xmigd.devices.inventory import Inventory
from xmigd.health import grades
from xmigd.health.grades import Found

logger = log.get("health")

WAIT_MS = 500  # for an event, before the thread looks whether it is to end


class Sensor:
    """`uuid` of a device as its programs see it; None: it had none yet."""

    def __init__(self, devices: Sequence[str], inventory: Inventory, uuid: Callable[[str], str | None]) -> None:
        self.devices = [device for device in devices if device.startswith("cuda:")]
        self._inventory = inventory
        self._uuid = uuid
        self._bus: dict[str, str] = {}  # devices by their place on the bus
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def read(self, device: str) -> list[Found]:
        """May wait for the driver."""
        nvml = self._inventory.nvml()
        if nvml is None:
            return []
        try:
            return self._inventory.ask(device, self._uuid(device), lambda nvml, gpu: self._read(nvml, device, gpu))
        except Silent:
            return [grades.of_silence(ANSWER_WITHIN)]
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                return [grades.LOST]
            return [grades.RESET_REQUIRED] if error.value == nvml.NVML_ERROR_RESET_REQUIRED else []

    def _read(self, nvml: Any, device: str, gpu: Any) -> list[Found]:
        with contextlib.suppress(nvml.NVMLError):
            pci = nvml.nvmlDeviceGetPciInfo_v3(gpu)
            self._bus[f"{pci.domain:08x}:{pci.bus:02x}:{pci.device:02x}"] = device
        return [*_remapping(nvml, gpu), *_recovery_action(nvml, gpu)]

    def device_at(self, bus: str) -> str | None:
        """As the kernel's log names it: `00000000:65:00`, without the function."""
        return self._bus.get(bus)

    # --- events -------------------------------------------------------------------------------------------------------

    def watch(self, xid: Callable[[str, int], object]) -> None:
        """`xid` is called in a thread, with the device and the Xid."""
        if self.devices:
            self._thread = threading.Thread(target=self._watch, args=(xid,), name="health", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def _watch(self, xid: Callable[[str, int], object]) -> None:
        nvml = self._inventory.nvml()
        if nvml is None:
            return
        watched: dict[str, str] = {}

        def register(nvml: Any, gpu: Any) -> str:
            nvml.nvmlDeviceRegisterEvents(gpu, nvml.nvmlEventTypeXidCriticalError, events)
            return str(nvml.nvmlDeviceGetUUID(gpu))

        try:
            events = nvml.nvmlEventSetCreate()
            for device in self.devices:
                with contextlib.suppress(nvml.NVMLError, Silent):
                    watched[self._inventory.ask(device, self._uuid(device), register)] = device
        except nvml.NVMLError as error:
            logger.info("NVML reports no Xids", why=str(error))
            return
        while watched and not self._stopping.is_set():
            try:
                event = nvml.nvmlEventSetWait_v2(events, WAIT_MS)
                found = watched.get(nvml.nvmlDeviceGetUUID(event.device))
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_TIMEOUT:
                    # A lost GPU makes every wait fail at once; its Xid is in the kernel's log, too.
                    self._stopping.wait(WAIT_MS / 1000)
                continue
            if found is not None:
                xid(found, int(event.eventData))


def _remapping(nvml: Any, gpu: Any) -> list[Found]:
    try:
        _, _, pending, failed = nvml.nvmlDeviceGetRemappedRows(gpu)
    except nvml.NVMLError as error:
        _raise_if_gone(nvml, error)
        return []  # a device without it
    return [grades.REMAP_FAILED] if failed else [grades.REMAP_PENDING] if pending else []


def _recovery_action(nvml: Any, gpu: Any) -> list[Found]:
    try:
        [value] = nvml.nvmlDeviceGetFieldValues(gpu, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    except nvml.NVMLError as error:
        _raise_if_gone(nvml, error)
        return []
    if value.nvmlReturn != nvml.NVML_SUCCESS:  # a driver before R560
        return []
    found = grades.of_recovery_action(int(value.value.uiVal))
    return [] if found is None else [found]


def _raise_if_gone(nvml: Any, error: Any) -> None:
    if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
        raise error
