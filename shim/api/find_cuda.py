"""Print the folder of ``cuda.h`` that PyPI's ``nvidia-cuda-runtime`` brings."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def find() -> Path:
    spec = importlib.util.find_spec("nvidia")
    for base in spec.submodule_search_locations or [] if spec else []:
        for folder in sorted(Path(base).glob("cu1*/include"), reverse=True):
            if (folder / "cuda.h").exists():
                return folder
    raise SystemExit("cuda.h not found: pip install 'nvidia-cuda-runtime>=13,<14' into " + sys.executable)


if __name__ == "__main__":
    print(find())
