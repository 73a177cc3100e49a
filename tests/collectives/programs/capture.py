"""Graphs of the driver, for the programs here."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import Structure, byref, c_int, c_uint, c_void_p

from nccl import DRIVER, driver

__all__ = ["UPDATED", "capture", "executable", "launch", "update"]

THREAD = 1
UPDATED = 0


class UpdateInfo(Structure):
    _fields_ = [("result", c_int), ("node", c_void_p), ("from_node", c_void_p)]


def capture(on: int, body: Callable[[], None], mode: int = THREAD) -> c_void_p:
    graph = c_void_p()
    driver("cuStreamBeginCapture_v2", on, mode)
    body()
    driver("cuStreamEndCapture", on, byref(graph))
    return graph


def executable(graph: c_void_p) -> c_void_p:
    made = c_void_p()
    driver("cuGraphInstantiateWithFlags", byref(made), graph, 0)
    return made


def launch(made: c_void_p, on: int) -> None:
    driver("cuGraphLaunch", made, on)


def update(made: c_void_p, graph: c_void_p) -> int:
    """Why it could not be, UPDATED: it was."""
    info = UpdateInfo()
    code = DRIVER.cuGraphExecUpdate_v2(made, graph, byref(info))
    return int(c_uint(info.result).value) if code else UPDATED
