"""Has as many pieces of memory as it is informed: each line on standard input is a number, each answer what is in
them."""

import sys
import zlib

from calls import RUNTIME, c_void_p, malloc, pattern, read, say, write

N, USED = 64 << 20, 1 << 16
pieces: list[int] = []
for line in sys.stdin:
    while len(pieces) > int(line):
        RUNTIME.cudaFree(c_void_p(pieces.pop()))
    while len(pieces) < int(line):
        pieces.append(malloc(N))
        write(pieces[-1], pattern(USED, len(pieces)))
    say(len(pieces), [zlib.crc32(read(piece, USED)) for piece in pieces])
