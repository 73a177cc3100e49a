"""`python -m tests.bench`: measures what the project promises and writes docs/measurements/journal.json.

Exits non-zero only when something could not be measured, or a result was wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from tests.bench import calls, lives
from tests.bench.native import Programs
from xmigd.errors import XmigError
from xmigd.measurements import FOLDER, Measurements, Row


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=5, help="runs of each, of which the median counts (default 5)")
    parser.add_argument("--kills", type=int, default=500, help="kills in one training run (default 500)")
    parser.add_argument("--out", type=Path, default=FOLDER, help=f"folder of the results (default {FOLDER})")
    options = parser.parse_args()
    console = Console(highlight=False)
    rows: list[Row] = []

    def measured(row: Row) -> None:
        rows.append(row)
        target = "" if row.target is None else f"   target {row.target:g}"
        console.print(f"{row.name:58} {row.value:>14.6g} {row.unit:10}{target}")

    try:
        with tempfile.TemporaryDirectory(prefix="xmig-bench-") as name:
            programs = Programs(Path(name))
            for row in calls.measure(programs, options.runs):
                measured(row)
            for row in lives.measure(programs, options.runs, options.kills):
                measured(row)
    except (XmigError, lives.Wrong) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    path = Measurements.here("journal", rows).write(options.out)
    console.print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
