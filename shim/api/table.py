"""The API table: one entry per driver function and per record of the journal.

`generate.py` turns it, with the prototypes it reads from ``cuda.h``, into client stubs, the server's dispatch, the
driver table that a device fills in, and the coverage document. A function of ``cuda.h`` that is not named here
returns CUDA_ERROR_NOT_SUPPORTED and is named once in the job's log.

Classes of call
---------------
local        answered in the client by ``xmig::client::<name>`` (written by hand, same signature as in cuda.h)
queued       appended to the journal; returns at once
synchronous  appended; waits for the reply

A queued or synchronous function is generated on both sides, unless

* ``client="custom"``: the client's half is ``xmig::client::<name>``, written by hand; it may call the generated
  ``xmig::record::<name>``, which appends the record (and waits), with handles already chosen
* ``server="custom"``: the server's half is ``on_<name>``, written by hand, of the class that HANDLERS says

A ``record(...)`` is not a driver function: it is a record of xMIG's own with the given fields, always custom on both
sides.

Arguments need an annotation only where their type does not say enough: see the small vocabulary below.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

CallClass = Literal["local", "queued", "synchronous"]


@dataclass(frozen=True)
class Handle:
    """A handle that exists: translated by the server from the client's number to its own object."""

    kind: str


@dataclass(frozen=True)
class New:
    """An out-parameter (a pointer to a handle) for an object that this call creates; the client chooses the number."""

    kind: str


@dataclass(frozen=True)
class Gone:
    """A handle that this call destroys."""

    kind: str


@dataclass(frozen=True)
class Out:
    """A pointer to a value that comes back in the reply. ``optional``: the program may pass NULL."""

    optional: bool = False


@dataclass(frozen=True)
class In:
    """A pointer to a plain structure without pointers that goes into the record."""


@dataclass(frozen=True)
class DevicePointer:
    """A device address, or one of page-locked memory; the server checks that ``size`` (a C expression over the
    arguments) bytes from it are allocated."""

    size: str


Annotation = Handle | New | Gone | Out | In | DevicePointer


@dataclass(frozen=True)
class Function:
    name: str
    call: CallClass
    args: dict[str, Annotation] = field(default_factory=dict)
    client: Literal["generated", "custom"] = "generated"
    server: Literal["generated", "custom"] = "generated"
    volatile: bool = False  # the reply may differ at a replay (time, free memory): not compared
    note: str = ""  # for the coverage document


@dataclass(frozen=True)
class Record:
    name: str
    call: CallClass
    fields: tuple[tuple[str, str], ...]  # (C++ type, name)
    volatile: bool = False
    doc: str = ""


FUNCTIONS: list[Function] = []
RECORDS: list[Record] = []


def local(*names: str, note: str = "") -> None:
    FUNCTIONS.extend(Function(name, "local", client="custom", note=note) for name in names)


def queued(name: str, **kw: Any) -> None:
    opts = {k: kw.pop(k) for k in ("client", "server", "volatile", "note") if k in kw}
    FUNCTIONS.append(Function(name, "queued", kw, **opts))


def synchronous(name: str, **kw: Any) -> None:
    opts = {k: kw.pop(k) for k in ("client", "server", "volatile", "note") if k in kw}
    FUNCTIONS.append(Function(name, "synchronous", kw, **opts))


def record(name: str, call: CallClass, doc: str, *fields: str, volatile: bool = False) -> None:
    split = tuple((f.rsplit(" ", 1)[0], f.rsplit(" ", 1)[1]) for f in fields)
    RECORDS.append(Record(name, call, split, volatile, doc))


stream, event, module, function = Handle("stream"), Handle("event"), Handle("module"), Handle("function")

# --- initialisation, versions, entry points, errors ------------------------------------------------------------
local("cuInit", "cuDriverGetVersion", "cuGetProcAddress", "cuGetProcAddress_v2", "cuGetErrorName", "cuGetErrorString",
      "cuGetExportTable")

local("cuProfilerStart", "cuProfilerStop", note="a profiler would have to run in the server: there is none to tell")

# --- devices ---------------------------------------------------------------------------------------------------
local("cuDeviceGet", "cuDeviceGetCount", "cuDeviceGetName", "cuDeviceGetUuid", "cuDeviceGetUuid_v2",
      "cuDeviceTotalMem_v2", "cuDeviceGetAttribute", "cuDeviceGetByPCIBusId", "cuDeviceGetPCIBusId",
      "cuDeviceCanAccessPeer", "cuDeviceGetP2PAttribute", "cuDeviceGetDefaultMemPool", "cuDeviceGetMemPool",
      "cuDeviceSetMemPool", "cuDeviceComputeCapability", "cuDeviceGetProperties", "cuDeviceGetLuid")

# --- contexts --------------------------------------------------------------------------------------------------
local("cuDevicePrimaryCtxRetain", "cuCtxCreate_v2", "cuCtxCreate_v3", "cuCtxCreate_v4",
      note="the first one on a device: xmOpen")
local("cuDevicePrimaryCtxRelease_v2", "cuDevicePrimaryCtxGetState", "cuDevicePrimaryCtxSetFlags_v2",
      "cuDevicePrimaryCtxReset_v2", "cuCtxDestroy_v2", "cuCtxGetCurrent", "cuCtxSetCurrent", "cuCtxPushCurrent_v2",
      "cuCtxPopCurrent_v2", "cuCtxGetDevice", "cuCtxGetDevice_v2", "cuCtxGetFlags", "cuCtxSetFlags",
      "cuCtxGetApiVersion",
      "cuCtxGetCacheConfig", "cuCtxSetCacheConfig", "cuCtxGetStreamPriorityRange",
      "cuCtxResetPersistingL2Cache", "cuCtxGetId", "cuCtxEnablePeerAccess", "cuCtxDisablePeerAccess",
      "cuCtxGetSharedMemConfig", "cuCtxSetSharedMemConfig", "cuCtxGetExecAffinity", "cuFlushGPUDirectRDMAWrites")
synchronous("cuCtxSynchronize", client="custom", server="custom")
local("cuCtxSynchronize_v2", note="cuCtxSynchronize of a context that need not be current")
local("cuCtxGetLimit", "cuCtxSetLimit", note="xmLimit; requested again, it is answered locally")
record("xmOpen", "synchronous", "The program needs this device from here on. Where it cannot be opened, this is what "
       "is answered, and it may be requested again.", "uint32_t ordinal", "uint32_t reserved", volatile=True)
record("xmLimit", "synchronous", "Set a limit of the context, or only ask for it. The reply is what it is now: the "
       "device rounds.", "uint32_t limit", "uint32_t set", "uint64_t value")
record("xmPeer", "synchronous", "A device reaches another one's memory from here on, or no longer. peer: the context "
       "whose memory is meant; 0: whoever's it is, for as long as the job lives.", "uint64_t peer", "uint32_t device",
       "uint32_t memory", "uint32_t reaches", "uint32_t reserved")
record("xmContextReset", "synchronous", "Drop every object and allocation of a context; clears its error.",
       "uint64_t context", "uint32_t destroyed", "uint32_t reserved")

# --- memory: the client chooses addresses, the server backs them ------------------------------------------------
record("xmGrow", "synchronous", "Back [address, address+bytes) with physical memory; whole granules. Out of memory "
       "comes back from here.", "uint64_t address", "uint64_t bytes")
record("xmShrink", "queued", "Give the physical memory of whole granules back, at the next snapshot at the latest.",
       "uint64_t address", "uint64_t bytes")
record("xmAlloc", "queued", "From here on [address, address+bytes) is live: preserved by snapshots, allowed in copies.",
       "uint64_t address", "uint64_t bytes", "uint64_t stream", "uint32_t flags", "uint32_t reserved")
record("xmFree", "queued", "The allocation that starts at address is no longer live.", "uint64_t address",
       "uint64_t stream")
record("xmDiscard", "queued", "Nobody needs what whole granules of live memory hold: snapshots leave them out.",
       "uint64_t address", "uint64_t bytes")
record("xmReuse", "queued", "They are preserved again from here on.", "uint64_t address", "uint64_t bytes")
record("xmPin", "synchronous", "Page-locked memory of the program, which devices read and write from here on.",
       "uint64_t address", "uint64_t bytes")
record("xmUnpin", "queued", "No longer.", "uint64_t address")
local("cuMemAlloc_v2", "cuMemAllocPitch_v2", "cuMemFree_v2", "cuMemGetAddressRange_v2", "cuMemAllocAsync",
      "cuMemAllocFromPoolAsync", "cuMemFreeAsync", "cuMemPoolCreate", "cuMemPoolDestroy", "cuMemPoolGetAttribute",
      "cuMemPoolSetAttribute", "cuMemPoolTrimTo", "cuMemPoolSetAccess", "cuMemPoolGetAccess",
      "cuMemAllocHost_v2", "cuMemHostAlloc", "cuMemFreeHost", "cuMemHostGetDevicePointer_v2", "cuMemHostGetFlags",
      "cuMemHostRegister_v2", "cuMemHostUnregister", "cuPointerGetAttribute", "cuPointerGetAttributes",
      "cuPointerSetAttribute", "cuMemAddressReserve", "cuMemAddressFree", "cuMemCreate", "cuMemRelease", "cuMemMap",
      "cuMemUnmap", "cuMemSetAccess", "cuMemGetAccess", "cuMemGetAllocationGranularity",
      "cuMemGetAllocationPropertiesFromHandle", "cuMemRetainAllocationHandle",
      note="addresses are chosen in the client; xmGrow, xmAlloc, xmFree go to the server")
synchronous("cuMemGetInfo_v2", free=Out(), total=Out(), client="custom", server="custom", volatile=True)

# --- copies ----------------------------------------------------------------------------------------------------
local("cuMemcpy", "cuMemcpyAsync", "cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2", "cuMemcpyDtoD_v2", "cuMemcpyHtoDAsync_v2",
      "cuMemcpyDtoHAsync_v2", "cuMemcpy2D_v2", "cuMemcpy2DUnaligned_v2", "cuMemcpy2DAsync_v2", "cuMemcpy3D_v2",
      "cuMemcpy3DAsync_v2", "cuMemcpyPeer", "cuMemcpyPeerAsync", "cuMemcpy3DPeer", "cuMemcpy3DPeerAsync",
      "cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2", "cuMemcpy3DBatchAsync", "cuMemcpy3DBatchAsync_v2",
      note="split into copy records by the client")
record("xmCopyFromHost", "queued", "Copy the payload (rows packed tightly) to the device.",
       "uint64_t destination", "uint64_t pitch", "uint64_t width", "uint64_t height", "uint64_t stream")
record("xmCopyFromPinned", "queued", "As xmCopyFromHost, but the source is pinned memory, read when the copy executes; "
       "at most a granule.", "uint64_t destination", "uint64_t pitch",
       "uint64_t width", "uint64_t height", "uint64_t stream", "uint64_t source", "uint64_t source_pitch")
record("xmCopyToHost", "synchronous", "Copy to the reply, or to the staging slot (staging = offset, or ~0 = reply); "
       "rows packed tightly. reply_hash covers the bytes.", "uint64_t source", "uint64_t pitch", "uint64_t width",
       "uint64_t height", "uint64_t stream", "uint64_t staging")
record("xmCopyToPinned", "queued", "Copy to pinned memory, in stream order. Not repeated at a replay once it was done: "
       "compared.", "uint64_t source", "uint64_t pitch", "uint64_t width", "uint64_t height", "uint64_t stream",
       "uint64_t destination", "uint64_t destination_pitch")
queued("cuMemcpyDtoDAsync_v2", dstDevice=DevicePointer("ByteCount"), srcDevice=DevicePointer("ByteCount"),
       hStream=stream, server="custom")
record("xmCopy2D", "queued", "Device to device, two-dimensional.", "uint64_t destination", "uint64_t destination_pitch",
       "uint64_t source", "uint64_t source_pitch", "uint64_t width", "uint64_t height", "uint64_t stream")
for width in (8, 16, 32):
    queued(f"cuMemsetD{width}Async", dstDevice=DevicePointer(f"N * {width // 8}"), hStream=stream)
    queued(f"cuMemsetD2D{width}Async",
           dstDevice=DevicePointer(f"Height ? (Height - 1) * dstPitch + Width * {width // 8} : 0"), hStream=stream)
local("cuMemsetD8_v2", "cuMemsetD16_v2", "cuMemsetD32_v2", "cuMemsetD2D8_v2", "cuMemsetD2D16_v2", "cuMemsetD2D32_v2",
      note="the asynchronous form on the legacy stream")

# --- streams ---------------------------------------------------------------------------------------------------
queued("cuStreamCreateWithPriority", phStream=New("stream"), client="custom")
local("cuStreamCreate", note="cuStreamCreateWithPriority with priority 0")
queued("cuStreamDestroy_v2", hStream=Gone("stream"), client="custom", server="custom")
synchronous("cuStreamSynchronize", hStream=stream, server="custom", client="custom")
synchronous("cuStreamQuery", hStream=stream, client="custom", server="custom", volatile=True)
queued("cuStreamWaitEvent", hStream=stream, hEvent=event, client="custom")
for bits in (32, 64):
    queued(f"cuStreamWriteValue{bits}_v2", stream=stream, addr=DevicePointer(str(bits // 8)))
    queued(f"cuStreamWaitValue{bits}_v2", stream=stream, addr=DevicePointer(str(bits // 8)), client="custom",
           server="custom")
local("cuStreamBatchMemOp_v2", note="a record for each operation")
local("cuStreamGetPriority", "cuStreamGetFlags", "cuStreamGetId", "cuStreamGetCtx", "cuStreamGetDevice",
      "cuStreamGetCtx_v2", "cuStreamGetAttribute",
      "cuStreamSetAttribute", "cuStreamCopyAttributes")
record("xmHostFunc", "queued", "Run a function of the program in stream order: posted to the client's callback thread. "
       "callback: a CUstreamCallback that also gets stream and status.", "uint64_t function", "uint64_t user_data",
       "uint64_t stream", "uint32_t callback", "uint32_t reserved")
local("cuLaunchHostFunc", "cuStreamAddCallback", note="xmHostFunc")

# --- communicators and collectives: for NCCL's functions, which nccl_table.py lists (see journal/collectives.h) ----
record("xmCommInit", "synchronous", "Join the communicator of this group. The payload is the path of the program's "
       "library and its settings, each ended by a zero; the reply is a CommunicatorReply. Times are in milliseconds. "
       "Of one that a snapshot kept: how often it was split, and whether it has lost ranks for good.",
       "uint64_t communicator", "uint64_t group[4]", "uint32_t rank", "uint32_t ranks", "uint32_t join_time",
       "uint32_t operation_time", "uint32_t splits", "uint32_t incomplete", volatile=True)
record("xmCommSplit", "synchronous", "Make a communicator of those ranks of another one that name the same colour, in "
       "the order of their keys. The reply is a CommunicatorReply.", "uint64_t communicator", "uint64_t parent",
       "int32_t color", "int32_t key", volatile=True)
record("xmCommEnd", "queued", "A communicator is no longer needed; `abort`: what it still has to do neither.",
       "uint64_t communicator", "uint32_t abort", "uint32_t reserved")
record("xmCommGroup", "queued", "Collective operations that begin together. The payload is an array of "
       "CollectiveOperation.", "uint32_t operations", "uint32_t reserved")

# --- events ----------------------------------------------------------------------------------------------------
queued("cuEventCreate", phEvent=New("event"), client="custom")
queued("cuEventDestroy_v2", hEvent=Gone("event"), client="custom")
queued("cuEventRecordWithFlags", hEvent=event, hStream=stream, client="custom", server="custom")
local("cuEventRecord", note="cuEventRecordWithFlags with flags 0")
local("cuEventQuery", note="completion is published in shared memory")
synchronous("cuEventSynchronize", hEvent=event, client="custom", server="custom")
synchronous("cuEventElapsedTime_v2", pMilliseconds=Out(), hStart=event, hEnd=event, client="custom",
            server="custom", volatile=True)
local("cuEventElapsedTime")

# --- modules, libraries, kernels -------------------------------------------------------------------------------
record("xmImage", "queued", "A piece of a module image; image numbers are chosen by the client.", "uint64_t image",
       "uint64_t total", "uint64_t offset")
record("xmImageFile", "queued", "A module image that lies in a file: mapped read-only by the server. The payload "
       "is the path.", "uint64_t image", "uint64_t total", "uint64_t offset")
record("xmModuleLoad", "synchronous", "Load an image. The reply names kernels and globals (see module_info.h); if "
       "it does not fit, reply_bytes says how much is needed and xmModuleInfo fetches the rest.", "uint64_t module",
       "uint64_t image")
record("xmModuleInfo", "synchronous", "A part of the description of a loaded module.", "uint64_t module",
       "uint64_t offset")
record("xmKernel", "synchronous", "A kernel's parameters and attributes (see module_info.h).", "uint64_t function")
record("xmGlobal", "synchronous", "How large is a variable that the device itself has placed? The payload is its name.",
       "uint64_t module")
record("xmTwin", "queued", "The program knows such a variable at this address of its own memory; the server keeps both "
       "equal. The payload is its name.", "uint64_t module", "uint64_t address")
record("xmVariables", "queued", "What kernels leave in variables of a module that the device has placed is kept "
       "here, in the program's memory (see module_info.h).", "uint64_t module", "uint64_t address", "uint64_t bytes")
record("xmBindGlobal", "queued", "Place global number `index` of a module at an address of the program's memory.",
       "uint64_t module", "uint32_t index", "uint32_t reserved", "uint64_t address")
queued("cuModuleUnload", hmod=Gone("module"), client="custom", server="custom")
local("cuModuleLoad", "cuModuleLoadData", "cuModuleLoadDataEx", "cuModuleLoadFatBinary", "cuModuleGetFunction",
      "cuModuleGetGlobal_v2", "cuModuleGetLoadingMode", "cuModuleGetFunctionCount", "cuModuleEnumerateFunctions",
      "cuLibraryLoadData", "cuLibraryLoadFromFile", "cuLibraryUnload", "cuLibraryGetKernel", "cuLibraryGetModule",
      "cuLibraryGetGlobal", "cuLibraryGetKernelCount", "cuLibraryEnumerateKernels", "cuKernelGetFunction",
      "cuKernelGetName", "cuKernelGetLibrary", "cuKernelGetAttribute", "cuKernelSetAttribute", "cuKernelSetCacheConfig",
      "cuKernelGetParamInfo", "cuFuncGetName", "cuFuncGetModule", "cuFuncGetAttribute", "cuFuncSetCacheConfig",
      "cuFuncSetSharedMemConfig", "cuFuncGetParamInfo", "cuFuncIsLoaded", "cuFuncLoad",
      note="images go to the server once; kernels' layouts come back with the load")
record("xmLink", "synchronous", "Link what the payload names (see link_request.h), or part of it; the reply is the "
       "answer from `offset` on.", "uint64_t link", "uint64_t offset", "uint32_t complete", "uint32_t reserved",
       volatile=True)
record("xmLinkEnd", "queued", "The images in the payload, numbers, were inputs of a link that is over.",
       "uint64_t link")
local("cuLinkCreate_v2", "cuLinkAddData_v2", "cuLinkAddFile_v2", "cuLinkComplete", "cuLinkDestroy",
      note="xmLink: the driver of the device links")
queued("cuFuncSetAttribute", hfunc=function, client="custom", server="custom")

# --- launches --------------------------------------------------------------------------------------------------
LAUNCH = ("uint64_t function", "uint32_t grid_x", "uint32_t grid_y", "uint32_t grid_z", "uint32_t block_x",
          "uint32_t block_y", "uint32_t block_z", "uint32_t shared_bytes", "uint32_t attributes",
          "uint32_t parameter_bytes", "uint32_t cooperative", "uint64_t stream")
record("xmLaunch", "queued", "Launch a kernel. The payload holds `attributes` CUlaunchAttribute structures, then the "
       "parameters, packed as the kernel's layout says.", *LAUNCH)
record("xmFirstLaunch", "synchronous", "The same, and whether the device takes it: of each shape of cooperative "
       "launches and clusters, the first.", *LAUNCH)
local("cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchCooperativeKernel", "cuLaunch", "cuLaunchGrid",
      note="checked against the kernel's limits, then xmLaunch (cooperative or with clusters, the first time: "
           "xmFirstLaunch)")
synchronous("cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags", numBlocks=Out(), func=function, client="custom")
record("xmClusters", "synchronous", "How many clusters of a launch fit the device, or how large one can be. Arguments "
       "and payload as in xmLaunch, without parameters; the reply is an int.", "uint64_t function", "uint32_t grid_x",
       "uint32_t grid_y", "uint32_t grid_z", "uint32_t block_x", "uint32_t block_y", "uint32_t block_z",
       "uint32_t shared_bytes", "uint32_t attributes", "uint32_t potential_size", "uint32_t reserved")
local("cuOccupancyMaxActiveClusters", "cuOccupancyMaxPotentialClusterSize", note="xmClusters")
local("cuOccupancyMaxActiveBlocksPerMultiprocessor", "cuOccupancyMaxPotentialBlockSize",
      "cuOccupancyMaxPotentialBlockSizeWithFlags", "cuOccupancyAvailableDynamicSMemPerBlock")

# --- graphs: built and kept in the client; the server hears of one when it becomes executable ----------------------
local("cuStreamBeginCapture", "cuStreamBeginCapture_v2", "cuStreamBeginCaptureToGraph", "cuStreamEndCapture",
      "cuStreamIsCapturing", "cuStreamGetCaptureInfo", "cuStreamGetCaptureInfo_v2", "cuStreamGetCaptureInfo_v3",
      "cuStreamUpdateCaptureDependencies", "cuStreamUpdateCaptureDependencies_v2",
      "cuThreadExchangeStreamCaptureMode", note="work goes into a graph instead of the journal")
local("cuGraphCreate", "cuGraphDestroy", "cuGraphClone", "cuGraphNodeFindInClone", "cuGraphAddKernelNode",
      "cuGraphAddKernelNode_v2", "cuGraphAddMemcpyNode", "cuGraphAddMemsetNode", "cuGraphAddHostNode",
      "cuGraphAddChildGraphNode", "cuGraphAddEmptyNode", "cuGraphAddEventRecordNode", "cuGraphAddEventWaitNode",
      "cuGraphAddMemAllocNode", "cuGraphAddMemFreeNode", "cuGraphAddNode", "cuGraphAddNode_v2", "cuGraphDestroyNode",
      "cuGraphNodeGetType", "cuGraphKernelNodeGetParams", "cuGraphKernelNodeGetParams_v2",
      "cuGraphKernelNodeSetParams", "cuGraphKernelNodeSetParams_v2", "cuGraphMemcpyNodeGetParams",
      "cuGraphMemcpyNodeSetParams", "cuGraphMemsetNodeGetParams", "cuGraphMemsetNodeSetParams",
      "cuGraphHostNodeGetParams", "cuGraphHostNodeSetParams", "cuGraphChildGraphNodeGetGraph",
      "cuGraphEventRecordNodeGetEvent", "cuGraphEventRecordNodeSetEvent", "cuGraphEventWaitNodeGetEvent",
      "cuGraphEventWaitNodeSetEvent", "cuGraphMemAllocNodeGetParams", "cuGraphMemFreeNodeGetParams",
      "cuGraphAddBatchMemOpNode", "cuGraphBatchMemOpNodeGetParams", "cuGraphBatchMemOpNodeSetParams",
      "cuGraphConditionalHandleCreate",
      "cuGraphNodeSetParams", "cuGraphKernelNodeGetAttribute", "cuGraphKernelNodeSetAttribute",
      "cuGraphKernelNodeCopyAttributes", "cuGraphGetNodes", "cuGraphGetRootNodes", "cuGraphGetEdges",
      "cuGraphGetEdges_v2", "cuGraphNodeGetDependencies", "cuGraphNodeGetDependencies_v2",
      "cuGraphNodeGetDependentNodes", "cuGraphNodeGetDependentNodes_v2", "cuGraphAddDependencies",
      "cuGraphAddDependencies_v2", "cuGraphRemoveDependencies", "cuGraphRemoveDependencies_v2", "cuGraphDebugDotPrint",
      "cuUserObjectCreate", "cuUserObjectRetain", "cuUserObjectRelease", "cuGraphRetainUserObject",
      "cuGraphReleaseUserObject", "cuDeviceGraphMemTrim", "cuDeviceGetGraphMemAttribute",
      "cuDeviceSetGraphMemAttribute", note="a graph lives in the client")
local("cuGraphInstantiate", "cuGraphInstantiate_v2", "cuGraphInstantiateWithFlags", "cuGraphInstantiateWithParams",
      "cuGraphExecUpdate", "cuGraphExecUpdate_v2", note="xmGraph, with the graph as an image")
local("cuGraphExecKernelNodeSetParams", "cuGraphExecKernelNodeSetParams_v2", "cuGraphExecMemcpyNodeSetParams",
      "cuGraphExecMemsetNodeSetParams", "cuGraphExecHostNodeSetParams", "cuGraphExecChildGraphNodeSetParams",
      "cuGraphExecEventRecordNodeSetEvent", "cuGraphExecEventWaitNodeSetEvent", "cuGraphExecNodeSetParams",
      "cuGraphExecBatchMemOpNodeSetParams",
      "cuGraphNodeSetEnabled", "cuGraphNodeGetEnabled", "cuGraphExecGetFlags",
      note="the next launch brings the server up to date")
local("cuGraphLaunch", "cuGraphUpload", note="xmGraphLaunch")
local("cuGraphExecDestroy", note="xmGraphDestroy")
record("xmGraph", "synchronous", "Make a graph executable, or make an executable one do what this graph does. The "
       "image is one of graph_image.h.", "uint64_t exec", "uint64_t image", "uint64_t flags", "uint32_t update",
       "uint32_t reserved")
record("xmGraphLaunch", "queued", "Launch an executable graph, or only bring it to the device.", "uint64_t exec",
       "uint64_t stream", "uint32_t upload", "uint32_t reserved")
record("xmGraphDestroy", "queued", "An executable graph is not needed any more.", "uint64_t exec")

# --- tensor maps: what they look like only the device's driver knows ---------------------------------------------
record("xmTensorMap", "synchronous", "Make a tensor map, or (replace) give one another address; the reply is the map. "
       "`form` says which function it is, and which of the fields count.", "uint32_t form", "uint32_t type",
       "uint32_t rank", "uint32_t interleave", "uint32_t swizzle", "uint32_t promotion", "uint32_t fill",
       "uint32_t channels", "uint32_t pixels", "uint32_t mode", "uint64_t address", "uint64_t sizes[5]",
       "uint64_t strides[5]", "uint32_t box[5]", "uint32_t steps[5]", "int32_t lower[3]", "int32_t upper[3]",
       "uint64_t map[16]")
local("cuTensorMapEncodeTiled", "cuTensorMapEncodeIm2col", "cuTensorMapEncodeIm2colWide", "cuTensorMapReplaceAddress",
      note="xmTensorMap: requested of the device's driver each time")

# --- numbers of optimizer state; here at the end, so that other records keep their numbers ------------------------
record("xmNameNumbers", "queued", "[address, address+bytes) holds numbers of optimizer state, of a type of numbers.h, "
       "which a lossy checkpoint may round: until the memory is freed, or this is taken back.", "uint64_t address",
       "uint64_t bytes", "uint32_t type", "uint32_t reserved")
record("xmForgetNumbers", "queued", "What is named and has bytes of [address, address+bytes) is named no longer.",
       "uint64_t address", "uint64_t bytes")

# --- earlier forms of functions, the same in every respect: answered as the form named ----------------------------
SAME_AS: dict[str, str] = {
    name: f"{name}_v2"
    for name in ("cuCtxCreate", "cuCtxDestroy", "cuCtxPopCurrent", "cuCtxPushCurrent", "cuDevicePrimaryCtxRelease",
                 "cuDevicePrimaryCtxReset", "cuDevicePrimaryCtxSetFlags", "cuEventDestroy", "cuLinkAddData",
                 "cuLinkAddFile", "cuLinkCreate", "cuMemHostRegister",
                 "cuStreamBatchMemOp", "cuStreamDestroy", "cuStreamWaitValue32", "cuStreamWaitValue64",
                 "cuStreamWriteValue32", "cuStreamWriteValue64")
}

# --- which family of the server's handlers (a field of Handlers) executes what is written by hand -----------------
HANDLERS: dict[str, tuple[str, ...]] = {
    "streams": ("cuStreamDestroy_v2",),
    "variables": ("xmGlobal", "xmTwin", "xmVariables"),
    "peers": ("xmPeer",),
    "events": ("cuCtxSynchronize", "cuStreamSynchronize", "cuStreamQuery", "cuStreamWaitValue32_v2",
               "cuStreamWaitValue64_v2", "cuEventRecordWithFlags", "cuEventSynchronize", "cuEventElapsedTime_v2"),
    "copies": ("xmCopyFromHost", "xmCopyFromPinned", "xmCopyToHost", "xmCopyToPinned", "xmCopy2D",
               "cuMemcpyDtoDAsync_v2"),
    "host_functions": ("xmHostFunc",),
    "collectives": ("xmCommInit", "xmCommSplit", "xmCommEnd", "xmCommGroup"),
    "modules": ("xmImage", "xmImageFile", "xmModuleLoad", "xmModuleInfo", "xmKernel", "xmBindGlobal", "xmLink",
                "xmLinkEnd", "cuFuncSetAttribute", "cuModuleUnload"),
    "launches": ("xmLaunch", "xmFirstLaunch", "xmClusters"),
    "graphs": ("xmGraph", "xmGraphLaunch", "xmGraphDestroy"),
    "memory": ("xmGrow", "xmShrink", "xmAlloc", "xmFree", "xmDiscard", "xmReuse", "xmPin", "xmUnpin",
               "xmNameNumbers", "xmForgetNumbers", "cuMemGetInfo_v2"),
    "contexts": ("xmOpen", "xmLimit", "xmContextReset"),
    "tensor_maps": ("xmTensorMap",),
}

# --- what a record's work is, for who adds up where the time of a replay goes; the others are kOther ------------------
WORK: dict[str, tuple[str, ...]] = {
    "kLaunch": ("xmLaunch", "xmGraphLaunch"),
    "kCopy": ("xmCopyFromHost", "xmCopyFromPinned", "xmCopyToHost", "xmCopyToPinned", "xmCopy2D",
              "cuMemcpyDtoDAsync_v2", "cuMemsetD8Async", "cuMemsetD16Async", "cuMemsetD32Async"),
    "kCode": ("xmImage", "xmImageFile", "xmModuleLoad", "xmKernel", "xmVariables", "xmFirstLaunch", "xmLink", "xmGraph",
              "cuModuleUnload"),
    "kOrder": ("cuEventRecordWithFlags", "cuStreamWaitEvent", "cuCtxSynchronize", "cuStreamSynchronize",
               "cuEventSynchronize"),
}

# --- records whose bytes may be in the copy log ---------------------------------------------------------------------
KEEPS_BYTES: tuple[str, ...] = ("xmCopyFromPinned", "xmCopyToPinned")

# --- records that name a stream, but are not work in it -----------------------------------------------------------
UNORDERED: tuple[str, ...] = ("xmAlloc", "xmFree")

# --- device functions that only the server calls: part of the driver table a device fills in --------------------
SERVER_ONLY: tuple[str, ...] = (
    "cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute",
    "cuDeviceTotalMem_v2", "cuDeviceGetUuid_v2", "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxReset_v2", "cuCtxSetCurrent", "cuCtxSynchronize", "cuCtxGetLimit", "cuCtxSetLimit",
    "cuMemGetInfo_v2", "cuLinkCreate_v2", "cuLinkAddData_v2", "cuLinkComplete", "cuLinkDestroy",
    "cuMemAddressReserve", "cuMemAddressFree", "cuMemCreate", "cuMemRelease", "cuMemMap", "cuMemUnmap",
    "cuMemSetAccess", "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle",
    "cuMemGetAllocationGranularity", "cuMemHostRegister_v2", "cuMemHostUnregister",
    "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuMemcpyDtoDAsync_v2", "cuMemcpy2DAsync_v2",
    "cuMemcpyPeerAsync", "cuMemcpy3DPeerAsync", "cuDeviceCanAccessPeer", "cuDeviceGetP2PAttribute",
    "cuStreamSynchronize", "cuStreamQuery", "cuEventQuery", "cuEventSynchronize", "cuEventRecordWithFlags",
    "cuModuleLoadData", "cuModuleUnload", "cuModuleGetFunctionCount", "cuModuleEnumerateFunctions", "cuFuncGetName",
    "cuFuncGetParamInfo", "cuFuncGetAttribute", "cuModuleGetGlobal_v2", "cuLaunchKernelEx", "cuLaunchHostFunc",
    "cuStreamWriteValue64_v2", "cuEventCreate", "cuEventDestroy_v2", "cuStreamDestroy_v2",
    "cuStreamWaitValue32_v2", "cuStreamWaitValue64_v2", "cuFuncSetAttribute", "cuEventElapsedTime_v2",
    "cuOccupancyMaxActiveClusters", "cuOccupancyMaxPotentialClusterSize", "cuFuncLoad",
    "cuTensorMapEncodeTiled", "cuTensorMapEncodeIm2col", "cuTensorMapEncodeIm2colWide", "cuTensorMapReplaceAddress",
    "cuGraphCreate",
    "cuGraphDestroy", "cuGraphAddEmptyNode", "cuGraphInstantiateWithFlags", "cuGraphExecUpdate_v2", "cuGraphUpload",
    "cuGraphConditionalHandleCreate", "cuGraphAddNode_v2",
    "cuGraphLaunch", "cuGraphExecDestroy", "cuStreamBeginCaptureToGraph", "cuStreamEndCapture",
    "cuStreamGetCaptureInfo_v3",
)

# --- what is not in this table, and why ---------------------------------------------------------------------------
# (names, why); the first that fits counts. Earlier forms of a function that is in the table need no line. A function
# of cuda.h without a reason fails the build, and so does a line that fits none.
NOT_SUPPORTED: tuple[tuple[str, str], ...] = (
    (r"cuArray.*|cuMipmappedArray.*|cu(Tex|Surf)(Ref|Object).*|cuModuleGet(Tex|Surf)Ref|cuParamSetTexRef"
     r"|cuDeviceGetTexture1DLinearMaxWidth|cuMemcpy(AtoA|AtoD|AtoH|DtoA|HtoA).*|cuMemMapArrayAsync",
     "arrays, textures and surfaces: how they lie in memory only the driver knows"),
    (r"cuMemAllocManaged|cuMemAdvise.*|cuMemPrefetch.*|cuMemDiscard.*|cuMemRange.*|cuStreamAttachMemAsync"
     r"|cuLibraryGetManaged",
     "managed memory: its pages would move between two processes; MANAGED_MEMORY is reported as 0"),
    (r"cuIpc.*|cuMemPool(Export|Import).*|cuMem(Export|Import).*|cuMemGetHandleForAddressRange",
     "memory and events shared with other processes"),
    (r"cuMulticast.*", "NVLink multicast"),
    (r"cuGreenCtx.*|cuDev(Sm)?Resource.*|cu(Ctx|Device)GetDevResource|cuCtxFromGreenCtx|cuStreamGetGreenCtx"
     r"|cuCtx(RecordEvent|WaitEvent)", "green contexts"),
    (r"cu(ImportExternal|DestroyExternal|ExternalMemory|SignalExternal|WaitExternal).*|cuGraph.*ExternalSemaphores.*"
     r"|cuGraphics.*|cuDeviceGetNvSciSyncAttributes",
     "memory and semaphores of graphics and other interfaces: their handles belong to the program's process"),
    (r"cuCheckpoint.*", "the driver's own checkpoints of a process"),
    (r"cuCoredump.*|cuLogs.*", "dumps and logs of the driver, which is in another process"),
    (r"cuDevice(Unr|R)egisterAsyncNotification", "warnings that device memory runs low: the server's business"),
    (r"cuDeviceGet(Host|P2P)AtomicCapabilities|cuDeviceGetExecAffinitySupport", "no library tested asks"),
    (r"cuMem(Get|Set)MemPool|cuMemGetDefaultMemPool", "pools by location, new in CUDA 13"),
    (r"cuMemBatchDecompressAsync", "no library tested calls it"),
    (r"cuLibraryGetUnifiedFunction", "functions with one address in program and device"),
    (r"cuLaunchCooperativeKernelMultiDevice|cuLaunchGridAsync|cuFuncSet(BlockShape|SharedSize)|cuParamSet.*"
     r"|cuCtx(Attach|Detach)", "deprecated"),
)

# --- the driver's unpublished tables (cuGetExportTable) -----------------------------------------------------------
@dataclass(frozen=True)
class ExportTable:
    """``answers``: the slots that are called, each with the function of export_tables.cc that answers and what it
    gives. The other slots name themselves in the job's log. The first entry of a ``sized`` table is its size."""

    name: str
    uuid: str
    slots: int
    requested_by: str
    answers: dict[int, tuple[str, str]]
    sized: bool = True


EXPORT_TABLES: tuple[ExportTable, ...] = (
    ExportTable("libcudart", "6bd5fb6c-5bf4-e74a-8987-d93912fd9df9", 13, "every copy of libcudart", {
        1: ("load_wrapper", "loads a module"),
        2: ("get_primary_context", "the primary context's handle"),
        6: ("load_wrapper_with_options", "loads a module"),
        8: ("load_fat_binary", "loads a module"),
        12: ("nothing", "success"),
    }),
    ExportTable("tools hooks", "a094798c-2e74-2e74-93f2-0800200c0a66", 7, "every copy of libcudart", {
        2: ("no_hooks<1024>", "an array of 1024 zeros"),
        6: ("no_hooks<14>", "an array of 14 zeros"),
    }),
    ExportTable("tools' thread data", "42d85a81-23f6-cb47-8298-f6e78a3aecdc", 4, "libcudart, cuBLASLt", {
        2: ("current_context", "the current context"),
    }),
    ExportTable("context-local storage", "c693336e-1121-df11-a8c3-68f355d89593", 4, "every copy of libcudart", {
        0: ("storage_put", "keeps a value"),
        1: ("storage_delete", "forgets it"),
        2: ("storage_get", "the value"),
    }, sized=False),
    ExportTable("context checks", "263e8860-7cd2-6143-92f6-bbd5006dfa7e", 15, "every copy of libcudart", {
        2: ("check_context", "0"),
        3: ("nothing", "success"),
    }),
    ExportTable("integrity", "d4082055-bde6-704b-8d34-ba123c66e1f2", 3, "every copy of libcudart", {
        1: ("check_integrity", "the answer to a challenge"),
    }),
    ExportTable("cuBLAS", "21318c60-9714-3248-8ca6-41ff7324c8f2", 93, "cuBLAS, cuBLASLt, cuFFT", {
        4: ("context_number", "a number for a context"),
        39: ("stream_number", "a number for a stream"),
        51: ("own_stream", "the driver's own handle of a stream"),
    }),
    ExportTable("cuBLASLt bf16", "1734dc26-800d-4745-8726-c0f1e7dd8bca", 17, "cuBLASLt", {
        4: ("zero_for_both", "two zeros"),
    }),
    ExportTable("cuFFT", "6e163fbe-b958-444d-835c-e182aff1991e", 99, "cuFFT", {
        7: ("visit_functions", "a module's functions, one by one"),
    }),
    # Of a table with slot 6 they ask no second one for what releases a result.
    ExportTable("compile cache", "da9151d3-3ae6-cc41-a5c0-4f26d533e328", 7, "NVRTC, nvJitLink", {
        1: ("make_compile_key", "a key for what is to be compiled"),
        2: ("free_compile_key", "nothing"),
        3: ("find_compiled", "what an earlier run compiled"),
        4: ("add_compiled", "keeps it for later runs"),
        6: ("free_compiled", "nothing"),
    }),
)

# Tables that are requested and not there, and names (patterns) that are looked up and that no header used here has.
# Nobody misses them, and why.
DENIED_TABLES: dict[str, str] = {
    "f8cff951-2146-8b4e-b9e2-fb469e7c0dd9": "libcudart 13 asks before cuInit, and goes on without",
}
UNKNOWN_NAMES: dict[str, str] = {
    r"cu(Graphics)?(GL|EGL|VDPAU)\w+": "OpenGL, EGL and VDPAU, which have headers of their own: every libcudart looks "
                                      "them up when it is loaded",
    r"cuGraphicsResourceGetMappedEglFrame": "the same",
    r"cuProfilerInitialize": "declared no more; every libcudart looks it up when it is loaded",
    r"cuEventCreateFromEGLSync|cuCheckpointOperationComplete|cuCoredump(Der|R)egister(Start|Complete)Callback|cuDevSmResourceSplit"
    r"|cuDeviceGet(Clique(Count|Info)|FabricClusterUuid)|cuFabricCpyBatchAsync|cu(Func|Kernel)GetParamCount"
    r"|cuGraph(Exec)?GetId|cuGraphNodeGet(ContainingGraph|LocalId|Params|ToolsId)|cuLogicalEndpoint\w+"
    r"|cuMemGetLocationInfo|cuMemcpy(3D)?WithAttributesAsync|cuStream(Begin|End)CaptureToCig"
    r"|cuStreamBeginRecaptureToGraph|cuStreamGetDevResource|cuTensorMapSetAllocationClass":
        "newer than CUDA 13.0: cuda.bindings looks up all that it knows when it is first used, and does without",
}

# --- error texts that programs and people look for; the others follow from the name ------------------------------
ERROR_TEXTS: dict[str, str] = {
    "CUDA_SUCCESS": "no error",
    "CUDA_ERROR_INVALID_VALUE": "invalid argument",
    "CUDA_ERROR_NOT_INITIALIZED": "initialization error",
    "CUDA_ERROR_DEINITIALIZED": "driver shutting down",
    "CUDA_ERROR_NO_DEVICE": "no CUDA-capable device is detected",
    "CUDA_ERROR_INVALID_DEVICE": "invalid device ordinal",
    "CUDA_ERROR_INVALID_IMAGE": "device kernel image is invalid",
    "CUDA_ERROR_INVALID_CONTEXT": "invalid device context",
    "CUDA_ERROR_INVALID_HANDLE": "invalid resource handle",
    "CUDA_ERROR_NOT_FOUND": "named symbol not found",
    "CUDA_ERROR_NOT_READY": "device not ready",
    "CUDA_ERROR_NOT_SUPPORTED": "operation not supported",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "an illegal memory access was encountered",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": "an illegal instruction was encountered",
    "CUDA_ERROR_MISALIGNED_ADDRESS": "misaligned address",
    "CUDA_ERROR_LAUNCH_FAILED": "unspecified launch failure",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "too many resources requested for launch",
    "CUDA_ERROR_LAUNCH_TIMEOUT": "the launch timed out and was terminated",
    "CUDA_ERROR_ASSERT": "device-side assert triggered",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "no kernel image is available for execution on the device",
    "CUDA_ERROR_INVALID_PTX": "a PTX JIT compilation failed",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED": "context is destroyed",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE": "operation not supported on global/shared address space",
    "CUDA_ERROR_INVALID_PC": "invalid program counter",
    "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE": "too many blocks in cooperative launch",
    "CUDA_ERROR_NOT_PERMITTED": "operation not permitted",
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": "operation not permitted when stream is capturing",
    "CUDA_ERROR_SYSTEM_NOT_READY": "system not yet initialized",
    "CUDA_ERROR_UNKNOWN": "unknown error",
}
