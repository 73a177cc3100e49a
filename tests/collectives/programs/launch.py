"""Starts the ranks of a program, one process for each: `launch.py RANKS FOLDER PROGRAM ARGUMENTS`. Prints what they
print, rank by rank, and ends as the first that did not end well. Of one node among several: those that OF_NODE says
(environment), as `FIRST-LAST`."""

import os
import subprocess
import sys
import time
from pathlib import Path

ranks, folder, program = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
first, last = map(int, os.environ.get("OF_NODE", f"0-{ranks - 1}").split("-"))
children = {}
for rank in range(first, last + 1):
    command = [sys.executable, program, str(rank), str(ranks), str(folder), *sys.argv[4:]]
    # Files and no pipes: nobody reads while they run.
    with (folder / f"out.{rank}").open("w") as out:
        children[rank] = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    (folder / f"pid.{rank}").write_text(str(children[rank].pid))
while any(child.poll() is None for child in children.values()):
    time.sleep(0.01)
for rank, child in children.items():
    for line in (folder / f"out.{rank}").read_text().splitlines():
        print(f"{rank}: {line}")
    print(f"{rank} ended with {child.returncode}", flush=True)
sys.exit(next((abs(child.returncode) for child in children.values() if child.returncode), 0))
