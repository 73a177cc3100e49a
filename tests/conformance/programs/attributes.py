"""What a device says that it can, it can: each attribute that promises a function, and what the function does.

A promise that is not kept is a mistake here; so is a function that works and is not promised, where programs would then
leave it alone. The second kind is listed (UNPROMISED), with the reason."""

import ctypes
import mmap
import os
from collections.abc import Callable
from ctypes import c_uint64

from calls import (
    DRIVER,
    byref,
    c_int,
    c_size_t,
    c_uint,
    c_void_p,
    expect,
    function_of,
    kernel,
    left_out,
    malloc,
    pack,
    say,
)

GRANULE = 2 << 20
READ_ONLY = 8  # CU_MEMHOSTREGISTER_READ_ONLY
PAGES = mmap.mmap(-1, 1 << 20)  # the program's own
stream, context = c_void_p(), c_void_p()
area = malloc(GRANULE)  # at an address that is a multiple of a page's size, too
DRIVER.cuStreamCreate(byref(stream), 1)
DRIVER.cuCtxGetCurrent(byref(context))
fill = kernel("fill")


def attribute(number: int) -> int:
    value = c_int()
    DRIVER.cuDeviceGetAttribute(byref(value), number, 0)
    return value.value


def works(name: str, *arguments: object) -> bool:
    """Does it return success? One that this driver does not have does not."""
    return DRIVER.has(name) and DRIVER.code(name, *arguments) == 0


def out() -> object:
    """Room for any answer."""
    return ctypes.create_string_buffer(512)


# --- memory ---------------------------------------------------------------------------------------------------------


def managed() -> bool:
    return works("cuMemAllocManaged", byref(c_uint64()), 4096, 1)


def prefetched() -> bool:
    memory = c_uint64()
    return works("cuMemAllocManaged", byref(memory), 4096, 1) and works("cuMemPrefetchAsync", memory, 4096, 0, stream)


def written_by_kernels(address: int) -> bool:
    """A kernel of another process would get the program's own page."""
    return works("cuMemsetD8_v2", address, 7, 16) and ctypes.string_at(address, 16) == b"\x07" * 16


def registered(flags: int, *, by_its_own_address: bool = False) -> bool:
    """Pages of the program's own, with an address for the device under which they are written."""
    address, on_device = ctypes.addressof(ctypes.c_char.from_buffer(PAGES)), c_uint64()
    if not works("cuMemHostRegister_v2", address, len(PAGES), flags):
        return False
    good = works("cuMemHostGetDevicePointer_v2", byref(on_device), address, 0)
    if good and not flags & READ_ONLY:
        good = works("cuMemsetD8_v2", on_device, 7, 16) and PAGES[:16] == b"\x07" * 16
    DRIVER.cuMemHostUnregister(address)
    return good and (on_device.value == address or not by_its_own_address)


def mapped_host_memory() -> bool:
    host, on_device = c_void_p(), c_uint64()
    return (
        works("cuMemHostAlloc", byref(host), 4096, 2)
        and works("cuMemHostGetDevicePointer_v2", byref(on_device), host, 0)
        and works("cuMemsetD8_v2", on_device, 9, 16)
        and ctypes.string_at(host.value or 0, 16) == b"\x09" * 16
    )


class Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int), ("handle_types", c_int), ("location", Location), ("win32", c_void_p),
        ("compression", ctypes.c_ubyte), ("rdma", ctypes.c_ubyte), ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )  # fmt: skip


def created(handle_type: int = 0, location: int = 1, *, rdma: int = 0, compression: int = 0) -> c_uint64 | None:
    handle = c_uint64()
    properties = AllocationProp(
        type=1, handle_types=handle_type, location=Location(location, 0), rdma=rdma, compression=compression
    )
    return handle if works("cuMemCreate", byref(handle), GRANULE, byref(properties), 0) else None


def exported(handle_type: int) -> bool:
    handle = created(handle_type)
    return handle is not None and works("cuMemExportToShareableHandle", out(), handle, handle_type, 0)


def compressed() -> bool:
    handle = created(compression=1)
    if handle is None:
        return False
    reported = AllocationProp()
    return works("cuMemGetAllocationPropertiesFromHandle", byref(reported), handle) and reported.compression == 1


def mapped() -> bool:
    handle, address = created(), c_uint64()
    return (
        handle is not None
        and works("cuMemAddressReserve", byref(address), GRANULE, 0, 0, 0)
        and works("cuMemMap", address, GRANULE, 0, handle, 0)
    )


class PoolProps(ctypes.Structure):
    """CUmemPoolProps."""

    _fields_ = (
        ("type", c_int), ("handle_types", c_int), ("location", Location), ("win32", c_void_p), ("most", c_size_t),
        ("usage", ctypes.c_ushort), ("reserved", ctypes.c_ubyte * 54),
    )  # fmt: skip


def pool(handle_type: int = 0, location: int = 1) -> bool:
    properties = PoolProps(type=1, handle_types=handle_type, location=Location(location, 0))
    return works("cuMemPoolCreate", byref(c_void_p()), byref(properties))


def dma_buf(address: int) -> bool:
    return works("cuMemGetHandleForAddressRange", byref(c_int()), address, 4096, 1, 0)


def pinned() -> int:
    host = c_void_p()
    DRIVER.cuMemHostAlloc(byref(host), 1 << 20, 0)
    return host.value or 0


# --- other processes, other drivers ---------------------------------------------------------------------------------


def event_for_others() -> bool:
    event = c_void_p()
    return works("cuEventCreate", byref(event), 2 | 4) and works("cuIpcGetEventHandle", out(), event)


def semaphore() -> bool:
    description = (ctypes.c_ubyte * 128)()
    description[0] = 9  # CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_TIMELINE_SEMAPHORE_FD
    return works("cuImportExternalSemaphore", byref(c_void_p()), description)


def multicast() -> bool:
    properties = (c_uint64 * 8)(1, GRANULE, 0, 0)
    return works("cuMulticastCreate", byref(c_uint64()), properties)


def rdma() -> bool:
    """Only what the driver has given tokens for can be registered with another device."""
    reported = c_uint64()
    return works("cuPointerGetAttribute", byref(reported), 15, area) and reported.value != 0


# --- arrays ---------------------------------------------------------------------------------------------------------


class ArrayDescription(ctypes.Structure):
    """CUDA_ARRAY3D_DESCRIPTOR."""

    _fields_ = (
        ("width", c_size_t), ("height", c_size_t), ("depth", c_size_t), ("format", c_int), ("channels", c_uint),
        ("flags", c_uint),
    )  # fmt: skip


def array(flags: int = 0) -> bool:
    described = ArrayDescription(64, 64, 0, 0x20, 1, flags)
    return works("cuArray3DCreate_v2", byref(c_void_p()), byref(described))


# --- launches, streams ----------------------------------------------------------------------------------------------


class LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", c_int), ("pad", c_uint), ("value", c_uint * 16))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("stream", c_void_p),
                ("attributes", ctypes.POINTER(LaunchAttribute)), ("count", c_uint))  # fmt: skip


def launched(number: int, *value: int) -> bool:
    one = LaunchAttribute(id=number)
    for i, word in enumerate(value):
        one.value[i] = word
    config = Config((1, 1, 1), (1, 1, 1), 0, None, ctypes.pointer(one), 1)
    config.grid[0] = 2
    return works("cuLaunchKernelEx", byref(config), fill, pack(area, 1, 16), None)


def cooperative() -> bool:
    return works("cuLaunchCooperativeKernel", fill, 1, 1, 1, 1, 1, 1, 0, stream, pack(area, 1, 16))


class LaunchParams(ctypes.Structure):
    """CUDA_LAUNCH_PARAMS."""

    _fields_ = (("function", c_void_p), ("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint),
                ("stream", c_void_p), ("parameters", c_void_p))  # fmt: skip


def on_several_devices() -> bool:
    """On one, but by the function that launches on several."""
    one, packed = (c_uint * 3)(1, 1, 1), pack(area, 1, 16)
    launch = LaunchParams(function_of(fill), one, one, 0, stream, ctypes.addressof(packed))
    return works("cuLaunchCooperativeKernelMultiDevice", byref(launch), 1, 0)


def waits(size: int, flags: int = 0) -> bool:
    """For a value that is there: with a condition that holds."""
    DRIVER.cuMemsetD8_v2(area, 0, 64)
    value = 0xFFFFFFFF if flags == 3 and size == 32 else (1 << 64) - 1 if flags == 3 else 0
    fine = works(f"cuStreamWaitValue{size}_v2", stream, area, value if flags != 3 else 1, flags)
    return fine and works(f"cuStreamWriteValue{size}_v2", stream, area, 0, 0) and works("cuStreamSynchronize", stream)


def priorities() -> bool:
    low, high, made, reported = c_int(), c_int(), c_void_p(), c_int()
    DRIVER.cuCtxGetStreamPriorityRange(byref(low), byref(high))
    return (
        low.value != high.value
        and works("cuStreamCreateWithPriority", byref(made), 1, high.value)
        and works("cuStreamGetPriority", made, byref(reported))
        and reported.value == high.value
    )


def persisting() -> bool:
    return works("cuCtxSetLimit", 6, 1 << 20)


def graphics() -> bool:
    """A context that shares the device with a graphics interface."""
    parameters = (c_uint64 * 4)(0, 0, ctypes.addressof(ctypes.create_string_buffer(64)), 0)
    return works("cuCtxCreate_v4", byref(c_void_p()), parameters, 0, 0)


def decompressed() -> bool:
    return works("cuMemBatchDecompressAsync", out(), 1, 0, out(), stream)


def unified_function() -> bool:
    library, found = c_void_p(), c_void_p()
    path = os.environ["KERNELS"].encode()
    return works("cuLibraryLoadFromFile", byref(library), path, None, None, 0, None, None, 0) and works(
        "cuLibraryGetUnifiedFunction", byref(found), library, b"fill"
    )


# --- which attribute promises what ----------------------------------------------------------------------------------

own = ctypes.create_string_buffer(1 << 16)
PROMISES: dict[int, Callable[[], bool]] = {
    19: mapped_host_memory,  # CAN_MAP_HOST_MEMORY
    41: mapped_host_memory,  # UNIFIED_ADDRESSING
    78: priorities,  # STREAM_PRIORITIES_SUPPORTED
    83: managed,  # MANAGED_MEMORY
    88: lambda: written_by_kernels(ctypes.addressof(own)),  # PAGEABLE_MEMORY_ACCESS
    89: prefetched,  # CONCURRENT_MANAGED_ACCESS
    91: lambda: registered(2, by_its_own_address=True),  # CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
    95: cooperative,  # COOPERATIVE_LAUNCH
    96: on_several_devices,  # COOPERATIVE_MULTI_DEVICE_LAUNCH
    98: lambda: waits(32, 1 << 30),  # CAN_FLUSH_REMOTE_WRITES
    99: lambda: registered(2),  # HOST_REGISTER_SUPPORTED
    100: lambda: written_by_kernels(ctypes.addressof(own)),  # PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES
    101: managed,  # DIRECT_MANAGED_MEM_ACCESS_FROM_HOST
    102: mapped,  # VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    103: lambda: exported(1),  # HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
    104: lambda: exported(2),  # HANDLE_TYPE_WIN32_HANDLE_SUPPORTED
    105: lambda: exported(4),  # HANDLE_TYPE_WIN32_KMT_HANDLE_SUPPORTED
    107: compressed,  # GENERIC_COMPRESSION_SUPPORTED
    108: persisting,  # MAX_PERSISTING_L2_CACHE_SIZE
    109: lambda: launched(1),  # MAX_ACCESS_POLICY_WINDOW_SIZE
    110: rdma,  # GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
    112: lambda: array(0x40),  # SPARSE_CUDA_ARRAY_SUPPORTED
    113: lambda: registered(2 | READ_ONLY),  # READ_ONLY_HOST_REGISTER_SUPPORTED
    114: semaphore,  # TIMELINE_SEMAPHORE_INTEROP_SUPPORTED
    115: pool,  # MEMORY_POOLS_SUPPORTED
    116: rdma,  # GPU_DIRECT_RDMA_SUPPORTED
    117: rdma,  # GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS
    118: rdma,  # GPU_DIRECT_RDMA_WRITES_ORDERING
    119: lambda: pool(1),  # MEMPOOL_SUPPORTED_HANDLE_TYPES, the bit of descriptors
    120: lambda: launched(4, 2, 1, 1),  # CLUSTER_LAUNCH
    121: lambda: array(0x80),  # DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED
    122: lambda: waits(64),  # CAN_USE_64_BIT_STREAM_MEM_OPS
    123: lambda: waits(32, 3),  # CAN_USE_STREAM_WAIT_VALUE_NOR
    124: lambda: dma_buf(area),  # DMA_BUF_SUPPORTED
    125: event_for_others,  # IPC_EVENT_SUPPORTED
    126: lambda: launched(10, 1),  # MEM_SYNC_DOMAIN_COUNT
    127: lambda: DRIVER.has("cuTensorMapEncodeTiled"),  # TENSOR_MAP_ACCESS_SUPPORTED; values: tests of the shim
    128: lambda: exported(8),  # HANDLE_TYPE_FABRIC_SUPPORTED
    129: unified_function,  # UNIFIED_FUNCTION_POINTERS
    132: multicast,  # MULTICAST_SUPPORTED
    135: graphics,  # D3D12_CIG_SUPPORTED
    136: decompressed,  # MEM_DECOMPRESS_ALGORITHM_MASK
    137: decompressed,  # MEM_DECOMPRESS_MAXIMUM_LENGTH
    138: graphics,  # VULKAN_CIG_SUPPORTED
    141: lambda: created(location=3) is not None,  # HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    142: lambda: pool(location=3),  # HOST_NUMA_MEMORY_POOLS_SUPPORTED
    143: lambda: exported(8),  # HOST_NUMA_MULTINODE_IPC_SUPPORTED
    144: lambda: pool(location=2),  # HOST_MEMORY_POOLS_SUPPORTED
    145: lambda: created(location=2) is not None,  # HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    146: lambda: dma_buf(pinned()),  # HOST_ALLOC_DMA_BUF_SUPPORTED
}
# Sizes of arrays, textures, surfaces.
PROMISES |= dict.fromkeys((*range(21, 30), *range(42, 50), *range(52, 75), 77), array)
UNPROMISED = {
    108: "the limit is kept, and no result depends on it",
    109: "how long lines stay in a cache: no result depends on it",
    120: "a cpu device takes clusters of one",
    126: "one domain is what a device without domains has",
    127: "no hardware on a cpu device",
    98: "the flag asks for nothing on a device without remote writes",
    101: "without it managed memory migrates: no result depends on it",
}
OF_OTHERS = {
    128: "no handles of a fabric without the service that runs it",
    129: "no unified function in an image that has none",
    114: "no semaphore without another interface to make one",
    132: "a multicast object is the whole machine's",
    135: "no context for a graphics interface without one",
    138: "no context for a graphics interface without one",
}

for number, function in PROMISES.items():
    if number in OF_OTHERS and left_out(f"attribute {number}: {OF_OTHERS[number]}"):
        continue
    promised = attribute(number) > 0
    kept = function()
    expect(kept or not promised, f"attribute {number} is {attribute(number)}, and its function fails")
    expect(promised or not kept or number in UNPROMISED, f"attribute {number} is 0, and its function works")
say(len(PROMISES), "attributes are as their functions")
