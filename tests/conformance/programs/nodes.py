"""The structures in which the driver's functions speak of graphs' nodes, through ctypes."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint, c_void_p
from typing import Any

from calls import DRIVER, Dim3, function_of, pack

KERNEL, MEMCPY, MEMSET, HOST, CHILD, EMPTY, WAIT, RECORD = range(8)
SIGNAL_SEMAPHORE, ALLOCATE, FREE, BATCH, CONDITIONAL = 8, 10, 11, 12, 13
IF, WHILE, SWITCH = range(3)
MOVE = 1  # a child graph's ownership
ASSIGN_DEFAULT = 1
PINNED, DEVICE = 1, 2  # CUmemorytype
WAIT_32, WRITE_32, WAIT_64, WRITE_64 = 1, 2, 4, 5

HostFunction = ctypes.CFUNCTYPE(None, c_void_p)


class KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2, of which v1 is the beginning."""

    _fields_ = (
        ("function", c_void_p),
        ("grid", Dim3),
        ("block", Dim3),
        ("shared", c_uint),
        ("parameters", c_void_p),
        ("extra", c_void_p),
        ("kernel", c_void_p),
        ("context", c_void_p),
    )


class Side(ctypes.Structure):
    """The source of a CUDA_MEMCPY3D; its destination."""

    _fields_ = (
        ("x", c_size_t),
        ("y", c_size_t),
        ("z", c_size_t),
        ("lod", c_size_t),
        ("type", c_int),
        ("host", c_void_p),
        ("device", ctypes.c_uint64),
        ("array", c_void_p),
        ("reserved", c_void_p),
        ("pitch", c_size_t),
        ("height", c_size_t),
    )


class Copy(ctypes.Structure):
    """CUDA_MEMCPY3D."""

    _fields_ = (("source", Side), ("to", Side), ("width", c_size_t), ("rows", c_size_t), ("depth", c_size_t))


class MemsetParams(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = (
        ("to", ctypes.c_uint64),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("element", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
        ("context", c_void_p),  # of v2 only
    )


class HostParams(ctypes.Structure):
    """CUDA_HOST_NODE_PARAMS."""

    _fields_ = (("function", c_void_p), ("data", c_void_p))


class MemoryOperation(ctypes.Structure):
    """CUstreamBatchMemOpParams: a wait or a write."""

    _fields_ = (
        ("operation", c_int),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", c_uint),
        ("alias", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
    )


class BatchParams(ctypes.Structure):
    """CUDA_BATCH_MEM_OP_NODE_PARAMS."""

    _fields_ = (("context", c_void_p), ("count", c_uint), ("all", c_void_p), ("flags", c_uint))


class ChildParams(ctypes.Structure):
    """CUDA_CHILD_GRAPH_NODE_PARAMS."""

    _fields_ = (("graph", c_void_p), ("ownership", c_int))


class ConditionalParams(ctypes.Structure):
    """CUDA_CONDITIONAL_NODE_PARAMS."""

    _fields_ = (
        ("handle", ctypes.c_uint64),
        ("type", c_int),
        ("size", c_uint),
        ("graphs", ctypes.POINTER(c_void_p)),
        ("context", c_void_p),
    )


class AllocationParams(ctypes.Structure):
    """CUDA_MEM_ALLOC_NODE_PARAMS."""

    _fields_ = (
        ("type", c_int),
        ("handles", c_int),
        ("location", c_int),
        ("device", c_int),
        ("rest", ctypes.c_uint64 * 9),
        ("access", c_void_p),
        ("count", c_size_t),
        ("size", c_size_t),
        ("address", ctypes.c_uint64),
    )


class CopyNodeParams(ctypes.Structure):
    """CUDA_MEMCPY_NODE_PARAMS."""

    _fields_ = (("flags", c_int), ("reserved", c_int), ("context", c_void_p), ("copy", Copy))


class AnyParams(ctypes.Union):
    """What CUgraphNodeParams holds."""

    _fields_ = (
        ("padding", ctypes.c_uint64 * 29),
        ("kernel", KernelParams),
        ("copy", CopyNodeParams),
        ("memset", MemsetParams),
        ("host", HostParams),
        ("child", ChildParams),
        ("event", c_void_p),
        ("batch", BatchParams),
        ("conditional", ConditionalParams),
        ("allocation", AllocationParams),
        ("address", ctypes.c_uint64),  # of what is freed
    )


class NodeParams(ctypes.Structure):
    """CUgraphNodeParams."""

    _fields_ = (("type", c_int), ("reserved", c_int * 3), ("of", AnyParams), ("end", ctypes.c_uint64))


def current_context() -> c_void_p:
    """The calling thread's."""
    context = c_void_p()
    DRIVER.cuCtxGetCurrent(byref(context))
    return context


def new_graph() -> c_void_p:
    """An empty one."""
    made = c_void_p()
    DRIVER.cuGraphCreate(byref(made), 0)
    return made


def executable(graph: c_void_p) -> c_void_p:
    """What can be launched."""
    made = c_void_p()
    DRIVER.cuGraphInstantiateWithFlags(byref(made), graph, 0)
    return made


def kernel_params(kernel: int, *arguments: Any) -> KernelParams:
    """A launch of a kernel's function in the current context: one block of 32 threads."""
    return function_params(function_of(kernel), *arguments)


def function_params(function: int, *arguments: Any) -> KernelParams:
    """The same, of a function. It keeps its arguments alive."""
    packed = pack(*arguments)
    made = KernelParams(function, Dim3(1, 1, 1), Dim3(32, 1, 1), 0, ctypes.addressof(packed), None, None, None)
    made.packed = packed
    return made


def add_kernel(graph: c_void_p, after: list[c_void_p], kernel: int, *arguments: Any) -> c_void_p:
    """A kernel node."""
    node = c_void_p()
    waits = (c_void_p * len(after))(*after)
    DRIVER.cuGraphAddKernelNode_v2(byref(node), graph, waits, len(after), byref(kernel_params(kernel, *arguments)))
    return node


def add_child(graph: c_void_p, after: list[c_void_p], child: c_void_p, ownership: int = 0) -> c_void_p:
    """A node that is a graph."""
    params = NodeParams(CHILD)
    params.of.child = ChildParams(child, ownership)
    node = c_void_p()
    waits = (c_void_p * len(after))(*after)
    DRIVER.cuGraphAddNode_v2(byref(node), graph, waits, None, len(after), byref(params))
    return node


def condition(graph: c_void_p, value: int = 0, flags: int = 0) -> int:
    """A conditional handle."""
    handle = ctypes.c_uint64()
    DRIVER.cuGraphConditionalHandleCreate(byref(handle), graph, current_context(), value, flags)
    return handle.value


def conditional_params(handle: int, kind: int, size: int) -> NodeParams:
    """For a conditional node."""
    params = NodeParams(CONDITIONAL)
    params.of.conditional = ConditionalParams(handle, kind, size, None, current_context())
    return params


def add_conditional(
    graph: c_void_p, after: list[c_void_p], handle: int, kind: int, size: int = 1
) -> tuple[c_void_p, list[c_void_p]]:
    """A conditional node, and the graphs of its bodies."""
    params = conditional_params(handle, kind, size)
    node = c_void_p()
    waits = (c_void_p * len(after))(*after)
    DRIVER.cuGraphAddNode_v2(byref(node), graph, waits, None, len(after), byref(params))
    return node, [c_void_p(params.of.conditional.graphs[i]) for i in range(size)]
