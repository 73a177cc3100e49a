"""Two devices that copy to each other in every way, wait for each other, share graphs and pools, and reach each other's
memory once that is enabled."""

from collections.abc import Callable
from ctypes import Structure, Union, c_int, c_uint64, create_string_buffer, string_at

from calls import (
    DEFAULT,
    DRIVER,
    RUNTIME,
    byref,
    c_char_p,
    c_size_t,
    c_uint,
    c_void_p,
    event,
    expect,
    expect_error,
    kernel,
    launch,
    left_out,
    malloc,
    pattern,
    read,
    say,
    stream,
    write,
)

N = 96 << 10  # bytes of an area
PITCH, WIDTH, ROWS = 512, 384, 64
DEVICE = 2  # CUmemorytype


class Box(Structure):
    """CUDA_MEMCPY3D_PEER."""

    _fields_ = (
        *(  # type: ignore[arg-type]
            (name, kind)
            for side in ("src", "dst")
            for name, kind in (
                *((f"{side}_{axis}", c_size_t) for axis in ("x", "y", "z", "lod")),
                (f"{side}_type", c_int),
                *((f"{side}_{what}", c_void_p) for what in ("host", "device", "array", "context")),
                *((f"{side}_{what}", c_size_t) for what in ("pitch", "height")),
            )
        ),
        ("width", c_size_t),
        ("height", c_size_t),
        ("depth", c_size_t),
    )


class Location(Structure):
    """CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class Attributes(Structure):
    """CUmemcpyAttributes."""

    _fields_ = (("order", c_int), ("source", Location), ("destination", Location), ("flags", c_uint))


class Pointer(Structure):
    """The pointer in a CUmemcpy3DOperand."""

    _fields_ = (("pointer", c_void_p), ("row", c_size_t), ("layer", c_size_t), ("hint", Location))


class Either(Union):
    """What a CUmemcpy3DOperand copies from or to."""

    _fields_ = (("pointer", Pointer), ("array", c_size_t * 4))


class Operand(Structure):
    """CUmemcpy3DOperand."""

    _fields_ = (("type", c_int), ("of", Either))


class BatchBox(Structure):
    """CUDA_MEMCPY3D_BATCH_OP."""

    _fields_ = (
        ("source", Operand),
        ("destination", Operand),
        ("extent", c_size_t * 3),
        ("order", c_int),
        ("flags", c_uint),
    )


class Access(Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", c_int))


class Node(Structure):
    """CUDA_MEMCPY3D."""

    _fields_ = (
        *(  # type: ignore[arg-type]
            (name, kind)
            for side in ("src", "dst")
            for name, kind in (
                *((f"{side}_{axis}", c_size_t) for axis in ("x", "y", "z", "lod")),
                (f"{side}_type", c_int),
                *((f"{side}_{what}", c_void_p) for what in ("host", "device", "array", "reserved")),
                *((f"{side}_{what}", c_size_t) for what in ("pitch", "height")),
            )
        ),
        ("width", c_size_t),
        ("height", c_size_t),
        ("depth", c_size_t),
    )


def use(ordinal: int) -> None:
    RUNTIME.cudaSetDevice(ordinal)


contexts, areas, streams, others = [], [], [], []
fill, mix, copy_bytes = kernel("fill"), kernel("mix"), kernel("copy_bytes")
for device in range(2):
    use(device)
    RUNTIME.cudaFree(0)
    context = c_void_p()
    DRIVER.cuDevicePrimaryCtxRetain(byref(context), device)
    contexts.append(context)
    areas.append(malloc(N))
    others.append(malloc(N))
    streams.append(stream(device))  # the first device's is waited for by its legacy one

# --- copies: every form, whichever device is current, in streams of each ------------------------------------------


def peer(to: int, source: int, where: object) -> None:
    RUNTIME.cudaMemcpyPeerAsync(areas[to], to, areas[source], source, N, where)


def driver(to: int, source: int, where: object) -> None:
    DRIVER.cuMemcpyDtoDAsync_v2(areas[to], areas[source], N, where)


def unified(to: int, source: int, where: object) -> None:
    RUNTIME.cudaMemcpyAsync(areas[to], areas[source], N, DEFAULT, where)


def rows(to: int, source: int, where: object) -> None:
    RUNTIME.cudaMemcpy2DAsync(areas[to], PITCH, areas[source] + 64, PITCH, WIDTH, ROWS, DEFAULT, where)


def boxes(to: int, source: int, where: object) -> None:
    box = Box(
        src_type=DEVICE, dst_type=DEVICE, src_context=contexts[source], dst_context=contexts[to], src_x=32, src_y=1
    )
    box.src_device, box.dst_device, box.src_pitch, box.dst_pitch = areas[source], areas[to], PITCH, 2 * PITCH
    box.src_height, box.dst_height = ROWS // 2, ROWS // 4
    box.width, box.height, box.depth = WIDTH, ROWS // 4, 3
    DRIVER.cuMemcpy3DPeerAsync(byref(box), where)


def batch(to: int, source: int, where: object) -> None:
    half = N // 2
    tos, froms = (c_uint64 * 2)(areas[to], areas[to] + half), (c_uint64 * 2)(areas[source] + half, areas[source])
    sizes, first, attributes = (c_uint64 * 2)(half, half), (c_uint64 * 1)(0), Attributes(order=1)
    DRIVER.cuMemcpyBatchAsync_v2(tos, froms, sizes, 2, byref(attributes), first, 1, where)


def batch_of_boxes(to: int, source: int, where: object) -> None:
    operations = (BatchBox * 2)()
    for i, operation in enumerate(operations):
        for operand, base in ((operation.source, areas[source]), (operation.destination, areas[to])):
            operand.type = 1
            operand.of.pointer = Pointer(base + i * N // 2, PITCH, 16)
        operation.extent[:], operation.order = (WIDTH, 8, 2), 1
    DRIVER.cuMemcpy3DBatchAsync_v2(2, operations, 0, where)


FORMS: tuple[Callable[[int, int, object], None], ...] = (peer, driver, unified, rows, boxes, batch, batch_of_boxes)
seed = 0
for form in FORMS:
    for current in range(2):
        for where in (0, 2, streams[0], streams[1]):
            if where == 0 and form in (batch, batch_of_boxes):
                continue
            seed += 1
            source, to = seed % 2, 1 - seed % 2
            for ordinal in range(2):
                use(ordinal)
                write(areas[ordinal], pattern(N, 2 * seed + ordinal))
                RUNTIME.cudaDeviceSynchronize()
            use(current)
            # Work of the same stream comes before the copy, and after it.
            home = 0 if where is streams[0] else 1 if where is streams[1] else current
            if home == source and current == home:
                launch(mix, 4, 64, areas[source], 40, N // 8, stream=where)
            form(to, source, where)
            if home == to and current == home:
                launch(mix, 4, 64, areas[to], 3, N // 8, stream=where)
            if where in (0, 2):
                RUNTIME.cudaDeviceSynchronize()
            else:
                RUNTIME.cudaStreamSynchronize(where)
            for ordinal in range(2):
                use(ordinal)
                copied = read(areas[ordinal], N)
            if seed % 7 == 0 or form is FORMS[0]:
                say(form.__name__, current, copied)
            expect(any(copied), "something was copied")

bad = (c_uint64 * 1)(0)
attributes = Attributes(order=0)
sizes = (c_uint64 * 1)(8)
expect_error(DRIVER, 1, "cuMemcpyBatchAsync_v2", bad, bad, sizes, 1, byref(attributes), bad, 1, streams[0])
expect_error(DRIVER, 1, "cuMemcpyBatchAsync_v2", bad, bad, sizes, 0, byref(attributes), bad, 0, streams[0])

# --- the other device's memory: from and to the host, pinned or not, and fills -------------------------------------
pinned = c_void_p()
RUNTIME.cudaHostAlloc(byref(pinned), N, 1)
host = pinned.value or 0
reached = left_out("the driver fills the other device's memory only where it is reached")
for current in range(2):
    use(current)
    if reached:
        DRIVER.cuCtxEnablePeerAccess(contexts[1 - current], 0)
    other = areas[1 - current]
    for where in (0, 2, streams[current]):
        RUNTIME.cudaMemcpyAsync(other, c_char_p(pattern(N, current)), N, DEFAULT, where)
        RUNTIME.cudaMemsetAsync(other + 4096, 0x5A, 4096, where)
        RUNTIME.cudaMemset2DAsync(other + 16384, PITCH, 0x17, WIDTH, 4, where)
        DRIVER.cuMemsetD32Async(other + 32768, 0xC0FFEE, 1024, where)
        RUNTIME.cudaMemcpyAsync(host, other, N, DEFAULT, where)
        RUNTIME.cudaMemcpyAsync(areas[current], host, N, DEFAULT, where)
        RUNTIME.cudaMemcpyAsync(others[1 - current], host, N, DEFAULT, where)
        back = create_string_buffer(N)
        RUNTIME.cudaMemcpyAsync(back, others[1 - current], N, DEFAULT, where)
        RUNTIME.cudaStreamSynchronize(where)
        say("host", current, back.raw, string_at(host, N))
        expect(back.raw == string_at(host, N) == read(areas[current], N), "the same everywhere")
    if reached:
        DRIVER.cuCtxDisablePeerAccess(contexts[1 - current])

# --- waiting for each other ---------------------------------------------------------------------------------------
done = []
for ordinal in range(2):
    use(ordinal)
    done.append(event())
    launch(fill, 4, 64, areas[ordinal], ordinal, N // 8, stream=streams[ordinal])
    RUNTIME.cudaStreamSynchronize(streams[ordinal])
for turn in range(24):
    ordinal = turn % 2
    use(ordinal)
    launch(mix, 4, 64, areas[ordinal], turn, N // 8, stream=streams[ordinal])
    RUNTIME.cudaMemcpyPeerAsync(areas[1 - ordinal], 1 - ordinal, areas[ordinal], ordinal, N // 2, streams[ordinal])
    RUNTIME.cudaEventRecord(done[ordinal], streams[ordinal])
    RUNTIME.cudaStreamWaitEvent(streams[1 - ordinal], done[ordinal], 0)
    if turn % 8 == 7:
        RUNTIME.cudaEventSynchronize(done[ordinal])
for ordinal in range(2):
    use(ordinal)
    RUNTIME.cudaStreamSynchronize(streams[ordinal])
    say("events", ordinal, read(areas[ordinal], N))

# Without Async: behind the blocking streams of both devices, and before what they get next.
for turn in range(6):
    use(0)
    launch(mix, 4, 64, areas[0], 200, N // 8, stream=0)
    use(1)
    RUNTIME.cudaMemcpyPeer(areas[1], 1, areas[0], 0, N)
    use(0)
    launch(fill, 4, 64, areas[0], turn, N // 8, stream=0)
    use(1)
    launch(mix, 4, 64, areas[1], turn, N // 8, stream=0)
    say("peer", turn, read(areas[1], N))

# --- graphs --------------------------------------------------------------------------------------------------------
use(0)
graph, executable = c_void_p(), c_void_p()
forked, joined = event(), None
use(1)
joined = event()
use(0)
no_peers = left_out("the driver captures no copy between peers; it does between addresses")


def captured(to: int, onto: int, source: int, of: int, size: int, where: c_void_p) -> None:
    if no_peers:
        RUNTIME.cudaMemcpyAsync(to, source, size, DEFAULT, where)
    else:
        RUNTIME.cudaMemcpyPeerAsync(to, onto, source, of, size, where)


RUNTIME.cudaStreamBeginCapture(streams[0], 2)
launch(mix, 4, 64, areas[0], 5, N // 8, stream=streams[0])
RUNTIME.cudaEventRecord(forked, streams[0])
RUNTIME.cudaStreamWaitEvent(streams[1], forked, 0)
use(1)
captured(areas[1], 1, areas[0], 0, N, streams[1])
launch(mix, 4, 64, areas[1], 2, N // 8, stream=streams[1])
RUNTIME.cudaMemsetAsync(areas[1], 0x21, 512, streams[1])
RUNTIME.cudaEventRecord(joined, streams[1])
use(0)
captured(others[1], 1, areas[0], 0, N // 2, streams[0])
RUNTIME.cudaStreamWaitEvent(streams[0], joined, 0)
captured(others[0], 0, areas[1], 1, N, streams[0])
RUNTIME.cudaStreamEndCapture(streams[0], byref(graph))
DRIVER.cuGraphInstantiateWithFlags(byref(executable), graph, 0)
for turn in range(6):
    use(turn % 2)
    RUNTIME.cudaGraphLaunch(executable, streams[0])
    RUNTIME.cudaStreamSynchronize(streams[0])
    if turn % 2:
        say("graph", read(areas[0], N), read(areas[1], N), read(others[0], N), read(others[1], N // 2))

use(0)
built, node, again = c_void_p(), c_void_p(), c_void_p()
DRIVER.cuGraphCreate(byref(built), 0)
copy = Node(src_type=DEVICE, dst_type=DEVICE, src_device=areas[0], dst_device=areas[1], width=N, height=1, depth=1)
copy.src_pitch = copy.dst_pitch = N
copy.src_height = copy.dst_height = 1
DRIVER.cuGraphAddMemcpyNode(byref(node), built, None, 0, byref(copy), contexts[0])
DRIVER.cuGraphInstantiateWithFlags(byref(again), built, 0)
for where in (streams[0], streams[1]):
    write(areas[0], pattern(N, 77))
    RUNTIME.cudaDeviceSynchronize()
    use(1)
    RUNTIME.cudaMemset(areas[1], 0, N)
    RUNTIME.cudaDeviceSynchronize()
    use(0)
    DRIVER.cuGraphLaunch(again, where)
    RUNTIME.cudaStreamSynchronize(where)
    expect(read(areas[1], N) == pattern(N, 77), "a node copies between devices")

# --- what reaches what ---------------------------------------------------------------------------------------------
for first, second in ((0, 1), (1, 0), (0, 0)):
    reaches = c_int(-1)
    RUNTIME.cudaDeviceCanAccessPeer(byref(reaches), first, second)
    say("reaches", first, second, reaches.value)
value = c_int(-1)
DRIVER.cuDeviceGetP2PAttribute(byref(value), 2, 0, 1)
expect(value.value == 1, "access is supported")
expect_error(DRIVER, 101, "cuDeviceGetP2PAttribute", byref(value), 2, 1, 1)
use(1)
expect_error(DRIVER, 705, "cuCtxDisablePeerAccess", contexts[0])
DRIVER.cuCtxEnablePeerAccess(contexts[0], 0)
expect_error(DRIVER, 704, "cuCtxEnablePeerAccess", contexts[0], 0)
expect_error(DRIVER, 1, "cuCtxEnablePeerAccess", contexts[0], 1)
expect_error(DRIVER, 217, "cuCtxEnablePeerAccess", contexts[1], 0)
expect_error(DRIVER, 201, "cuCtxEnablePeerAccess", None, 0)
for turn in range(8):
    use(0)
    grown = malloc((1 + turn % 3) << 20)  # memory that comes later is reached, too
    launch(fill, 4, 64, grown, turn, N // 8, stream=0)
    launch(mix, 4, 64, areas[0], turn, N // 8, stream=0)
    RUNTIME.cudaDeviceSynchronize()
    use(1)
    launch(copy_bytes, 4, 64, areas[1], areas[0], N, stream=streams[1])
    launch(mix, 4, 64, grown, turn, N // 8, stream=streams[1])
    launch(copy_bytes, 4, 64, areas[0] + N // 2, grown, N // 2, stream=streams[1])
    peer(1, 0, streams[1])
    RUNTIME.cudaStreamSynchronize(streams[1])
    use(0)
    say("reached", turn, read(areas[0], N), read(areas[1], N))
    RUNTIME.cudaFree(grown)
use(1)
DRIVER.cuCtxDisablePeerAccess(contexts[0])
expect_error(DRIVER, 705, "cuCtxDisablePeerAccess", contexts[0])
peer(1, 0, streams[1])
RUNTIME.cudaStreamSynchronize(streams[1])
expect(read(areas[1], N) == read(areas[0], N), "copies need no access")

pool, flags, place = c_void_p(), c_int(-1), Location(1, 1)
DRIVER.cuDeviceGetDefaultMemPool(byref(pool), 0)
DRIVER.cuMemPoolGetAccess(byref(flags), pool, byref(place))
say("pool", flags.value)
DRIVER.cuMemPoolSetAccess(pool, byref(Access(Location(1, 1), 3)), 1)
DRIVER.cuMemPoolGetAccess(byref(flags), pool, byref(place))
say("pool", flags.value)
use(0)
pooled = c_void_p()
DRIVER.cuMemAllocAsync(byref(pooled), N, streams[0])
launch(fill, 4, 64, pooled, 99, N // 8, stream=streams[0])
RUNTIME.cudaStreamSynchronize(streams[0])
use(1)
launch(mix, 4, 64, pooled, 4, N // 8, stream=streams[1])
launch(copy_bytes, 4, 64, areas[1], pooled, N, stream=streams[1])
RUNTIME.cudaStreamSynchronize(streams[1])
say("pool", read(areas[1], N))
DRIVER.cuMemFreeAsync(pooled, streams[1])
RUNTIME.cudaFreeHost(pinned)
