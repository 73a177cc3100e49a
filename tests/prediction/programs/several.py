"""Runs a program several times at once: `several.py COUNT PROGRAM`, each with a device of its own, all with this one's
standard input."""

import os
import subprocess
import sys

running = [
    subprocess.Popen([sys.executable, sys.argv[2]], env=os.environ | {"CUDA_VISIBLE_DEVICES": str(rank)})
    for rank in range(int(sys.argv[1]))
]
sys.exit(max(one.wait() for one in running))
