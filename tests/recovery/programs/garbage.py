"""Writes garbage into its own journal, moves the tail over it, and waits for what happens.

garbage.py CORRUPT.so KIND
"""

import ctypes
import re
import sys

from calls import RUNTIME, expect, malloc, say, write

area = malloc(100)
write(area, bytes(100))
with open("/proc/self/maps") as maps:
    begin = next(int(m[1], 16) for line in maps if (m := re.match(r"([0-9a-f]+)-.*memfd:xmig-journal", line)))
ctypes.CDLL(sys.argv[1]).corrupt(ctypes.c_void_p(begin), int(sys.argv[2]))
code = RUNTIME.code("cudaDeviceSynchronize")
expect(code != 0, "the job is lost")
expect(RUNTIME.code("cudaMemset", area, 0, 10) != 0, "and stays so")
say("lost", code)
