"""How long, and how often: what operators set. Seconds, where nothing else is reported."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class MoveLimits:
    downtime_ms: float = 100.0  # copying goes on until the rest fits into it
    max_rounds: int = 20
    start_timeout: float = 30.0
    phase_timeout: float = 300.0
    # A source says within 10 s whether its device came to rest; then it takes a snapshot. That of a rank waits before
    # for communicators and rounds (supervisor/group.py: 20 and 25 s).
    handover_timeout: float = 60.0
    keep_timeout: float = 10.0
    snapshot_patience: float = (
        0.1  # a source that has done nothing since its last snapshot takes none, and says nothing
    )


@dataclass(frozen=True, slots=True)
class Limits:
    max_attempts: int = 5
    start_timeout: float = 30.0
    phase_timeout: float = 300.0
    stable_after: float = 1.0
    stop_grace: float = 10.0
    standby: bool = True
    # What opens contexts holds up in the driver whoever makes a communicator: a standby waits for that.
    settle: float = 0.2  # after its process has opened its devices
    join_patience: float = 5.0  # while communicators are being made; longer than that the process is not left without
    last_checkpoint: bool = False  # what the last snapshot holds is saved before a process is lost
    preload: bool = True  # a standby loads modules and kernels of its process
    hang_timeout: float = 0.0  # seconds in which a server may be waiting for a kernel that hangs
    move: MoveLimits = field(default_factory=MoveLimits)
