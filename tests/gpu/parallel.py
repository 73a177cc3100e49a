"""Ways to train with two ranks: the same losses and weights as natively, with kills, and how long a step takes."""

from __future__ import annotations

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
    for way in ways:
        ours, theirs = (median(each[0]["ways"][way]["times_s"][SETTLED:]) for each in (plain, native))
        yield Row(
            name=f"{way}: step", value=round(ours / theirs, 3), unit="× native",
            target=1.01 if way == "fsdp" else None, better="lower",
            conditions=f"{where}; {'GPT-2-small, B=8' if way == 'fsdp' else 'a small model'}; {1e3 * ours:.4g} ms, "
            f"natively {1e3 * theirs:.4g}; snapshots taken",
        )  # fmt: skip


def different(native: list[dict[str, Any]], runs: list[dict[str, Any]], called: str) -> list[str]:
    return [
        f"{key} of {way}, rank {one['rank']}, {called}"
        for one, other in zip(runs, native, strict=True)
        for way, found in other["ways"].items()
        for key in ("losses", "sha256")
        if one["ways"][way][key] != found[key]
    ]
