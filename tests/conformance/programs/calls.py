"""CUDA for the conformance programs, through ctypes: the runtime ($CUDART, a libcudart) and the driver.

A program here is an ordinary CUDA program. It checks what it can with ``expect`` and prints what has to be the same
in every run with ``say``; nothing in it knows of xMIG.

With XMIG_TEST_COMPARED its output is compared with a native run's (tests/gpu/conformance.py): it goes on after what is
not as expected, so that one run tells of all of it, and leaves out what no native run can be queried (``left_out``).
"""

from __future__ import annotations

import ctypes
import importlib
import os
import random
import sys
import zlib
from collections.abc import Callable
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_void_p
from typing import Any

__all__ = [
    "DRIVER",
    "RUNTIME",
    "CudaError",
    "Dim3",
    "byref",
    "c_char_p",
    "c_float",
    "c_int",
    "c_size_t",
    "c_uint",
    "c_void_p",
    "event",
    "expect",
    "expect_error",
    "function_of",
    "image",
    "in_one_go",
    "kernel",
    "launch",
    "left_out",
    "malloc",
    "pack",
    "pattern",
    "read",
    "say",
    "stream",
    "write",
]

H2H, H2D, D2H, D2D, DEFAULT = range(5)  # cudaMemcpyKind
COMPARED = "XMIG_TEST_COMPARED" in os.environ


class CudaError(Exception):
    """A call that did not return success."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} returned {code}")
        self.code = code


class Library:
    """A shared library whose functions return an error code. Integers are passed as 64-bit words: on x86-64 right
    for every integer and pointer parameter."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)

    def code(self, name: str, *arguments: Any) -> int:
        """Call and return the error code."""
        words = [ctypes.c_uint64(a & (2**64 - 1)) if isinstance(a, int) else a for a in arguments]
        return int(getattr(self._library, name)(*words))

    def has(self, name: str) -> bool:
        """Is there such a function?"""
        return hasattr(self._library, name)

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> None:
            code = self.code(name, *arguments)
            if code and COMPARED:
                expect(False, f"{name} returned {code}")
            elif code:
                raise CudaError(name, code)

        return call


RUNTIME = Library(os.environ["CUDART"])
DRIVER = Library("libcuda.so.1")


def expect(condition: bool, what: str) -> None:
    """Stop the program when something is not as it has to be."""
    if condition:
        return
    if not COMPARED:
        raise SystemExit(f"not as expected: {what}")
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals["__name__"] in (__name__, "nodes"):
        frame = frame.f_back
    say(f"not as expected in line {frame.f_lineno}: {what}")


def left_out(why: str) -> bool:
    """Is what follows left out, since the output is compared with a native run's? ``why``: what a native run crashes
    with, what CUDA leaves undefined, or what xMIG refuses or allows where the driver does not."""
    if COMPARED:
        say("left out:", why)
    return COMPARED


def expect_error(library: Library, code: int, name: str, *arguments: Any) -> None:
    """A call that has to fail with this code."""
    got = library.code(name, *arguments)
    expect(got == code, f"{name} returned {got}, not {code}")
    say(name, "returns", got)


def stop_here() -> None:
    """Where a test stops the program every few lines (start.py), it stops here, too, each time."""
    if "XMIG_TEST_STOP_EVERY" in os.environ:
        importlib.import_module("start").stop()


def in_one_go(*calls: Callable[[], object]) -> None:
    """Call them one after the other. A test that stops the program every few lines does not stop it between them: while
    the device waits for the program, the program is not moved."""
    for call in calls:
        call()


def say(*words: object) -> None:
    """A line of output that every run has to repeat; bytes are shown as length and checksum."""
    print(*(f"{len(w)}:{zlib.crc32(w):08x}" if isinstance(w, bytes) else w for w in words), flush=True)


def pattern(size: int, seed: int = 0) -> bytes:
    """Bytes that look random and are the same in every run."""
    return random.Random(seed).randbytes(size)


def malloc(size: int) -> int:
    """Device memory."""
    pointer = c_void_p()
    RUNTIME.cudaMalloc(byref(pointer), size)
    return pointer.value or 0


def write(pointer: int, data: bytes) -> None:
    """Copy bytes to the device."""
    RUNTIME.cudaMemcpy(pointer, c_char_p(data), len(data), H2D)


def read(pointer: int, size: int) -> bytes:
    """Copy bytes from the device."""
    buffer = ctypes.create_string_buffer(size)
    RUNTIME.cudaMemcpy(buffer, pointer, size, D2H)
    return buffer.raw


class Dim3(ctypes.Structure):
    """dim3, passed by value."""

    _fields_ = (("x", c_uint), ("y", c_uint), ("z", c_uint))


def image() -> bytes:
    """The kernels of these programs (kernels.c, kernels.cu), as a module image."""
    with open(os.environ["KERNELS"], "rb") as file:
        return file.read()


_library = c_void_p()


def kernel(name: str) -> int:
    """A kernel of kernels.c, by the runtime's library interface; good for cuLaunchKernel as well."""
    if not _library.value:
        RUNTIME.cudaLibraryLoadData(byref(_library), c_char_p(image()), None, None, 0, None, None, 0)
    found = c_void_p()
    RUNTIME.cudaLibraryGetKernel(byref(found), _library, c_char_p(name.encode()))
    return found.value or 0


def function_of(kernel: int) -> int:
    """A kernel's function in the current context: what a graph's node takes, which has no room for a kernel there."""
    found = c_void_p()
    DRIVER.cuKernelGetFunction(byref(found), kernel)
    return found.value or 0


def pack(*arguments: Any) -> Any:
    """The array of pointers that a launch takes as kernelParams. Integers are 64-bit words; everything else is a
    ctypes value. It keeps its values alive."""
    values = [ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments]
    array = (c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
    array.values = values  # type: ignore[attr-defined]
    return array


def launch(function: int, blocks: int, threads: int, *arguments: Any, stream: Any = 0) -> None:
    """cudaLaunchKernel, one-dimensional."""
    RUNTIME.cudaLaunchKernel(function, Dim3(blocks, 1, 1), Dim3(threads, 1, 1), pack(*arguments), 0, stream)


def stream(flags: int = 1) -> c_void_p:
    """A stream; not waited for by the legacy one, unless ``flags`` is 0."""
    made = c_void_p()
    RUNTIME.cudaStreamCreateWithFlags(byref(made), flags)
    return made


def event(flags: int = 2) -> c_void_p:
    """An event; without its time, unless ``flags`` is 0."""
    made = c_void_p()
    RUNTIME.cudaEventCreateWithFlags(byref(made), flags)
    return made
