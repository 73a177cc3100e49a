"""`python -m tests.bench`: measures what the project promises and writes
docs/measurements/{journal,profiling,daemon,stall,consolidation,fleet,prediction}.json and rows of collectives.json and
checkpoint.json.

Exits non-zero only when something could not be measured, or a result was wrong.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from tests.bench import calls, daemon, fleet, lives, moves, packing, prediction, profiling, ranks, stall, view
from tests.bench.native import Programs
from xmigd.errors import XmigError
from xmigd.measurements import FOLDER, Measurements, Missing, Row, read

PARTS = (
    "journal", "profiling", "daemon", "writes", "stall", "recovery-by-ranks", "consolidation", "fleet", "fleet-view",
    "moves-between-nodes", "prediction",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=5, help="runs of each, of which the median counts (default 5)")
    parser.add_argument("--kills", type=int, default=500, help="kills in one training run (default 500)")
    parser.add_argument("--seconds", type=float, default=120, help="of two trainings with kills (default 120)")
    parser.add_argument("--moves", type=int, default=200, help="moves between nodes (default 200)")
    parser.add_argument("--only", choices=PARTS, help="one of the parts; writes: some rows of daemon's")
    parser.add_argument("--out", type=Path, default=FOLDER, help=f"folder of the results (default {FOLDER})")
    options = parser.parse_args()
    console = Console(highlight=False)

    def shown(measured: Iterator[Row]) -> list[Row]:
        rows: list[Row] = []
        for row in measured:
            rows.append(row)
            target = "" if row.target is None else f"   target {row.target:g}"
            console.print(f"{row.name:58} {row.value:>14.6g} {row.unit:10}{target}")
        return rows

    def write(topic: str, measured: Iterator[Row], missing: Sequence[Missing] = ()) -> None:
        rows = Measurements.here(topic, shown(measured))
        path = rows.model_copy(update={"missing": list(missing)}).write(options.out)
        console.print(f"written to {path}")

    def put(topic: str, measured: Iterator[Row]) -> None:
        """Among a topic's other rows, which stay; these say themselves of what and when they are, and beside what."""
        load = os.getloadavg()[0]
        now, known = Measurements.here(topic, shown(measured)), read(options.out / f"{topic}.json")
        since = f"; {now.date}, commit {now.commit}, load average before {load:.0f}"
        new = {row.name: row.model_copy(update={"conditions": row.conditions + since}) for row in now.rows}
        rows = [new.pop(row.name, row) for row in known.rows]
        path = known.model_copy(update={"rows": [*rows, *new.values()]}).write(options.out)
        console.print(f"written to {path}")

    try:
        with tempfile.TemporaryDirectory(prefix="xmig-bench-") as name:
            programs = Programs(Path(name))
            if options.only in (None, "journal"):
                lived = lives.measure(programs, options.runs, options.kills)
                write("journal", itertools.chain(calls.measure(programs, options.runs), lived))
            if options.only in (None, "profiling"):
                write("profiling", profiling.measure(programs, options.runs))
            if options.only in (None, "daemon"):
                write("daemon", daemon.measure(programs, options.runs))
            if options.only == "writes":
                put("daemon", daemon.acknowledged(programs, options.runs))
            if options.only in (None, "stall"):
                write("stall", stall.measure(programs, options.seconds))
            if options.only in (None, "recovery-by-ranks"):
                put("collectives", ranks.measure(programs))
            if options.only in (None, "moves-between-nodes"):
                put("checkpoint", moves.measure(Path(name), options.moves))
            if options.only in (None, "consolidation"):
                write("consolidation", packing.measure(options.runs))
            if options.only in (None, "fleet"):
                write("fleet", fleet.measure(options.runs))
            if options.only in (None, "fleet-view"):
                put("fleet", view.measure(Path(name)))
            if options.only in (None, "prediction"):
                write("prediction", prediction.measure(), prediction.MISSING)
    except (XmigError, lives.Wrong) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
