"""NCCL's functions: one row for each that libnccl 2.28.9 exports.

`generate_nccl.py` turns it into `libnccl.so.2` (a stub for each function, and for its `pnccl` name) and the list of
what the client implements. Signatures are those of nccl.h; a type that no program needs to look into is a pointer here.

done       `xmig::client::<name>`, in shim/client/collectives, with this signature
refused    the stub answers; the first call in a process is named in the job's log. Frameworks that ask for it go on
           without, as with an older NCCL
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

VERSION = 22809  # ncclGetVersion


@dataclass(frozen=True)
class Function:
    name: str
    arguments: str
    call: Literal["done", "refused"] = "done"
    result: str = "ncclResult_t"
    refusal: str = "ncclInvalidUsage"  # what a refused one returns


BUFFERS = "const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype"
END = "ncclComm_t comm, CUstream stream"
RESOURCES = "void* outHandle, void* outRequirements"
TEAM = "(ncclTeam_t{1, 0, 1})"

FUNCTIONS: tuple[Function, ...] = (
    Function("ncclGetVersion", "int* version"),
    Function("ncclGetUniqueId", "ncclUniqueId* uniqueId"),
    Function("ncclGetErrorString", "ncclResult_t result", result="const char*"),
    Function("ncclGetLastError", "ncclComm_t comm", result="const char*"),
    # --- communicators
    Function("ncclCommInitRank", "ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank"),
    Function(
        "ncclCommInitRankConfig", "ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank, ncclConfig_t* config"
    ),
    Function(
        "ncclCommInitRankScalable",
        "ncclComm_t* newcomm, int nranks, int myrank, int nId, ncclUniqueId* commIds, ncclConfig_t* config",
    ),
    Function("ncclCommInitAll", "ncclComm_t* comm, int ndev, const int* devlist"),
    Function("ncclCommSplit", "ncclComm_t comm, int color, int key, ncclComm_t* newcomm, ncclConfig_t* config"),
    Function(
        "ncclCommShrink",
        "ncclComm_t comm, int* excludeRanksList, int excludeRanksCount, ncclComm_t* newcomm, "
        "ncclConfig_t* config, int shrinkFlags",
        "refused",
    ),
    Function("ncclCommRevoke", "ncclComm_t comm, int revokeFlags", "refused"),
    Function("ncclCommFinalize", "ncclComm_t comm"),
    Function("ncclCommDestroy", "ncclComm_t comm"),
    Function("ncclCommAbort", "ncclComm_t comm"),
    Function("ncclCommGetAsyncError", "ncclComm_t comm, ncclResult_t* asyncError"),
    Function("ncclCommCount", "const ncclComm_t comm, int* count"),
    Function("ncclCommCuDevice", "const ncclComm_t comm, int* device"),
    Function("ncclCommUserRank", "const ncclComm_t comm, int* rank"),
    # --- groups
    Function("ncclGroupStart", ""),
    Function("ncclGroupEnd", ""),
    Function("ncclGroupSimulateEnd", "ncclSimInfo_t* simInfo"),
    # --- operations
    Function("ncclAllReduce", f"{BUFFERS}, ncclRedOp_t op, {END}"),
    Function("ncclBroadcast", f"{BUFFERS}, int root, {END}"),
    Function("ncclBcast", f"void* buff, size_t count, ncclDataType_t datatype, int root, {END}"),
    Function("ncclReduce", f"{BUFFERS}, ncclRedOp_t op, int root, {END}"),
    Function("ncclAllGather", f"{BUFFERS}, {END}"),
    Function("ncclReduceScatter", f"{BUFFERS}, ncclRedOp_t op, {END}"),
    Function("ncclAlltoAll", f"{BUFFERS}, {END}"),
    Function("ncclGather", f"{BUFFERS}, int root, {END}"),
    Function("ncclScatter", f"{BUFFERS}, int root, {END}"),
    Function("ncclSend", f"const void* sendbuff, size_t count, ncclDataType_t datatype, int peer, {END}"),
    Function("ncclRecv", f"void* recvbuff, size_t count, ncclDataType_t datatype, int peer, {END}"),
    Function(
        "ncclRedOpCreatePreMulSum",
        "ncclRedOp_t* op, void* scalar, ncclDataType_t datatype, ncclScalarResidence_t residence, ncclComm_t comm",
    ),
    Function("ncclRedOpDestroy", "ncclRedOp_t op, ncclComm_t comm"),
    # --- memory
    Function("ncclMemAlloc", "void** ptr, size_t size"),
    Function("ncclMemFree", "void* ptr"),
    Function("ncclCommRegister", "const ncclComm_t comm, void* buff, size_t size, void** handle"),
    Function("ncclCommDeregister", "const ncclComm_t comm, void* handle"),
    Function("ncclCommWindowRegister", "ncclComm_t comm, void* buff, size_t size, ncclWindow_t* win, int winFlags"),
    Function("ncclCommWindowDeregister", "ncclComm_t comm, ncclWindow_t win"),
    # --- communication that kernels of the program begin themselves: they would need the server's own addresses
    Function("ncclDevCommCreate", "ncclComm_t comm, const void* requirements, void* outDevComm", "refused"),
    Function("ncclDevCommDestroy", "ncclComm_t comm, const void* devComm", "refused"),
    Function("ncclTeamWorld", "ncclComm_t comm", "refused", "ncclTeam_t", TEAM),
    Function("ncclTeamLsa", "ncclComm_t comm", "refused", "ncclTeam_t", TEAM),
    Function("ncclTeamRail", "ncclComm_t comm", "refused", "ncclTeam_t", TEAM),
    Function("ncclTeamRankToWorld", "ncclComm_t comm, ncclTeam_t team, int rank", "refused", "int", "-1"),
    Function("ncclTeamRankToLsa", "ncclComm_t comm, ncclTeam_t team, int rank", "refused", "int", "-1"),
    Function(
        "ncclGinBarrierCreateRequirement", f"ncclComm_t comm, ncclTeam_t team, int nBarriers, {RESOURCES}", "refused"
    ),
    Function("ncclLsaBarrierCreateRequirement", f"ncclTeam_t team, int nBarriers, {RESOURCES}", "refused"),
    Function("ncclLLA2ACalcSlots", "int maxElts, int maxEltSize", "refused", "int", "0"),
    Function("ncclLLA2ACreateRequirement", f"int nBlocks, int nSlots, {RESOURCES}", "refused"),
    Function("ncclResetDebugInit", "", "refused", "void", ""),
)
# Exported by accident, under C++ rules or without a `pnccl` name: nobody calls it.
INTERNAL: tuple[str, ...] = ("ncclResetDebugInitInternal",)
