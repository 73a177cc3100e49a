"""Launches, and never once waits, until the end.

never_synchronises.py LAUNCHES
"""

import sys

from calls import kernel, launch, malloc, read, say

N = 64
launches = int(sys.argv[1])
fill, mix = kernel("fill"), kernel("mix")
area = malloc(8 * N)
launch(fill, 1, 64, area, 1, N)
for _ in range(launches):
    launch(mix, 1, 64, area, 1, N)
say(launches, read(area, 8 * N))
