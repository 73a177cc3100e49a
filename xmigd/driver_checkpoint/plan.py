"""What engine=driver can do with a program, and what it cannot, with reasons. Changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from xmigd.driver_checkpoint.machine import Kind
from xmigd.driver_checkpoint.node import UVM_ALLOWED, Gpu, Gpus, Program
from xmigd.migrations.plan import Plan, Target, size
from xmigd.process.migration_events import Reason

CHECKPOINTS, MOVES, IPC = 570, 580, 610  # what each driver brought


@dataclass(frozen=True, slots=True)
class Known:
    """What xMIG knows of its devices that the driver does not."""

    cordoned: Mapping[str, str] = field(default_factory=dict)  # device → why
    failing: Mapping[str, str] = field(default_factory=dict)
    managed: Collection[int] = ()  # pids that were started under xMIG, and their servers


def make_plan(program: Program, gpus: Gpus, host_bytes: int, known: Known, kind: Kind = "move") -> Plan:
    """Every GPU of the node as a target."""
    own = against(program, gpus, host_bytes, known, kind)
    sources = gpus.of(program.pid)
    needed = needed_bytes(program, gpus)
    return Plan(
        process=f"pid:{program.pid}", engine="driver", source=",".join(gpu.device for gpu in sources) or "unknown",
        live_bytes=None, held_bytes=needed,
        targets=[
            Target(gpu.device, [*own, *against_target(program, gpus, gpu, known)], gpu.free_bytes) for gpu in gpus.all
        ],
    )  # fmt: skip


def needed_bytes(program: Program, gpus: Gpus) -> int:
    """Device memory of the program, its context included: what a restore needs."""
    return sum(gpu.used_by[program.pid] for gpu in gpus.of(program.pid))


def against(program: Program, gpus: Gpus, host_bytes: int, known: Known, kind: Kind) -> list[Reason]:
    """What prevents touching it at all."""
    reasons = []
    version, needed = gpus.driver[0], needed_bytes(program, gpus)
    if version < CHECKPOINTS:
        reasons.append(Reason("driver_too_old", f"driver {version} has no checkpoints; {CHECKPOINTS} brought them"))
    elif version < MOVES and kind == "move":
        reasons.append(Reason("driver_too_old", f"driver {version} restores on the same GPU only; {MOVES} on others"))
    if program.pid in known.managed or program.shim:
        reasons.append(Reason("engine_not_possible", "it was started under xMIG: engine=proxy moves it"))
    sources = gpus.of(program.pid)
    if not sources and kind != "resume":
        reasons.append(Reason("no_cuda", f"process {program.pid} uses no GPU of this node"))
    if len(sources) > 1 and kind == "move":
        names = ", ".join(gpu.device for gpu in sources)
        reasons.append(Reason("several_gpus", f"it uses {names}; only a program with one GPU is moved"))
    if any(program.pid in gpu.under_mps for gpu in gpus.all):
        reasons.append(Reason("mps", "it runs under MPS, which the driver's checkpoints do not support"))
    if any(gpu.mig for gpu in sources):
        reasons.append(Reason("mig", "its GPU is in MIG mode: the driver's checkpoints fail there"))
    if program.uvm_bytes > UVM_ALLOWED:
        reasons.append(Reason("managed_memory", f"it maps {size(program.uvm_bytes)} of /dev/nvidia-uvm: managed "
                              "memory, which the driver's checkpoints do not support"))  # fmt: skip
    if program.shares_memory and version < IPC:
        reasons.append(Reason("ipc", f"it shares device memory with other processes, which needs driver {IPC}"))
    if needed > host_bytes and kind != "resume":
        reasons.append(Reason("no_host_memory", f"{size(needed)} have to go to the host's memory, {size(host_bytes)} "
                              "are available"))  # fmt: skip
    return reasons


def against_target(program: Program, gpus: Gpus, target: Gpu, known: Known) -> list[Reason]:
    """What prevents this GPU."""
    reasons = []
    sources = gpus.of(program.pid)
    if target in sources:
        reasons.append(Reason("same_device", f"the process is on {target.device}"))
    if target.device in known.cordoned:
        reasons.append(Reason("cordoned", f"{target.device} is cordoned: {known.cordoned[target.device]}"))
    if target.device in known.failing:
        reasons.append(Reason("failing", f"{target.device} fails: {known.failing[target.device]}"))
    if any(source.name != target.name for source in sources):
        reasons.append(Reason("other_kind", f"{target.device} is a {target.name}, its GPU a {sources[0].name}"))
    if target.mig:
        reasons.append(Reason("mig", f"{target.device} is in MIG mode"))
    if target.exclusive:
        reasons.append(Reason("exclusive", f"{target.device} is in exclusive mode"))
    if (needed := needed_bytes(program, gpus)) > target.free_bytes and target not in sources:
        reasons.append(Reason("no_room", f"{target.device} has room for {size(target.free_bytes)}, it needs "
                              f"{size(needed)}"))  # fmt: skip
    return reasons


def device_map(gpus: Gpus, source: str, target: str) -> list[tuple[str, str]]:
    """For the driver: it has to name every GPU, none twice. Source and target change places, the others stay."""
    swapped = {source: target, target: source}
    return [(gpu.uuid, swapped.get(gpu.uuid, gpu.uuid)) for gpu in gpus.all]
