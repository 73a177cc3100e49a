"""Conditional nodes by the driver's own functions: NVRTC compiles kernels that set them, in every kind of node."""

from __future__ import annotations

import ctypes
import hashlib
import json
from typing import Any

import workload
from cuda.bindings import driver, nvrtc

parser = workload.arguments(__doc__, steps=60)
options = parser.parse_args()

SOURCE = b"""
extern "C" __device__ __cudart_builtin__ void CUDARTAPI cudaGraphSetConditional(cudaGraphConditionalHandle, unsigned);
typedef unsigned long long word;
struct several { unsigned count; cudaGraphConditionalHandle all[4]; };
extern "C" __global__ void choose(cudaGraphConditionalHandle h, const word *x) {
  cudaGraphSetConditional(h, (unsigned)*x);
}
extern "C" __global__ void count_down(cudaGraphConditionalHandle h, word *x) {
  *x -= 1;
  cudaGraphSetConditional(h, *x != 0);
}
extern "C" __global__ void choose_one(several s, const word *x) {
  for (unsigned i = 0; i < s.count; ++i) cudaGraphSetConditional(s.all[i], *x == i);
}
extern "C" __global__ void mix(word *x, word value) {
  word i = blockIdx.x * (word)blockDim.x + threadIdx.x;
  x[i] = (x[i] + i + value) * 0xbf58476d1ce4e5b9ull;
}
"""
N = 1024


def call(result: tuple[Any, ...]) -> Any:
    if int(result[0]) != 0:
        raise SystemExit(f"a call failed: {result[0]!r}")
    return result[1] if len(result) == 2 else result[1:]


def compiled() -> bytes:
    program = call(nvrtc.nvrtcCreateProgram(SOURCE, b"conditional.cu", 0, [], []))
    words = [f"--gpu-architecture=sm_{major}{minor}".encode()]
    done = nvrtc.nvrtcCompileProgram(program, len(words), words)
    if int(done[0]) != 0:
        log = bytes(call(nvrtc.nvrtcGetProgramLogSize(program)))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise SystemExit(log.decode())
    image = bytes(call(nvrtc.nvrtcGetCUBINSize(program)))
    call(nvrtc.nvrtcGetCUBIN(program, image))
    return image


call(driver.cuInit(0))
device = call(driver.cuDeviceGet(0))
context = call(driver.cuDevicePrimaryCtxRetain(device))
call(driver.cuCtxSetCurrent(context))
kind = driver.CUdevice_attribute
major = call(driver.cuDeviceGetAttribute(kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device))
minor = call(driver.cuDeviceGetAttribute(kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device))
module = call(driver.cuModuleLoadData(compiled()))
names = (b"choose", b"count_down", b"choose_one", b"mix")
choose, count_down, choose_one, mix = (call(driver.cuModuleGetFunction(module, name)) for name in names)
x, what = call(driver.cuMemAlloc(8 * N)), call(driver.cuMemAlloc(8))
stream = call(driver.cuStreamCreate(1))


def new_graph() -> Any:
    return call(driver.cuGraphCreate(0))


def condition(graph: Any, value: int = 0, flags: int = 0) -> int:
    return int(call(driver.cuGraphConditionalHandleCreate(graph, context, value, flags)))


def add(graph: Any, after: list[Any], function: Any, *numbers: int, blocks: int = 1, packed: bytes = b"") -> Any:
    """A kernel node. The parameters are words, behind the structure `packed`."""
    block = ctypes.create_string_buffer(packed + b"".join(number.to_bytes(8, "little") for number in numbers))
    size = ctypes.c_size_t(len(block) - 1)
    extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(block), 2, ctypes.addressof(size), None)
    params = driver.CUDA_KERNEL_NODE_PARAMS()
    params.func = function
    params.gridDimX, params.gridDimY, params.gridDimZ = blocks, 1, 1
    params.blockDimX, params.blockDimY, params.blockDimZ = (256 if blocks > 1 else 1), 1, 1
    params.extra = ctypes.addressof(extra)
    params.ctx = context
    return call(driver.cuGraphAddKernelNode(graph, after, len(after), params))


def conditional(graph: Any, after: list[Any], handle: int, kind: Any, size: int = 1) -> tuple[Any, list[Any]]:
    params = driver.CUgraphNodeParams()
    params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    params.conditional.handle = driver.CUgraphConditionalHandle(handle)
    params.conditional.type = kind
    params.conditional.size = size
    params.conditional.ctx = context
    node = call(driver.cuGraphAddNode(graph, after, None, len(after), params))
    return node, list(params.conditional.phGraph_out)


IF, WHILE, SWITCH = list(driver.CUgraphConditionalNodeType)[:3]


def everything() -> Any:
    """A loop in which there are a switch, an if with an else, and ifs in ifs."""
    graph = new_graph()
    outer = condition(graph, 1, 1)
    _, (body,) = conditional(graph, [], outer, WHILE)
    which, either = condition(body), condition(body)
    all_of_them = [condition(body) for _ in range(3)]
    last = add(body, [], choose, which, int(what))
    last = add(body, [last], choose, either, int(what))
    packed = b"".join(n.to_bytes(8, "little") for n in (3, *all_of_them, 0))
    last = add(body, [last], choose_one, int(what), packed=packed)
    last, cases = conditional(body, [last], which, SWITCH, 4)
    for number, case in enumerate(cases):
        add(case, [], mix, int(x), 100 + number, blocks=N // 256)
    last, (yes, no) = conditional(body, [last], either, IF, 2)
    add(yes, [], mix, int(x), 200, blocks=N // 256)
    add(no, [], mix, int(x), 201, blocks=N // 256)
    for number, handle in enumerate(all_of_them):
        last, (inside,) = conditional(body, [last], handle, IF)
        start = add(inside, [], mix, int(x), 300 + number, blocks=N // 256)
        deeper = condition(inside)
        start = add(inside, [start], choose, deeper, int(what))
        _, (deep,) = conditional(inside, [start], deeper, IF)
        add(deep, [], mix, int(x), 400 + number, blocks=N // 256)
    add(body, [last], count_down, outer, int(what))
    return graph


graph = everything()
run = call(driver.cuGraphInstantiate(graph, 0))
call(driver.cuMemsetD8(x, 1, 8 * N))
hashes = []
steps = workload.Steps(options, lambda: call(driver.cuStreamSynchronize(stream)))
for number, _ in enumerate(steps):
    call(driver.cuMemcpyHtoD(what, (number % 7 + 1).to_bytes(8, "little"), 8))
    call(driver.cuGraphLaunch(run, stream))
    call(driver.cuStreamSynchronize(stream))
    if number % 10 == 9:
        content = bytearray(8 * N)
        call(driver.cuMemcpyDtoH(content, x, 8 * N))
        hashes.append(hashlib.sha256(content).hexdigest())
    if number == 30:  # and made anew, as a program does whose kernels change
        call(driver.cuGraphExecDestroy(run))
        graph = everything()
        run = call(driver.cuGraphInstantiate(graph, 0))
workload.report(
    options, hashes=hashes, sha256=hashlib.sha256(json.dumps(hashes).encode()).hexdigest(), **steps.figures()
)
