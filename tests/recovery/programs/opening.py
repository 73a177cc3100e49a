"""A program that needs its device when it is to: each line on standard input is what it does next, each answer what
came of it."""

import sys
from ctypes import CDLL, byref, c_char, c_int, c_size_t, c_uint, c_uint64, c_void_p

from calls import say

DRIVER = CDLL("libcuda.so.1")
WORDS = 1 << 20
memory, context, written = c_uint64(), c_void_p(), 0


def ask() -> str:
    """What needs no context."""
    count, total, value, flags, active = c_int(), c_size_t(), c_int(), c_uint(), c_int()
    name, uuid, bus = (c_char * 128)(), (c_char * 16)(), (c_char * 32)()
    results = [
        DRIVER.cuDeviceGetCount(byref(count)),
        DRIVER.cuDeviceGetName(name, 128, 0),
        DRIVER.cuDeviceGetUuid_v2(uuid, 0),
        DRIVER.cuDeviceGetPCIBusId(bus, 32, 0),
        DRIVER.cuDeviceTotalMem_v2(byref(total), 0),
        DRIVER.cuDevicePrimaryCtxGetState(0, byref(flags), byref(active)),
    ]
    attributes = []
    for which in range(1, 120):
        results.append(DRIVER.cuDeviceGetAttribute(byref(value), which, 0))
        attributes.append(value.value)
    found = [count.value, name.value, uuid.raw.hex(), bus.value, total.value, sum(attributes), attributes[74]]
    return f"{set(results)} {found} active {active.value}"


def work() -> int:
    """Counts in device memory."""
    global written
    got = (c_uint * WORDS)()
    if not memory.value:
        DRIVER.cuCtxSetCurrent(context)
        if error := DRIVER.cuMemAlloc_v2(byref(memory), 4 * WORDS):
            return -int(error)
    elif (error := DRIVER.cuMemcpyDtoH_v2(got, memory, 4 * WORDS)) or set(got) != {written}:
        return -int(error or 1000)
    written += 1
    DRIVER.cuMemsetD32_v2(memory, c_uint(written), c_size_t(WORDS))
    return written


for line in sys.stdin:
    match line.strip():
        case "ask":
            say(ask())
        case "retain":
            say(DRIVER.cuDevicePrimaryCtxRetain(byref(context), 0))
        case "create":
            say(DRIVER.cuCtxCreate_v2(byref(context), 0, 0))
        case "work":
            say(work())
        case "info":
            say(DRIVER.cuMemGetInfo_v2(byref(c_size_t()), byref(c_size_t())))
