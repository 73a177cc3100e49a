"""What NVML says of the devices is what the driver says, before this process uses CUDA and while it does."""

import ctypes
import os
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p, create_string_buffer
from pathlib import Path
from typing import Any

import pynvml

CUDA = ctypes.CDLL("libcuda.so.1")
MIB = 1 << 20


def through_nvml() -> list[tuple[Any, ...]]:
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        assert pynvml.nvmlDeviceGetIndex(handle) == index
        uuid = pynvml.nvmlDeviceGetUUID(handle)
        pci = pynvml.nvmlDeviceGetPciInfo(handle)
        for bus_id in (pci.busId, pci.busIdLegacy, pci.busId.lower()):
            again = pynvml.nvmlDeviceGetHandleByPciBusId(bus_id)
            assert pynvml.nvmlDeviceGetUUID(again) == uuid
        assert pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(uuid)) == index
        name = pynvml.nvmlDeviceGetName(handle)
        capability = tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle))
        mode = pynvml.nvmlDeviceGetComputeMode(handle)
        old, new = (pynvml.nvmlDeviceGetMemoryInfo(handle, version) for version in (None, pynvml.nvmlMemory_v2))
        assert (old.total, old.free + old.used) == (new.total, new.total)
        assert new.free + new.used + new.reserved == new.total
        bus = f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"
        found.append((name, uuid, bus, old.total, capability, mode))
    return found


def through_cuda() -> list[tuple[Any, ...]]:
    count, value, total = c_int(), c_int(), c_size_t()
    assert CUDA.cuDeviceGetCount(byref(count)) == 0
    found = []
    for ordinal in range(count.value):
        name, uuid, bus = create_string_buffer(100), create_string_buffer(16), create_string_buffer(20)
        assert CUDA.cuDeviceGetName(name, 100, ordinal) == 0
        assert CUDA.cuDeviceGetUuid_v2(uuid, ordinal) == 0
        assert CUDA.cuDeviceGetPCIBusId(bus, 20, ordinal) == 0
        assert CUDA.cuDeviceTotalMem_v2(byref(total), ordinal) == 0
        attributes = []
        for which in (75, 76, 20):  # compute capability, compute mode
            assert CUDA.cuDeviceGetAttribute(byref(value), which, ordinal) == 0
            attributes.append(value.value)
        digits = uuid.raw.hex()
        dashed = "-".join(("GPU", digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
        found.append(
            (name.value.decode(), dashed, bus.value.decode(), total.value, tuple(attributes[:2]), attributes[2])
        )
    return found


pynvml.nvmlInit()
before = through_nvml()
assert CUDA.cuDeviceGetCount(byref(c_int())) == 3, "NVML has not initialised CUDA in this process"
assert CUDA.cuInit(0) == 0
assert len(before) == 2
assert before == through_cuda() == through_nvml()

# Memory that this process allocates is seen by it, whichever context is current, and no context is left behind.
context, memory, current, flags, active = c_void_p(), c_uint64(), c_void_p(), c_int(), c_int()
devices = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(2)]
assert CUDA.cuDevicePrimaryCtxRetain(byref(context), 1) == 0
assert CUDA.cuCtxSetCurrent(context) == 0
free = [pynvml.nvmlDeviceGetMemoryInfo(device).free for device in devices]
assert CUDA.cuMemAlloc_v2(byref(memory), c_size_t(64 * MIB)) == 0
for current_one in (context, c_void_p()):
    assert CUDA.cuCtxSetCurrent(current_one) == 0
    now = [pynvml.nvmlDeviceGetMemoryInfo(device).free for device in devices]
    assert now[0] == free[0], (free, now)
    assert free[1] - now[1] >= 64 * MIB, (free, now)
    assert CUDA.cuCtxGetCurrent(byref(current)) == 0
    assert current.value == current_one.value
assert CUDA.cuDevicePrimaryCtxGetState(0, byref(flags), byref(active)) == 0
assert not active.value

# One library of that name, and no device file.
maps = Path("/proc/self/maps").read_text()
assert {line.split()[-1] for line in maps.splitlines() if "libnvidia-ml" in line} == {os.environ["NVML_SHIM"]}
assert "/dev/nvidia" not in maps
for descriptor in Path("/proc/self/fd").iterdir():
    assert not (descriptor.exists() and os.readlink(descriptor).startswith("/dev/nvidia"))

pynvml.nvmlShutdown()
print("devices", len(before))
