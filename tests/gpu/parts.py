"""The parts of `make gpu`: each a name, the time that it takes on an H200, and what measures it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from tests.gpu import (
    checkpoints,
    collectives,
    conformance,
    devices,
    differential,
    faults,
    joining,
    kills,
    memory,
    moves,
    mps,
    nodes,
    nodes_elsewhere,
    packages,
    parallel,
    profile,
    rank_faults,
    rank_graphs,
    rank_losses,
    rank_moves,
    rank_suspension,
    recovery,
    restarts,
    results,
    served,
    sharing,
    speeds,
    stalls,
    steps,
    variables,
)
from tests.gpu.bench import Bench
from tests.gpu.cases import DRIVEN, INJECTED, KILLED, OF_TWO, RESULTS, TIMED, TRAINING, Case
from xmigd.measurements import Row


@dataclass(frozen=True)
class Part:
    """``seconds``: what it takes; it is not begun when less is left. ``alone``: nothing else may use the GPU.
    ``topic``: the file of docs/measurements that its rows go to. ``pair``: a program that it runs natively and under
    xMIG, which can have imported what it needs before."""

    name: str
    group: str
    seconds: float
    measure: Callable[[Bench], Iterable[Row]]
    alone: bool = True
    topic: str = "gpu"
    pair: Case | None = None


# In this order: what has a target comes before what has none, for the time that runs out at the end. What need not be
# alone runs together with its neighbours, the longest first; of its times nothing is promised.
PARTS = [
    Part("faults", "faults", 120, faults.hundred, topic="recoveries"),
    *(Part(case.name, "kills", 80, partial(kills.measure, case=case), topic="recoveries") for case in KILLED),
    Part("faults-graphs", "faults", 40, faults.graphs, topic="recoveries"),
    Part("counters", "kills", 65, variables.measure, alone=False, topic="recoveries"),
    Part("bugs", "faults", 25, faults.bugs, alone=False),
    *(
        Part(case.name, "results", 30, partial(results.measure, case=case), alone=False)
        for case in RESULTS
        if not case.fills
    ),
    Part("two-jobs", "results", 30, results.two_jobs, alone=False),
    Part("files", "results", 15, results.device_files, alone=False),
    *(
        Part(f"{case.name}-again", "steps", 30, partial(steps.once_more, case=case), alone=False)
        for case in TIMED
        if not case.deterministic
    ),
    *(
        Part(case.name, "results", 30, partial(results.measure_alone, case=case), pair=case)
        for case in RESULTS
        if case.fills
    ),
    *(Part(case.name, "steps", 30, partial(steps.measure, case=case), pair=case) for case in TIMED),
    Part("cuinit", "steps", 20, memory.asking),
    Part("conformance", "conformance", 90, conformance.measure, topic="conformance"),
    Part("differential", "devices", 240, differential.measure, topic="differential"),
    Part("recovery", "recovery", 35, recovery.measure),
    Part("speeds", "speeds", 20, speeds.measure),
    Part("profile", "profile", 60, profile.measure),
]

# How long trainings stand still: as long a run again. By name, or all of it with `--only stalls`.
STALLS = [
    Part("snapshots", "stalls", 65, partial(stalls.snapshots, case=TRAINING), topic="stalls", pair=TRAINING),
    *(Part(case.name, "stalls", 60, partial(stalls.measure, case=case), topic="stalls") for case in INJECTED),
]

# What needs two GPUs, suspension apart. By name, by group, or all of it with `--only migration`.
MOVES = [
    Part("move-40GB", "migration", 60, moves.forty, topic="migration"),
    Part("move-training", "migration", 120, moves.training, topic="migration"),
    Part("move-counters", "migration", 45, variables.moved, topic="migration"),
    Part("move-inference", "migration", 60, moves.inference, topic="migration"),
    Part("suspend-40GB", "migration", 45, moves.suspension, topic="migration"),
    *(Part(name, "migration", 60, partial(moves.driver, name=name), topic="migration") for name in DRIVEN),
    Part("move-4GB", "migration", 60, moves.back_and_forth, topic="migration"),
]


# Programs of two GPUs; not of one. By name, by group, or all of it with `--only devices`.
DEVICES = [
    *(
        Part(
            case.name.replace(": ", "-"), "devices", 30, partial(devices.ways, case=case), topic="devices", alone=False
        )
        for case in OF_TWO
    ),
    Part("devices-split", "devices", 90, devices.training, topic="devices", alone=False),
]


# Programs of several ranks: two GPUs, or two ranks on one. By name, or `--only collectives`.
COLLECTIVES = [
    Part("ranks", "collectives", 90, collectives.measure, topic="collectives"),
    Part("init", "collectives", 60, joining.measure, topic="collectives"),
    Part("job-recovery", "collectives", 190, collectives.recovery, topic="collectives"),
    Part("rank-moves", "collectives", 120, rank_moves.measure, topic="collectives"),
    Part("rank-faults", "collectives", 400, rank_faults.measure, topic="collectives"),
    Part("rank-graphs", "collectives", 100, rank_graphs.measure, topic="collectives"),
    Part("rank-suspension", "collectives", 110, rank_suspension.measure, topic="collectives"),
    Part("rank-losses", "collectives", 110, rank_losses.measure, topic="collectives"),
    Part("parallel", "collectives", 200, parallel.measure, topic="collectives"),
    Part("fsdp", "collectives", 170, parallel.fsdp, topic="collectives"),
    *(
        Part(program.part, "packages", 100, partial(packages.measure, program=program), topic="collectives")
        for program in packages.PROGRAMS
    ),
    Part("restarts", "collectives", 240, restarts.measure, topic="collectives"),
    Part("four-on-two", "collectives", 120, collectives.four_on_two, topic="collectives"),
]


# Two GPUs, each of a node of its own; as root. By name, or `--only nodes`.
NODES = [
    Part("nodes-ranks", "nodes", 210, nodes.ranks, topic="collectives"),
    Part("nodes-elsewhere", "nodes", 120, nodes_elsewhere.measure, topic="collectives"),
    Part("nodes-moves", "nodes", 240, nodes.moves, topic="checkpoint"),
]


# Two tenants of one GPU, in turns and at the same time. `--only sharing`, `--only mps`.
SHARING = [
    Part("sharing", "sharing", 240, sharing.measure, topic="sharing"),
    Part("mps-faults", "mps", 60, mps.faults, topic="mps"),
    Part("mps-throughput", "mps", 100, mps.pairs, topic="mps"),
    Part("mps-bugs", "mps", 40, mps.own_bugs, topic="mps"),
]


# Programs that CRIU writes down and restores; as root. By name, or `--only checkpoint`.
CHECKPOINTS = [
    Part("checkpoint-training", "checkpoint", 120, checkpoints.training, topic="checkpoint"),
    Part("checkpoint-lossy", "checkpoint", 100, checkpoints.lossy, topic="checkpoint"),
    Part("checkpoint-ranks", "checkpoint", 120, checkpoints.ranks, topic="checkpoint"),
    Part("served", "checkpoint", 80, served.measure, topic="checkpoint"),
    Part("checkpoint-40GB", "checkpoint", 300, checkpoints.large, topic="checkpoint"),
]


def chosen(only: str | None) -> list[Part]:
    """The parts and groups that are named, separated by commas. Raises ValueError for a name that there is not."""
    if only is None:
        return PARTS
    wanted = {word.strip() for word in only.split(",") if word.strip()}
    every = PARTS + STALLS + MOVES + DEVICES + COLLECTIVES + NODES + CHECKPOINTS + SHARING
    known = {part.name for part in every} | {part.group for part in every}
    if not wanted <= known:
        raise ValueError(f"there is no part {', '.join(sorted(wanted - known))}; there are: {', '.join(sorted(known))}")
    return [part for part in every if {part.name, part.group} & wanted]
