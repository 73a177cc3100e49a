from __future__ import annotations

from pathlib import Path


def processes_of(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children") if Path(f"/proc/{one}").exists() else []:
            found += [int(c) for c in task.read_text().split()]
    return found
