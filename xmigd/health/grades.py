"""Grades: what a device reports, and the rung of the answer to it. No I/O.

NVIDIA's own verdict comes first: the recovery action of NVML. Xids are graded as NVIDIA's catalogue of Xid errors names
the immediate action (docs.nvidia.com/deploy/xid-errors): "restart the application" is the program's affair, "reset the
GPU" is a drain, because the reset needs an idle GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum


class Rung(IntEnum):
    """Of the ladder: what is done about a finding. Each includes those below."""

    report = 0
    cordon = 1  # it gets no new process
    drain = 2  # its processes move to other devices while they run
    lose = 3  # its memory is gone: processes go on elsewhere, as far as their content is there


@dataclass(frozen=True, slots=True)
class Found:
    """Something is wrong with a device."""

    code: str
    text: str
    rung: Rung


# Of the program: an illegal address, a push buffer that it has written, its own end. Recovery deals with these.
OF_THE_PROGRAM = frozenset({8, 13, 31, 32, 37, 43, 45, 66, 68, 69, 137})

XIDS: Mapping[int, tuple[Rung, str]] = {
    48: (Rung.drain, "an uncorrectable error in its memory"),
    62: (Rung.drain, "its microcontroller has halted"),
    63: (Rung.report, "a row of its memory is remapped; the remapping takes effect at a reset"),
    64: (Rung.drain, "a row of its memory cannot be remapped"),
    74: (Rung.cordon, "an NVLink error"),
    79: (Rung.lose, "it has fallen off the bus"),
    92: (Rung.report, "many corrected errors in its memory"),
    94: (Rung.cordon, "an uncorrectable error in its memory, contained to one program; it is to be reset when idle"),
    95: (Rung.drain, "an uncorrectable error in its memory that was not contained"),
    109: (Rung.report, "a context switch timed out"),
    110: (Rung.drain, "a security fault"),
    119: (Rung.drain, "its system processor (GSP) does not answer"),
    120: (Rung.drain, "its system processor (GSP) failed"),
    140: (Rung.drain, "an error in its memory from which it has not recovered"),
    143: (Rung.drain, "it could not be initialised"),
    **dict.fromkeys(range(144, 151), (Rung.cordon, "an NVLink error")),
    161: (Rung.drain, "a memory channel cannot be retired"),
}

# nvmlDeviceGpuRecoveryAction_t
RECOVERY_ACTIONS: Mapping[int, tuple[Rung, str]] = {
    1: (Rung.drain, "it has to be reset"),
    2: (Rung.drain, "the node has to be rebooted"),
    3: (Rung.cordon, "what uses its peer-to-peer links has to end"),
    4: (Rung.drain, "it has to be drained and reset"),
    5: (Rung.report, "its IMEX domain has to be recovered"),
    6: (Rung.drain, "its bus has to be reset"),
    7: (Rung.drain, "the node has to be rebooted"),
}

LOST = Found("lost", "the driver has lost it", Rung.lose)
RESET_REQUIRED = Found("reset_required", "the driver does not use it before it is reset", Rung.drain)
REMAP_PENDING = Found("remap_pending", "a row of its memory is to be remapped; reset it when idle", Rung.cordon)
REMAP_FAILED = Found("remap_failed", "a row of its memory cannot be remapped", Rung.drain)


def of_xid(xid: int) -> Found | None:
    """None: it is the program's affair, or (154) its recovery action says more."""
    if xid in OF_THE_PROGRAM or xid == 154:
        return None
    rung, text = XIDS.get(xid, (Rung.report, "see NVIDIA's catalogue of Xid errors"))
    return Found(f"xid_{xid}", f"Xid {xid}: {text}", rung)


def of_recovery_action(action: int) -> Found | None:
    """NVML's verdict; None: nothing is to be done."""
    if action == 0:
        return None
    rung, text = RECOVERY_ACTIONS.get(action, (Rung.report, f"recovery action {action}"))
    return Found("recovery_action", f"NVML says that {text}", rung)


def of_silence(seconds: float) -> Found:
    """Late answers are the only sign that some devices give before they are lost."""
    return Found("silent", f"NVML has not answered for {seconds:g} s", Rung.cordon)
