"""Runs programs through the driver interface: `runner.py KERNELS [FILE]`, a program a line, from the file or from
standard input; a line of JSON for each, with the checksums of what it read, or with what failed.

On its own: nothing but Python, libcuda.so.1 and the image of the kernels. It knows nothing of xMIG. Contexts and
modules stay from one program to the next; everything else is freed. After a failure it ends, because nothing is certain
then.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import random
import sys
import zlib
from ctypes import Structure, addressof, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p
from typing import Any

Op = dict[str, Any]
NOT_READY = 600
HOST, DEVICE, UNIFIED = 1, 2, 4  # CUmemorytype
VARIABLE_BYTES = 32


class Failed(Exception):
    """A call did not return success."""


class Driver:
    """libcuda.so.1. All arguments are 64-bit words: right for every integer and pointer on x86-64."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._functions: dict[str, Any] = {}

    def code(self, name: str, *words: int) -> int:
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = getattr(self._library, name)
            function.argtypes = (c_uint64,) * len(words)
        return int(function(*words))

    def __call__(self, name: str, *words: int) -> None:
        if code := self.code(name, *words):
            raise Failed(f"{name} returned {code}")

    def has(self, name: str) -> bool:
        return hasattr(self._library, name)


class Copy2D(Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (*(
        (f"{side}{name}", kind)
        for side in ("src", "dst")
        for name, kind in (("XInBytes", c_size_t), ("Y", c_size_t), ("MemoryType", c_uint), ("Host", c_void_p),
                           ("Device", c_uint64), ("Array", c_void_p), ("Pitch", c_size_t))
    ), ("WidthInBytes", c_size_t), ("Height", c_size_t))  # fmt: skip


class Copy3D(Structure):
    """CUDA_MEMCPY3D, and CUDA_MEMCPY3D_PEER, which has contexts where this one has reserved words."""

    _fields_ = (*(
        (f"{side}{name}", kind)
        for side in ("src", "dst")
        for name, kind in (("XInBytes", c_size_t), ("Y", c_size_t), ("Z", c_size_t), ("LOD", c_size_t),
                           ("MemoryType", c_uint), ("Host", c_void_p), ("Device", c_uint64), ("Array", c_void_p),
                           ("Context", c_void_p), ("Pitch", c_size_t), ("Height", c_size_t))
    ), ("WidthInBytes", c_size_t), ("Height", c_size_t), ("Depth", c_size_t))  # fmt: skip


class KernelNode(Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("func", c_void_p), ("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("params", c_void_p),
        ("extra", c_void_p), ("kern", c_void_p), ("ctx", c_void_p),
    )  # fmt: skip


class SetNode(Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = (
        ("dst", c_uint64), ("pitch", c_size_t), ("value", c_uint), ("elementSize", c_uint), ("width", c_size_t),
        ("height", c_size_t),
    )  # fmt: skip


class HostNode(Structure):
    """CUDA_HOST_NODE_PARAMS."""

    _fields_ = (("fn", c_void_p), ("userData", c_void_p))


class Launch(Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("stream", c_void_p), ("attributes", c_void_p),
        ("count", c_uint),
    )  # fmt: skip


class Location(Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class PoolProperties(Structure):
    """CUmemPoolProps."""

    _fields_ = (
        ("allocType", c_int), ("handleTypes", c_int), ("location", Location), ("security", c_void_p),
        ("maxSize", c_size_t), ("usage", c_ushort), ("reserved", c_ubyte * 54),
    )  # fmt: skip


class Properties(Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int), ("handles", c_int), ("location", Location), ("windows", c_void_p), ("compression", c_ubyte),
        ("rdma", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4),
    )  # fmt: skip


class Access(Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", c_int))


class BatchAttributes(Structure):
    """CUmemcpyAttributes."""

    _fields_ = (("order", c_int), ("srcLocation", Location), ("dstLocation", Location), ("flags", c_uint))


class Given(Structure):
    """What the kernel `given` takes by value."""

    _fields_ = (("one", c_ubyte), ("four", c_uint), ("eight", c_uint64))


class Loaded:
    """A context of the process, with the module in it."""

    def __init__(self, cuda: Driver, device: int, primary: bool, image: Any) -> None:
        self.device = device
        handle, module = c_void_p(), c_void_p()
        if primary:
            cuda("cuDevicePrimaryCtxRetain", addressof(handle), device)
            cuda("cuCtxSetCurrent", handle.value or 0)
        elif cuda.code("cuCtxCreate_v4", addressof(handle), 0, 0, device):
            cuda("cuCtxCreate_v2", addressof(handle), 0, device)
        self.handle = handle.value or 0
        cuda("cuModuleLoadData", addressof(module), addressof(image))
        self.module = module.value or 0
        self._cuda = cuda
        self._functions: dict[str, int] = {}
        variable, size = c_uint64(), c_size_t()
        cuda("cuModuleGetGlobal_v2", addressof(variable), addressof(size), self.module, _text(b"variable"))
        self.variable = variable.value

    def function(self, name: str) -> int:
        if name not in self._functions:
            found = c_void_p()
            self._cuda("cuModuleGetFunction", addressof(found), self.module, _text(name.encode()))
            self._functions[name] = found.value or 0
        return self._functions[name]


_texts: dict[bytes, Any] = {}


def _text(name: bytes) -> int:
    """The address of a name that stays."""
    if name not in _texts:
        _texts[name] = ctypes.create_string_buffer(name)
    return addressof(_texts[name])


HostFunction = ctypes.CFUNCTYPE(None, c_void_p)


class Memory:
    """An object's address, and what it takes to free it."""

    def __init__(self, address: int, kind: str, ctx: int, more: Any = None) -> None:
        self.address = address
        self.kind = kind
        self.ctx = ctx
        self.more = more


class Runner:
    """Runs program after program."""

    def __init__(self, image: bytes) -> None:
        self.cuda = Driver()
        self.cuda("cuInit", 0)
        self._image = ctypes.create_string_buffer(image)
        self._contexts: dict[tuple[int, bool], Loaded] = {}
        self._current = -1
        self._works: dict[int, Op] = {}
        self._failed_on_host: list[str] = []
        self._call = HostFunction(self._on_host)
        self._callback = ctypes.cast(self._call, c_void_p).value or 0
        self._granularity = 0
        self._clear()

    def _clear(self) -> None:
        self.contexts: list[Loaded] = []
        self.memory: dict[str, Memory] = {}
        self.streams: dict[str, int] = {}
        self.events: dict[str, int] = {}
        self.pools: dict[str, int] = {}
        self.graphs: dict[str, tuple[int, list[int]]] = {}
        self.execs: dict[str, tuple[int, list[int]]] = {}
        self.read: list[int] = []
        self._works.clear()
        self._kept: list[Any] = []

    def run(self, program: Op) -> list[int]:
        """The checksums of what it reads. Raises Failed."""
        self._clear()
        for device, primary in program["contexts"]:
            if (device, primary) not in self._contexts:
                self._contexts[device, primary] = Loaded(self.cuda, device, primary, self._image)
                self._current = -1
            self.contexts.append(self._contexts[device, primary])
        self._current = -1
        for number, ctx in enumerate(self.contexts):
            self.memory[f"c{number}"] = Memory(ctx.variable, "variable", number)
        for number, op in enumerate(program["ops"]):
            try:
                getattr(self, f"_{op['op']}")(op)
            except Failed as error:
                raise Failed(f"call {number}, {op['op']}: {error}") from None
        self._free_all()
        if self._failed_on_host:
            raise Failed(self._failed_on_host[0])
        return self.read

    def _free_all(self) -> None:
        cuda = self.cuda
        for number in range(len(self.contexts)):
            self._enter(number)
            cuda("cuCtxSynchronize")
        for handle, _ in self.execs.values():
            cuda("cuGraphExecDestroy", handle)
        for handle, _ in self.graphs.values():
            cuda("cuGraphDestroy", handle)
        for event in self.events.values():
            cuda("cuEventDestroy_v2", event)
        for stream in self.streams.values():
            cuda("cuStreamDestroy_v2", stream)
        for memory in self.memory.values():
            self._release(memory)
        for pool in self.pools.values():
            cuda("cuMemPoolDestroy", pool)

    def _enter(self, ctx: int) -> None:
        """Make a context current."""
        if ctx != self._current:
            self.cuda("cuCtxSetCurrent", self.contexts[ctx].handle)
            self._current = ctx

    def _stream_of(self, op: Op) -> int:
        name = op["stream"]
        return int(name) if name in ("0", "1", "2") else self.streams[name]

    def _at(self, place: list[Any]) -> int:
        return int(self.memory[place[0]].address) + int(place[1])

    # --- memory

    def _alloc(self, op: Op) -> None:
        self._enter(op["ctx"])
        kind, size, found, cuda = op["kind"], op["size"], c_uint64(), self.cuda
        more: Any = None
        if kind == "mem":
            cuda("cuMemAlloc_v2", addressof(found), size)
        elif kind == "async":
            cuda("cuMemAllocAsync", addressof(found), size, self._stream_of(op))
        elif kind == "pool":
            cuda("cuMemAllocFromPoolAsync", addressof(found), size, self.pools[op["pool"]], self._stream_of(op))
        elif kind == "vmm":
            found.value, more = self._map(op["ctx"], size)
        elif kind == "pinned":
            cuda("cuMemHostAlloc", addressof(found), size, op.get("flags", 0))
        else:
            more = mmap.mmap(-1, size)
            found.value = addressof(c_ubyte.from_buffer(more))
            if kind == "registered":
                cuda("cuMemHostRegister_v2", found.value, size, 0)
        self.memory[op["name"]] = Memory(found.value, kind, op["ctx"], more)

    def _map(self, ctx: int, size: int) -> tuple[int, tuple[int, list[int]]]:
        """Two pieces side by side, and the memory across the border between them."""
        cuda, device = self.cuda, self.contexts[ctx].device
        properties = Properties(1, 0, Location(1, device))
        granularity, base = c_size_t(), c_uint64()
        cuda("cuMemGetAllocationGranularity", addressof(granularity), addressof(properties), 0)
        step = granularity.value
        step *= -(-size // step)
        cuda("cuMemAddressReserve", addressof(base), 2 * step, 0, 0, 0)
        handles = []
        for part in range(2):
            handle = c_uint64()
            cuda("cuMemCreate", addressof(handle), step, addressof(properties), 0)
            cuda("cuMemMap", base.value + part * step, step, 0, handle.value, 0)
            handles.append(handle.value)
        access = Access(Location(1, device), 3)
        cuda("cuMemSetAccess", base.value, 2 * step, addressof(access), 1)
        return base.value + step - (size // 2 & ~255), (base.value, [step, *handles])

    def _free(self, op: Op) -> None:
        memory = self.memory.pop(op["name"])
        if op["how"] == "async":
            self._enter(op["ctx"])
            self.cuda("cuMemFreeAsync", memory.address, self._stream_of(op))
        else:
            self._release(memory)

    def _release(self, memory: Memory) -> None:
        cuda = self.cuda
        if memory.kind == "variable":
            return
        self._enter(memory.ctx)
        if memory.kind in ("mem", "async", "pool"):
            cuda("cuMemFree_v2", memory.address)
        elif memory.kind == "vmm":
            base, (step, *handles) = memory.more
            cuda("cuMemUnmap", base, 2 * step)
            for handle in handles:
                cuda("cuMemRelease", handle)
            cuda("cuMemAddressFree", base, 2 * step)
        elif memory.kind == "pinned":
            cuda("cuMemFreeHost", memory.address)
        elif memory.kind == "registered":
            cuda("cuMemHostUnregister", memory.address)

    def _pool(self, op: Op) -> None:
        self._enter(op["ctx"])
        properties, pool = PoolProperties(1, 0, Location(1, self.contexts[op["ctx"]].device)), c_void_p()
        self.cuda("cuMemPoolCreate", addressof(pool), addressof(properties))
        self.pools[op["name"]] = pool.value or 0
        if op.get("threshold"):
            threshold = c_uint64(op["threshold"])
            self.cuda("cuMemPoolSetAttribute", pool.value or 0, 4, addressof(threshold))

    def _destroy_pool(self, op: Op) -> None:
        self.cuda("cuMemPoolDestroy", self.pools.pop(op["pool"]))

    # --- the host's own part

    def _fill(self, op: Op) -> None:
        ctypes.memmove(self._at(op["to"]), random.Random(op["salt"]).randbytes(op["n"]), op["n"])

    def _check(self, op: Op) -> None:
        self.read.append(zlib.crc32(ctypes.string_at(self._at(op["from"]), op["n"])))

    def _read(self, op: Op) -> None:
        self._enter(op["ctx"])
        buffer = (c_ubyte * op["n"])()
        self.cuda("cuMemcpyDtoH_v2", addressof(buffer), self._at(op["from"]), op["n"])
        self.read.append(zlib.crc32(buffer))

    def _on_host(self, number: int | None) -> None:
        try:
            work = self._works[number or 0]
            n, to, source = work["n"], self._at(work["to"]), self._at(work["from"])
            old, other, salt = ctypes.string_at(to, n), ctypes.string_at(source, n), work["salt"]
            made = bytes((a * 5 + b + salt) & 255 for a, b in zip(old, reversed(other)))  # noqa: B905
            ctypes.memmove(to, made, n)
        except Exception as error:  # it would be lost in the driver's thread
            self._failed_on_host.append(f"a host function: {error!r}")

    def _number(self, work: Op) -> int:
        number = len(self._works) + 1
        self._works[number] = work
        return number

    # --- streams, events

    def _stream(self, op: Op) -> None:
        self._enter(op["ctx"])
        made = c_void_p()
        self.cuda("cuStreamCreateWithPriority", addressof(made), op["flags"], op["priority"])
        self.streams[op["name"]] = made.value or 0

    def _destroy_stream(self, op: Op) -> None:
        self.cuda("cuStreamDestroy_v2", self.streams.pop(op["stream"]))

    def _make_event(self, op: Op) -> None:
        self._enter(op["ctx"])
        self.events[op["name"]] = self._new_event(op["flags"])

    def _new_event(self, flags: int) -> int:
        made = c_void_p()
        self.cuda("cuEventCreate", addressof(made), flags)
        return made.value or 0

    def _destroy_event(self, op: Op) -> None:
        self.cuda("cuEventDestroy_v2", self.events.pop(op["event"]))

    def _record(self, op: Op) -> None:
        self._enter(op["ctx"])
        self.cuda("cuEventRecord", self.events[op["event"]], self._stream_of(op))

    def _wait(self, op: Op) -> None:
        self._enter(op["ctx"])
        self.cuda("cuStreamWaitEvent", self._stream_of(op), self.events[op["event"]], 0)

    def _until(self, name: str, *words: int) -> None:
        while code := self.cuda.code(name, *words):
            if code != NOT_READY:
                raise Failed(f"{name} returned {code}")

    def _sync_event(self, op: Op) -> None:
        self.cuda("cuEventSynchronize", self.events[op["event"]])

    def _query_event(self, op: Op) -> None:
        self._until("cuEventQuery", self.events[op["event"]])

    def _sync_stream(self, op: Op) -> None:
        self._enter(op["ctx"])
        self.cuda("cuStreamSynchronize", self._stream_of(op))

    def _query_stream(self, op: Op) -> None:
        self._enter(op["ctx"])
        self._until("cuStreamQuery", self._stream_of(op))

    def _sync_ctx(self, op: Op) -> None:
        self._enter(op["ctx"])
        self.cuda("cuCtxSynchronize")

    # --- work

    def _kernel(self, op: Op, stream: int | None = None) -> None:
        self._enter(op["ctx"])
        where = self._stream_of(op) if stream is None else stream
        function, params, _ = self._parameters(op)
        grid, block, shared = op["grid"], op["block"], self._shared(op)
        how = op.get("how", "plain")
        if how == "ex":
            config = Launch((grid, 1, 1), (block, 1, 1), shared, where, None, 0)
            self.cuda("cuLaunchKernelEx", addressof(config), function, addressof(params), 0)
        elif how == "buffer":
            packed, size = self._packed(op)
            extra = (c_void_p * 5)(1, addressof(packed), 2, addressof(size), 0)  # CU_LAUNCH_PARAM_…
            self.cuda("cuLaunchKernel", function, grid, 1, 1, block, 1, 1, shared, where, 0, addressof(extra))
        else:
            self.cuda("cuLaunchKernel", function, grid, 1, 1, block, 1, 1, shared, where, addressof(params), 0)

    @staticmethod
    def _shared(op: Op) -> int:
        return int(op["block"]) * 4 if op["name"] == "reverse" else 0

    def _arguments(self, op: Op) -> list[Any]:
        name, salt = op["name"], op["salt"]
        outs, ins = [self._at(p) for p in op["out"]], [self._at(p) for p in op.get("in", [])]
        n, words = op["n"], op.get("words", [])
        if name == "mix":
            return [c_uint64(outs[0]), c_uint(n), c_uint64(ins[0]), c_uint(words[0]), c_uint64(ins[1]),
                    c_uint(words[1]), c_uint(salt)]  # fmt: skip
        if name in ("fold", "scatter"):
            return [c_uint64(outs[0]), c_uint(n), c_uint64(ins[0]), c_uint(words[0]), c_uint(salt)]
        if name == "reverse":
            return [c_uint64(outs[0]), c_uint(n), c_uint(salt)]
        if name == "split":
            return [c_uint64(outs[0]), c_uint64(outs[1]), c_uint(n), c_uint64(ins[0]), c_uint(words[0]), c_uint(salt)]
        if name == "bytes":
            return [c_uint64(outs[0]), c_uint(n), c_uint64(ins[0]), c_uint(salt)]
        if name == "given":
            eight = salt * 0x9E3779B97F4A7C15 & (2**64 - 1)
            by_value = Given(salt >> 3 & 255, salt ^ 0x5A5A5A5A, eight ^ 0x0123456789ABCDEF)
            return [c_ubyte(salt & 255), c_uint64(outs[0]), c_ushort(salt & 65535), c_uint(salt), c_uint64(eight),
                    by_value]  # fmt: skip
        return [c_uint64(outs[0]), c_uint(salt)]

    def _parameters(self, op: Op) -> tuple[int, Any, list[Any]]:
        """Function, the array of pointers, and what that points to."""
        values = self._arguments(op)
        params = (c_void_p * len(values))(*(addressof(value) for value in values))
        params.values = values  # type: ignore[attr-defined]
        return self.contexts[op["ctx"]].function(op["name"]), params, values

    def _packed(self, op: Op) -> tuple[Any, c_size_t]:
        """The parameters as they lie in memory, each at its alignment."""
        packed = bytearray()
        for value in self._arguments(op):
            align = ctypes.alignment(value)
            packed += bytes(-len(packed) % align) + bytes(value)
        return (c_ubyte * len(packed)).from_buffer(packed), c_size_t(len(packed))

    def _set(self, op: Op, stream: int | None = None) -> None:
        self._enter(op["ctx"])
        to, bits, value, width, height = self._at(op["to"]), op["bits"], op["value"], op["width"], op["height"]
        flat = height == 1
        words = [to, value, width] if flat else [to, op["pitch"], value, width, height]
        name = f"cuMemsetD{'' if flat else '2D'}{bits}"
        if stream is None and op.get("blocking"):
            self.cuda(f"{name}_v2", *words)
        else:
            self.cuda(f"{name}Async", *words, self._stream_of(op) if stream is None else stream)

    def _value(self, op: Op) -> None:
        self._enter(op["ctx"])
        self.cuda(f"cuStreamWriteValue{op['bits']}_v2", self._stream_of(op), self._at(op["to"]), op["value"], 0)

    def _host(self, op: Op, stream: int | None = None) -> None:
        self._enter(op["ctx"])
        where = self._stream_of(op) if stream is None else stream
        self.cuda("cuLaunchHostFunc", where, self._callback, self._number(op))

    def _copy(self, op: Op, stream: int | None = None) -> None:
        self._enter(op["ctx"])
        via = op["via"]
        where = [] if not via.endswith(("Async", "Async_v2")) else [self._stream_of(op) if stream is None else stream]
        if "bytes" in op:
            self._batch(op, where[0])
            return
        if "2D" in via:
            params2d = Copy2D(WidthInBytes=op["extent"][0], Height=op["extent"][1])
            self._sides(op, params2d)
            self.cuda(via, addressof(params2d), *where)
            return
        if "3D" in via:
            params = self._box(op, peer="Peer" in via)
            self.cuda(via, addressof(params), *where)
            return
        to, source, n = self._at(op["to"]["at"]), self._at(op["from"]["at"]), op["extent"][0]
        if "Peer" in via:
            self.cuda(via, to, self._owner(op["to"]), source, self._owner(op["from"]), n, *where)
        else:
            self.cuda(via, to, source, n, *where)

    def _owner(self, side: Op) -> int:
        return self.contexts[self.memory[side["at"][0]].ctx].handle

    def _box(self, op: Op, *, peer: bool = False) -> Copy3D:
        width, height, depth = op["extent"]
        params = Copy3D(WidthInBytes=width, Height=height, Depth=depth)
        self._sides(op, params)
        if peer:
            params.srcContext, params.dstContext = self._owner(op["from"]), self._owner(op["to"])
        return params

    def _sides(self, op: Op, params: Any) -> None:
        for prefix, side in (("src", op["from"]), ("dst", op["to"])):
            address, on_host = self._at(side["at"]), self.memory[side["at"][0]].kind in HOST_KINDS
            values: dict[str, int] = {"XInBytes": side.get("x", 0), "Y": side.get("y", 0)}
            values["Pitch"] = side.get("pitch", op["extent"][0])
            if isinstance(params, Copy3D):
                values |= {"Z": side.get("z", 0), "Height": side.get("rows", op["extent"][1])}
            if side.get("unified"):
                values |= {"MemoryType": UNIFIED, "Device": address}
            else:
                values |= (
                    {"MemoryType": HOST, "Host": address} if on_host else {"MemoryType": DEVICE, "Device": address}
                )
            for name, value in values.items():
                setattr(params, prefix + name, value)

    def _batch(self, op: Op, stream: int) -> None:
        count = len(op["bytes"])
        to = (c_uint64 * count)(*(self._at(place) for place in op["to"]))
        source = (c_uint64 * count)(*(self._at(place) for place in op["from"]))
        sizes = (c_size_t * count)(*op["bytes"])
        attributes, first = BatchAttributes(order=1), c_size_t(0)  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        words = [addressof(to), addressof(source), addressof(sizes), count, addressof(attributes), addressof(first), 1]
        if op["via"].endswith("_v2"):
            self.cuda("cuMemcpyBatchAsync_v2", *words, stream)
        else:
            failed = c_size_t()
            self.cuda("cuMemcpyBatchAsync", *words, addressof(failed), stream)

    # --- graphs

    def _make_graph(self, op: Op) -> None:
        make = self._captured if op["how"] == "captured" else self._built
        self.graphs[op["name"]] = make(op)

    def _captured(self, op: Op) -> tuple[int, list[int]]:
        cuda, graph = self.cuda, c_void_p()
        streams = [self.streams[name] for name in op["streams"]]
        branches, begun, made = op["branches"], {0}, []
        last: dict[int, int] = {}
        waited = {dep for node in op["nodes"] for dep in node["deps"]}
        events: dict[int, int] = {}
        self._enter(op["ctx"])
        cuda("cuStreamBeginCapture_v2", streams[0], op.get("mode", 2))
        for number, node in enumerate(op["nodes"]):
            branch = node["branch"]
            self._enter(branches[branch])
            for dep in node["deps"]:
                cuda("cuStreamWaitEvent", streams[branch], events[dep], 0)
            begun.add(branch)
            if node["op"] != "empty":
                getattr(self, f"_{node['op']}")(node, streams[branch])
            last[branch] = number
            if number in waited:
                events[number] = self._new_event(2)
                made.append(events[number])
                cuda("cuEventRecord", events[number], streams[branch])
        for branch in sorted(begun - {0}):  # all have to come back
            self._enter(branches[branch])
            event = self._new_event(2)
            made.append(event)
            cuda("cuEventRecord", event, streams[branch])
            cuda("cuStreamWaitEvent", streams[0], event, 0)
        self._enter(op["ctx"])
        cuda("cuStreamEndCapture", streams[0], addressof(graph))
        for event in made:
            cuda("cuEventDestroy_v2", event)
        return graph.value or 0, []

    def _child(self, node: Op, stream: int) -> None:
        """While it is captured: the launch of another graph."""
        self.cuda("cuGraphLaunch", self.execs[node["exec"]][0], stream)

    def _built(self, op: Op) -> tuple[int, list[int]]:
        graph = c_void_p()
        nodes: list[int] = []
        self._enter(op["ctx"])
        self.cuda("cuGraphCreate", addressof(graph), 0)
        for node in op["nodes"]:
            deps = (c_void_p * len(node["deps"]))(*(nodes[dep] for dep in node["deps"]))
            made = c_void_p()
            before = [addressof(made), graph.value or 0, addressof(deps) if node["deps"] else 0, len(node["deps"])]
            self._add(node, before)
            nodes.append(made.value or 0)
        return graph.value or 0, nodes

    def _choice(self, node: Op, before: list[int]) -> None:
        """A conditional node whose handle nobody sets, and its bodies, each a chain."""
        handle, ctx = c_uint64(), self.contexts[node["ctx"]].handle
        self.cuda("cuGraphConditionalHandleCreate", addressof(handle), before[1], ctx, node["value"], 1)
        params = (c_uint64 * 32)(13)  # CUgraphNodeParams, CU_GRAPH_NODE_TYPE_CONDITIONAL
        params[2], params[5] = handle.value, ctx
        params[3] = {"if": 0, "switch": 2}[node["kind"]] | len(node["bodies"]) << 32
        self.cuda("cuGraphAddNode_v2", *before[:3], 0, before[3], addressof(params))
        graphs = (c_uint64 * len(node["bodies"])).from_address(params[4])
        for graph, body in zip(graphs, node["bodies"], strict=True):
            last = c_void_p()
            for number, inner in enumerate(body):
                made = c_void_p()
                self._add(inner, [addressof(made), graph, addressof(last) if number else 0, min(number, 1)])
                last = made

    def _add(self, node: Op, before: list[int]) -> None:
        kind = node["op"]
        if kind == "choice":
            self._choice(node, before)
        elif kind == "empty":
            self.cuda("cuGraphAddEmptyNode", *before)
        elif kind == "child":
            self.cuda("cuGraphAddChildGraphNode", *before, self.graphs[node["graph"]][0])
        else:
            params, ctx = self._node(node)
            name = {"kernel": "Kernel", "set": "Memset", "copy": "Memcpy", "host": "Host"}[kind]
            self.cuda(f"cuGraphAdd{name}Node{'_v2' if kind == 'kernel' else ''}", *before, addressof(params), *ctx)

    def _node(self, node: Op) -> tuple[Any, list[int]]:
        """The parameters of a node, and its context where they do not have it."""
        kind = node["op"]
        context = self.contexts[node["ctx"]].handle
        if kind == "kernel":
            function, pointers, values = self._parameters(node)
            self._kept.append((pointers, values))
            made = KernelNode(function, (node["grid"], 1, 1), (node["block"], 1, 1), self._shared(node),
                              addressof(pointers), None, None, context)  # fmt: skip
            return made, []
        if kind == "set":
            size = node["bits"] // 8
            to, value = self._at(node["to"]), node["value"]
            return SetNode(to, node["pitch"], value, size, node["width"], node["height"]), [context]
        if kind == "copy":
            return self._box(node), [context]
        return HostNode(self._callback, self._number(node)), []

    def _instantiate(self, op: Op) -> None:
        made = c_void_p()
        graph, nodes = self.graphs[op["graph"]]
        self.cuda("cuGraphInstantiateWithFlags", addressof(made), graph, op.get("flags", 0))
        self.execs[op["name"]] = made.value or 0, nodes

    def _launch(self, op: Op) -> None:
        self._enter(op["ctx"])
        self.cuda("cuGraphLaunch", self.execs[op["exec"]][0], self._stream_of(op))

    def _upload(self, op: Op) -> None:
        self._enter(op["ctx"])
        self.cuda("cuGraphUpload", self.execs[op["exec"]][0], self._stream_of(op))

    def _update(self, op: Op) -> None:
        reported = (c_uint64 * 4)()  # CUgraphExecUpdateResultInfo
        self.cuda("cuGraphExecUpdate_v2", self.execs[op["exec"]][0], self.graphs[op["graph"]][0], addressof(reported))

    def _set_node(self, op: Op) -> None:
        run, nodes = self.execs[op["exec"]]
        work = op["work"]
        self._enter(op["ctx"])
        params, ctx = self._node(work)
        name = {"kernel": "Kernel", "set": "Memset", "copy": "Memcpy", "host": "Host"}[work["op"]]
        name = f"cuGraphExec{name}NodeSetParams{'_v2' if work['op'] == 'kernel' else ''}"
        self.cuda(name, run, nodes[op["node"]], addressof(params), *ctx)

    def _enable(self, op: Op) -> None:
        run, nodes = self.execs[op["exec"]]
        self.cuda("cuGraphNodeSetEnabled", run, nodes[op["node"]], int(op["on"]))

    def _destroy_graph(self, op: Op) -> None:
        self.cuda("cuGraphDestroy", self.graphs.pop(op["graph"])[0])

    def _destroy_exec(self, op: Op) -> None:
        self.cuda("cuGraphExecDestroy", self.execs.pop(op["exec"])[0])


HOST_KINDS = ("pinned", "registered", "pageable")


def main() -> int:
    with open(sys.argv[1], "rb") as file:
        image = file.read()
    runner = Runner(image)
    print("ready", flush=True)
    with open(sys.argv[2]) if len(sys.argv) > 2 else sys.stdin as lines:
        for line in lines:
            program = json.loads(line)
            try:
                print(json.dumps({"seed": program["seed"], "read": runner.run(program)}), flush=True)
            except Failed as error:
                print(json.dumps({"seed": program["seed"], "failed": str(error)}), flush=True)
                return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
