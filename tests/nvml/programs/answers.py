"""Errors, and what is not supported."""

import ctypes
from collections.abc import Callable
from typing import Any

import pynvml

# Looked up by name, and called or taken for a defect of the library if they are not there.
LOOKED_UP = [
    "Init", "Init_v2", "Shutdown", "ErrorString", "SystemGetCudaDriverVersion_v2", "DeviceGetCount",
    "DeviceGetCount_v2", "DeviceGetHandleByIndex", "DeviceGetHandleByIndex_v2", "DeviceGetHandleByPciBusId",
    "DeviceGetHandleByPciBusId_v2", "DeviceGetHandleByUUID", "DeviceGetIndex", "DeviceGetUUID",
    "DeviceGetMinorNumber", "DeviceGetP2PStatus", "DeviceGetCudaComputeCapability", "DeviceGetFieldValues",
    "DeviceGetGpuFabricInfoV", "DeviceGetNvLinkState", "DeviceGetNvLinkCapability", "DeviceGetNvLinkRemotePciInfo",
    "DeviceGetNvLinkRemotePciInfo_v2", "DeviceGetNvLinkRemoteDeviceType", "DeviceGetComputeRunningProcesses",
]  # fmt: skip


def error_of(call: Callable[..., Any], *arguments: Any) -> int:
    try:
        call(*arguments)
    except pynvml.NVMLError as error:
        return int(error.value)
    return 0


library = ctypes.CDLL("libnvidia-ml.so.1")
assert not [name for name in LOOKED_UP if not hasattr(library, "nvml" + name)]

handle = ctypes.c_void_p()
assert library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)) == pynvml.NVML_ERROR_UNINITIALIZED
assert library.nvmlDeviceGetPowerUsage(None, None) == pynvml.NVML_ERROR_UNINITIALIZED
assert library.nvmlShutdown() == pynvml.NVML_ERROR_UNINITIALIZED
library.nvmlErrorString.restype = ctypes.c_char_p
texts = {library.nvmlErrorString(code) for code in (0, 1, 2, 3, 6, 7, 9, 15, 999)}
assert len(texts) == 9
assert all(texts)

pynvml.nvmlInit()
pynvml.nvmlInit()
pynvml.nvmlShutdown()
one, other = (pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(2))
assert pynvml.nvmlSystemGetCudaDriverVersion() >= 12000

for name in ("PowerUsage", "UtilizationRates", "PerformanceState", "MinorNumber", "EnforcedPowerLimit", "Serial"):
    assert error_of(getattr(pynvml, f"nvmlDeviceGet{name}"), one) == pynvml.NVML_ERROR_NOT_SUPPORTED, name
for name in ("NvLinkState", "NvLinkRemotePciInfo", "Temperature", "ClockInfo"):
    assert error_of(getattr(pynvml, f"nvmlDeviceGet{name}"), one, 0) == pynvml.NVML_ERROR_NOT_SUPPORTED, name
assert error_of(pynvml.nvmlDeviceGetVgpuMetadata, one) == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND

assert error_of(pynvml.nvmlDeviceGetHandleByIndex, 2) == pynvml.NVML_ERROR_INVALID_ARGUMENT
assert error_of(pynvml.nvmlDeviceGetHandleByUUID, "GPU-0") == pynvml.NVML_ERROR_NOT_FOUND
assert error_of(pynvml.nvmlDeviceGetHandleByPciBusId, "FFFF:FF:1F.0") == pynvml.NVML_ERROR_NOT_FOUND
assert error_of(pynvml.nvmlDeviceGetHandleByPciBusId, "bus") == pynvml.NVML_ERROR_INVALID_ARGUMENT
assert error_of(pynvml.nvmlDeviceGetName, handle) == pynvml.NVML_ERROR_INVALID_ARGUMENT
assert library.nvmlDeviceGetUUID(one, ctypes.create_string_buffer(10), 10) == pynvml.NVML_ERROR_INSUFFICIENT_SIZE
wrong = pynvml.c_nvmlMemory_v2_t(version=1)
assert library.nvmlDeviceGetMemoryInfo_v2(one, ctypes.byref(wrong)) == pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH

# What must not fail although there is nothing to tell.
assert pynvml.nvmlDeviceGetComputeRunningProcesses(one) == []
assert pynvml.nvmlDeviceGetGraphicsRunningProcesses(one) == []
assert [v.nvmlReturn for v in pynvml.nvmlDeviceGetFieldValues(one, [1, 2])] == [pynvml.NVML_ERROR_NOT_SUPPORTED] * 2
READ, NVLINK, OK, NOT_SUPPORTED = 0, 2, 0, 5  # nvmlGpuP2PCapsIndex_t, nvmlGpuP2PStatus_t
for second, index, expected in ((one, READ, OK), (other, READ, OK), (one, NVLINK, NOT_SUPPORTED)):
    status = ctypes.c_int(-1)
    assert library.nvmlDeviceGetP2PStatus(one, second, index, ctypes.byref(status)) == 0
    assert status.value == expected

pynvml.nvmlShutdown()
assert error_of(pynvml.nvmlDeviceGetCount) == pynvml.NVML_ERROR_UNINITIALIZED
