"""Runs a program after the handshake with the daemon and a line on standard input: `start.py PROGRAM ARGUMENTS`."""

import ctypes
import runpy
import sys

if code := ctypes.CDLL("libcuda.so.1").cuInit(0):
    sys.exit(f"cuInit returned {code}")
print("ready", flush=True)
sys.stdin.readline()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
