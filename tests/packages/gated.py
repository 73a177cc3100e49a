"""gated.py PROGRAM ARGUMENT...: run a program of Python, which stands still after so many lines, or after as many as
the file `open` says (`inf`: not any more). The gate is within the program, so it is still there when that was restored
from a checkpoint.
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path
from typing import TextIO

LINES = 5


class Gate:
    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._lines = 0

    def write(self, text: str) -> None:
        self._output.write(text)
        self._lines += text.count("\n")
        if self._lines >= LINES:
            self.flush()
            while self._lines >= _allowed():
                time.sleep(0.02)

    def flush(self) -> None:
        self._output.flush()


def _allowed() -> float:
    try:
        return float(Path("open").read_text() or LINES)  # nothing: it is being written
    except FileNotFoundError:
        return LINES


if __name__ == "__main__":
    del sys.argv[0]
    sys.stdout = Gate(sys.stdout)
    runpy.run_path(sys.argv[0], run_name="__main__")
