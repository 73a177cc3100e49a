"""A program of several devices that uses each when it is to: each line on standard input is what it does next, and with
which of its devices; each answer what came of it."""

import os
import sys
from ctypes import CDLL, POINTER, Structure, byref, c_int, c_size_t, c_uint, c_uint64, c_ulonglong, c_ushort, c_void_p

from calls import say

DRIVER = CDLL("libcuda.so.1")
WORDS = 1 << 18
GRANULE = 2 << 20
contexts: dict[int, c_void_p] = {}
memories: dict[int, tuple[c_uint64, int]] = {}  # and what is written there


class Location(Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class Properties(Structure):
    _fields_ = (
        ("type", c_int), ("handles", c_int), ("location", Location), ("security", c_void_p), ("flags", c_ushort * 4),
    )  # fmt: skip


def retain(device: int) -> int:
    contexts[device] = c_void_p()
    return int(DRIVER.cuDevicePrimaryCtxRetain(byref(contexts[device]), device))


def work(device: int) -> int:
    """Counts in its memory."""
    DRIVER.cuCtxSetCurrent(contexts[device])
    if device not in memories:
        memory = c_uint64()
        if error := DRIVER.cuMemAlloc_v2(byref(memory), c_size_t(4 * WORDS)):
            return -int(error)
        memories[device] = memory, 0
    memory, written = memories[device]
    got = (c_uint * WORDS)()
    if written and ((error := DRIVER.cuMemcpyDtoH_v2(got, memory, c_size_t(4 * WORDS))) or set(got) != {written}):
        return -int(error or 1000)
    memories[device] = memory, written + 1
    if error := DRIVER.cuMemsetD32_v2(memory, c_uint(written + 1), c_size_t(WORDS)):
        return -int(error)
    return written + 1


def module(device: int) -> int:
    """Code, whose image a recovery takes over beside memory."""
    DRIVER.cuCtxSetCurrent(contexts[device])
    return int(DRIVER.cuModuleLoad(byref(c_void_p()), os.environ["KERNELS"].encode()))


def place(device: int) -> int:
    """Memory on a device by its number, which the current context's device cannot reach."""
    handle = c_ulonglong()
    properties = Properties(type=1, location=Location(1, device))
    return int(DRIVER.cuMemCreate(byref(handle), c_size_t(GRANULE), byref(properties), c_ulonglong(0)))


def peer(device: int) -> int:
    """The current context's device reaches this one's memory, and copies from there."""
    own = next(each for each in memories if each != device)
    DRIVER.cuCtxSetCurrent(contexts[own])
    if error := DRIVER.cuCtxEnablePeerAccess(contexts[device], 0):
        return -int(error)
    if error := DRIVER.cuMemcpyDtoD_v2(memories[own][0], memories[device][0], c_size_t(4 * WORDS)):
        return -int(error)
    memories[own] = memories[own][0], memories[device][1]
    return 0


DRIVER.cuMemCreate.argtypes = [POINTER(c_ulonglong), c_size_t, POINTER(Properties), c_ulonglong]
for line in sys.stdin:
    what, _, device = line.strip().partition(" ")
    say({"retain": retain, "work": work, "module": module, "place": place, "peer": peer}[what](int(device)))
