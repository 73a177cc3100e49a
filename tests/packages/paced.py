"""paced.py GATE COMMAND...: run a command, and pass on as many of its lines as the file GATE says.

What is ahead of that stands still when it prints, because the pipe to here takes four kilobytes: so a program works
while somebody wants it to, and is in the middle of its work for as long as it takes.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    gate = Path(sys.argv[1])
    with subprocess.Popen(sys.argv[2:], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        fcntl.fcntl(program.stdout, fcntl.F_SETPIPE_SZ, 4096)
        for number, line in enumerate(iter(program.stdout.readline, b"")):
            while int(gate.read_text() or 0) <= number:
                time.sleep(0.02)
            sys.stdout.buffer.write(line)
            sys.stdout.flush()
    return program.returncode


if __name__ == "__main__":
    sys.exit(main())
