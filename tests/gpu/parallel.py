"""Ways to train with two ranks: the same losses and weights as natively, with kills, and how long a step takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

from tests.gpu import collectives
from tests.gpu.bench import Bench
from xmigd.measurements import Row

STEPS = 30
TINY = [*collectives.TINY, "--compiler", "eager"]
SETTLED = 10  # steps, whose time is not looked at
TURNS = 3


def measure(bench: Bench) -> Iterator[Row]:
    shared = collectives.shares(bench)
    where = collectives.place(bench)
    # A null device returns nothing, of which a second step would make something else each time.
    words = ["--deterministic", "--steps", str(1 if bench.rehearsal else STEPS), *(["--shared"] if shared else [])]
    words += TINY if bench.rehearsal else ["--batch", "2"] if shared else []
    native = None if bench.rehearsal else collectives.run(bench, None, words, "parallel.py")
    status, killed = bench.scratch / "parallel.status", list[float]()
    with bench.node(devices=collectives.devices(bench)) as node:
        plain = collectives.run(bench, node, words, "parallel.py")
        disturbed = collectives.run(
            bench, node, [*words, "--status", str(status)], "parallel.py",
            partial(collectives.kill_servers, bench, status, killed, apart=5),
        )  # fmt: skip
        recovered = [one for one in node.client.get("/v1/recoveries", limit=1000) if one["outcome"] == "resumed"]
    ways = list(plain[0]["ways"])
    wrong: list[str] = []
    if native is not None:
        wrong = different(native, plain, "undisturbed") + different(native, disturbed, "with kills")
    yield Row(
        name="parallel: differences", value=len(wrong), unit="in all", target=0, better="lower",
        conditions=f"{where}; {', '.join(ways)}; {STEPS} steps of each; {len(killed)} servers killed, {len(recovered)} "
        f"recoveries of ranks; different: {', '.join(wrong[:6]) or 'none'}",
    )  # fmt: skip
    if native is None:
        return
    for way in [each for each in ways if each != "fsdp"]:  # which is measured in turns
        ours, theirs = (median(each[0]["ways"][way]["times_s"][SETTLED:]) for each in (plain, native))
        yield Row(
            name=f"{way}: step", value=round(ours / theirs, 3), unit="× native",
            better="lower",
            conditions=f"{where}; a small model; {1e3 * ours:.4g} ms, natively {1e3 * theirs:.4g}; snapshots taken",
        )  # fmt: skip


def fsdp(bench: Bench) -> Iterator[Row]:
    """Steps with FSDP2, natively and under xMIG in turns: the host bounds them, whose speed changes meanwhile. What
    such a step spends on the device, natively by PyTorch's profiler and under xMIG by its own: of collectives, which
    wait for the other rank, and of the rest. And how long it takes without snapshots."""
    shared, where = collectives.shares(bench), collectives.place(bench)
    steps = 1 if bench.rehearsal else 2 * STEPS
    words = ["--only", "fsdp", "--steps", str(steps), *(["--shared"] if shared else [])]
    words += TINY if bench.rehearsal else ["--batch", "2"] if shared else []
    native = None
    theirs, ours = list[list[float]](), list[list[float]]()
    with bench.node(devices=collectives.devices(bench)) as node:
        for _ in range(1 if bench.rehearsal else TURNS):
            if not bench.rehearsal:
                native = collectives.run(bench, None, [*words, "--kernels", str(SETTLED)], "parallel.py")
                theirs.append(times_of(native)[SETTLED:-SETTLED])
            ours.append(times_of(collectives.run(bench, node, words, "parallel.py"))[SETTLED:])
    if native is not None:
        middle, beside = (median(each for turn in turns for each in turn) for turns in (ours, theirs))
        yield Row(
            name="fsdp: step", value=round(middle / beside, 3), unit="× native", target=1.01, better="lower",
            conditions=f"{where}; GPT-2-small, B=8; {1e3 * middle:.4g} ms, natively {1e3 * beside:.4g}; medians of the "
            f"turns: {of_turns(ours)}, natively {of_turns(theirs)}; snapshots taken",
        )  # fmt: skip
    with bench.node(devices=collectives.devices(bench), profile_every=8) as node:
        xmig = collectives.run(bench, node, words, "parallel.py")
        profile = node.client.get(f"/v1/jobs/{node.client.get('/v1/jobs')[0]['id']}/profile")
    (bench.logs / "fsdp-profile.json").write_text(json.dumps({"native": native, "xmig": profile}))
    with bench.node(devices=collectives.devices(bench), stall_bound=1000) as node:
        alone = collectives.run(bench, node, words, "parallel.py")
    spent = {True: 0.0, False: 0.0}  # ms of a step of a rank, of collectives and of the rest
    for one in profile["operations"]:
        spent[one["kind"] == "collective"] += (one["total_ms"] or 0) / collectives.RANKS / len(times_of(xmig))
    natively = {True: 0.0, False: 0.0}
    for name, (_, us) in (native[0]["ways"]["fsdp"]["kernels"] if native is not None else {}).items():
        natively[name.startswith("nccl")] += us / 1e3 / SETTLED
    step = median(times_of(xmig)[SETTLED:] or [0.0])
    for name, which in (("collectives", True), ("other work", False)):
        yield Row(
            name=f"fsdp: time of the device for {name}", value=round(spent[which], 2), unit="ms of a step",
            better="lower",
            conditions=f"{where}; natively {natively[which]:.4g} ms; estimated from one of 8 operations; "
            f"a step takes {1e3 * step:.4g} ms then",
        )  # fmt: skip
    undisturbed = median(times_of(alone)[SETTLED:] or [0.0])
    yield Row(
        name="fsdp: step without snapshots", value=round(1e3 * undisturbed, 1), unit="ms", better="lower",
        conditions=f"{where}; with a bound of the stall that is never reached",
    )  # fmt: skip


def of_turns(turns: list[list[float]]) -> str:
    return ", ".join(f"{1e3 * median(each):.4g}" for each in turns)


def times_of(ran: list[dict[str, Any]]) -> list[float]:
    found: list[float] = ran[0]["ways"]["fsdp"]["times_s"]
    return found


def different(native: list[dict[str, Any]], runs: list[dict[str, Any]], called: str) -> list[str]:
    return [
        f"{key} of {way}, rank {one['rank']}, {called}"
        for one, other in zip(runs, native, strict=True)
        for way, found in other["ways"].items()
        for key in ("losses", "sha256")
        if one["ways"][way][key] != found[key]
    ]
