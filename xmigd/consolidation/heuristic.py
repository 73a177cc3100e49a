"""Packings without a solver: devices are emptied by best fit decreasing, or evened out move by move. No I/O."""

from __future__ import annotations

from collections.abc import Collection

from xmigd.consolidation.placement import (
    ENOUGH,
    EPSILON,
    Packing,
    Problem,
    load,
    occupants,
    used_bytes,
    why_not,
    worth,
)

MAX_STEPS = 10_000


def heuristic(problem: Problem) -> Packing:
    """A packing that violates nothing; at worst the present one."""
    return _emptied(problem) if problem.objective == "free_devices" else _evened(problem)


def _emptied(problem: Problem) -> Packing:
    """The device with the least to move is emptied first: its processes, the largest first, go where the least room is
    left after them. One that cannot be emptied whole stays as it is."""
    packing = list(problem.now)
    gone: set[str] = set()  # freed: nothing comes to them
    while True:
        found = occupants(packing)
        candidates = [
            device for device, indices in found.items()
            if device in problem.bin and all(problem.items[index].movable for index in indices)
        ]  # fmt: skip
        for device in sorted(candidates, key=lambda each: (used_bytes(problem, found[each]), each)):
            tried = _without(problem, packing, found, device, gone)
            if tried is not None:
                packing = tried
                gone.add(device)
                break
        else:
            return tuple(packing)


def _without(
    problem: Problem, packing: list[str], found: dict[str, list[int]], device: str, gone: Collection[str]
) -> list[str] | None:
    """With its processes on devices that others use. None: they do not all fit."""
    held = {name: list(indices) for name, indices in found.items() if name != device and name not in gone}
    result = list(packing)
    for index in sorted(found[device], key=lambda each: -problem.items[each].memory_bytes):
        fitting = []
        for target in problem.targets(index):
            if target in held and why_not(problem, target, [*held[target], index]) is None:
                capacity = problem.bin[target].capacity_bytes or 0
                # Where it came from costs no move; then the fullest.
                fitting.append(
                    (target != problem.items[index].device, capacity - used_bytes(problem, held[target]), target)
                )
        if not fitting:
            return None
        best = min(fitting)[2]
        held[best].append(index)
        result[index] = best
    return result


def _evened(problem: Problem) -> Packing:
    """From the device with the most load, as long as the higher one of both falls by it."""
    packing = list(problem.now)
    for _ in range(MAX_STEPS):
        found = occupants(packing)
        loads = {each.id: load(problem, each.id, found.get(each.id, [])) for each in problem.bins}
        best: tuple[float, int, str] | None = None
        for device in sorted(loads, key=lambda each: -loads[each])[:1]:
            for index in found.get(device, []):
                for target in problem.targets(index):
                    together = [*found.get(target, []), index]
                    if target == device or why_not(problem, target, together) is not None:
                        continue
                    left = load(problem, device, [each for each in found[device] if each != index])
                    highest = max(left, load(problem, target, together))
                    if highest < loads[device] - ENOUGH - EPSILON and (best is None or highest < best[0]):
                        best = (highest, index, target)
        if best is None:
            break
        packing[best[1]] = best[2]
    # A move may even out two devices while a third one, as loaded as they were, stays the highest.
    return max(tuple(packing), problem.now, key=lambda each: worth(problem, each))
