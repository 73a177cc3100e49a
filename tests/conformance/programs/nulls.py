"""Null pointers where the driver takes them: halves of an answer that nobody wants, empty lists, copies of nothing.

The table is what cuda.h says of each function ("may be NULL", "can be NULL", "ignored"), and what the driver does where
it says nothing."""

import os
from ctypes import CFUNCTYPE, Structure, c_uint64
from typing import Any

from calls import DRIVER, byref, c_int, c_size_t, c_uint, c_void_p, expect, image, malloc, say

NULL, PATH = None, os.environ["KERNELS"].encode()
word, size, number, unsigned = c_uint64(), c_size_t(), c_int(), c_uint()
area = malloc(8192)
stream, module, library, graph, context = c_void_p(), c_void_p(), c_void_p(), c_void_p(), c_void_p()
DRIVER.cuStreamCreate(byref(stream), 1)
DRIVER.cuModuleLoad(byref(module), PATH)
DRIVER.cuLibraryLoadFromFile(byref(library), PATH, NULL, NULL, 0, NULL, NULL, 0)
DRIVER.cuGraphCreate(byref(graph), 0)
DRIVER.cuCtxGetCurrent(byref(context))
mark = c_void_p()
DRIVER.cuEventCreate(byref(mark), 2)
empty, node, code, of_library = c_void_p(), c_void_p(), c_void_p(), c_void_p()
DRIVER.cuGraphAddEmptyNode(byref(empty), graph, NULL, 0)
DRIVER.cuModuleGetFunction(byref(code), module, b"fill")
DRIVER.cuLibraryGetKernel(byref(of_library), library, b"fill")


class Copy2D(Structure):
    """CUDA_MEMCPY2D: of nothing, from nowhere to nowhere."""

    _fields_ = [
        ("srcX", c_size_t), ("srcY", c_size_t), ("srcType", c_uint), ("srcHost", c_void_p), ("srcDevice", c_uint64),
        ("srcArray", c_void_p), ("srcPitch", c_size_t), ("dstX", c_size_t), ("dstY", c_size_t), ("dstType", c_uint),
        ("dstHost", c_void_p), ("dstDevice", c_uint64), ("dstArray", c_void_p), ("dstPitch", c_size_t),
        ("width", c_size_t), ("height", c_size_t),
    ]  # fmt: skip


nothing = CFUNCTYPE(None, c_void_p)(lambda _: None)  # a host function that is given nothing


ACCEPTED: list[tuple[Any, ...]] = [
    ("cuMemGetInfo_v2", NULL, byref(size)),
    ("cuMemGetInfo_v2", byref(size), NULL),
    ("cuMemGetAddressRange_v2", NULL, byref(size), area),
    ("cuMemGetAddressRange_v2", byref(word), NULL, area),
    ("cuMemFree_v2", 0),
    ("cuMemcpyDtoH_v2", NULL, area, 0),
    ("cuMemcpyHtoD_v2", area, NULL, 0),
    ("cuMemcpyDtoD_v2", area, area, 0),
    ("cuMemcpyDtoHAsync_v2", NULL, area, 0, stream),
    ("cuMemcpyHtoDAsync_v2", area, NULL, 0, stream),
    ("cuMemsetD8_v2", area, 1, 0),
    ("cuMemsetD8Async", area, 1, 0, stream),
    ("cuCtxGetStreamPriorityRange", NULL, byref(number)),
    ("cuCtxGetStreamPriorityRange", byref(number), NULL),
    ("cuCtxGetStreamPriorityRange", NULL, NULL),
    ("cuCtxGetApiVersion", NULL, byref(unsigned)),
    ("cuCtxGetId", NULL, byref(word)),
    ("cuCtxPushCurrent_v2", context),
    ("cuCtxPopCurrent_v2", NULL),
    ("cuModuleGetGlobal_v2", NULL, byref(size), module, b"launches"),
    ("cuModuleGetGlobal_v2", byref(word), NULL, module, b"launches"),
    ("cuLibraryGetGlobal", NULL, byref(size), library, b"launches"),
    ("cuLibraryGetGlobal", byref(word), NULL, library, b"launches"),
    ("cuFuncGetParamInfo", code, 0, byref(size), NULL),
    ("cuKernelGetParamInfo", of_library, 0, byref(size), NULL),
    ("cuStreamGetCaptureInfo_v2", stream, byref(unsigned), NULL, NULL, NULL, NULL),
    ("cuStreamGetCaptureInfo_v2", stream, byref(unsigned), byref(word), NULL, NULL, NULL),
    ("cuStreamBeginCaptureToGraph", stream, graph, NULL, NULL, 0, 2),
    ("cuStreamGetCaptureInfo_v2", stream, byref(unsigned), NULL, NULL, NULL, NULL),
    ("cuStreamEndCapture", stream, byref(c_void_p())),
    ("cuStreamGetCaptureInfo_v3", stream, byref(unsigned), NULL, NULL, NULL, NULL, NULL),
    ("cuLaunchHostFunc", stream, nothing, NULL),
    ("cuStreamAddCallback", stream, CFUNCTYPE(None, c_void_p, c_int, c_void_p)(lambda *_: None), NULL, 0),
    ("cuGraphGetNodes", graph, NULL, byref(size)),
    ("cuGraphGetRootNodes", graph, NULL, byref(size)),
    ("cuGraphGetEdges", graph, NULL, NULL, byref(size)),
    ("cuGraphGetEdges_v2", graph, NULL, NULL, NULL, byref(size)),
    ("cuGraphNodeGetDependencies", empty, NULL, byref(size)),
    ("cuGraphNodeGetDependencies_v2", empty, NULL, NULL, byref(size)),
    ("cuGraphNodeGetDependentNodes_v2", empty, NULL, NULL, byref(size)),
    ("cuGraphAddEmptyNode", byref(node), graph, NULL, 0),
    ("cuGraphNodeGetDependentNodes", empty, NULL, byref(size)),
    ("cuGraphAddDependencies", graph, NULL, NULL, 0),
    ("cuGraphRemoveDependencies", graph, NULL, NULL, 0),
    ("cuGraphInstantiate_v2", byref(c_void_p()), graph, NULL, NULL, 0),
    ("cuOccupancyMaxPotentialBlockSize", byref(number), byref(c_int()), code, NULL, 0, 0),
    ("cuOccupancyMaxPotentialBlockSizeWithFlags", byref(number), byref(c_int()), code, NULL, 0, 0, 0),
    ("cuLibraryLoadData", byref(c_void_p()), image(), NULL, NULL, 0, NULL, NULL, 0),
    ("cuStreamSynchronize", NULL),
    ("cuStreamQuery", NULL),
    ("cuStreamGetPriority", NULL, byref(number)),
    ("cuStreamGetFlags", NULL, byref(unsigned)),
    ("cuStreamGetCtx", NULL, byref(c_void_p())),
    ("cuEventRecord", mark, NULL),
    ("cuStreamWaitEvent", NULL, mark, 0),
    ("cuMemsetD2D8_v2", area, 64, 1, 0, 4),
    ("cuMemsetD2D8_v2", area, 64, 1, 4, 0),
    ("cuGetProcAddress_v2", b"cuInit", byref(c_void_p()), 12000, 0, NULL),
    ("cuLinkCreate_v2", 0, NULL, NULL, byref(c_void_p())),
    ("cuModuleLoadDataEx", byref(c_void_p()), image(), 0, NULL, NULL),
    ("cuUserObjectCreate", byref(c_void_p()), NULL, nothing, 1, 1),
    ("cuCtxCreate_v2", byref(c_void_p()), 0, 0),
    ("cuCtxSetCurrent", NULL),
    ("cuCtxSetCurrent", context),
    ("cuMemcpy2D_v2", byref(Copy2D(srcType=1, dstType=1))),
]  # fmt: skip

wrong = []
for name, *arguments in ACCEPTED:
    if not DRIVER.has(name):
        continue
    if (error := DRIVER.code(name, *arguments)) != 0:
        wrong.append((name, [a if not hasattr(a, "_obj") else "out" for a in arguments], error))
expect(not wrong, "\n".join(map(str, wrong)))
# A function of this program that is called while Python ends would never return.
expect(DRIVER.code("cuStreamSynchronize", stream) == 0, "the stream goes on")
say(len(ACCEPTED))
