"""What the kernel shows of devices. The arguments: what each query is to be answered with; `-`: not supported."""

import sys
from collections.abc import Callable
from typing import Any

import pynvml


def answer(call: Callable[..., Any], *arguments: Any) -> str:
    try:
        return str(call(*arguments))
    except pynvml.NVMLError as error:
        return "-" if error.value == pynvml.NVML_ERROR_NOT_SUPPORTED else str(error)


pynvml.nvmlInit()
device = pynvml.nvmlDeviceGetHandleByIndex(0)
found = [
    answer(pynvml.nvmlSystemGetDriverVersion),
    answer(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, device),
    answer(pynvml.nvmlDeviceGetCurrPcieLinkWidth, device),
    answer(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, device),
    answer(pynvml.nvmlDeviceGetMaxPcieLinkWidth, device),
]
assert found == sys.argv[1:], found
pynvml.nvmlShutdown()
assert answer(pynvml.nvmlSystemGetDriverVersion) == "Uninitialized"
