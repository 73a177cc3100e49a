"""Runs a program after the handshake with the daemon and a line on standard input: `start.py PROGRAM ARGUMENTS`.

With XMIG_TEST_STOP_EVERY=N it stops before every Nth of its lines that it has not come to before, prints STOP and waits
for another line on standard input."""

import ctypes
import os
import runpy
import sys
from types import FrameType
from typing import Any

STOP = "-- stopped --"


def stop() -> None:
    """The program does not go on until somebody says so."""
    print(STOP, flush=True)
    sys.stdin.readline()


def stop_on_the_way(path: str, every: int) -> None:
    seen: set[int] = set()
    main = os.getpid()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != path or os.getpid() != main:
            return None
        if event == "line" and frame.f_lineno not in seen:
            seen.add(frame.f_lineno)
            if len(seen) % every == 0:
                stop()
        return trace

    sys.settrace(trace)


def main() -> None:
    if code := ctypes.CDLL("libcuda.so.1").cuInit(0):
        sys.exit(f"cuInit returned {code}")
    print("ready", flush=True)
    sys.stdin.readline()
    sys.argv = sys.argv[1:]
    if every := os.environ.get("XMIG_TEST_STOP_EVERY"):
        stop_on_the_way(sys.argv[0], int(every))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
